"""Deceptions under the interpreter: each must be seen, honest neighbours must not be flagged."""

from __future__ import annotations

import asyncio

import pytest
from honesty_corpus import CASES, REFERENCE

import drk.gym.reference
from drk.gym.correctness import nearest_rung
from drk.gym.engine import Gym
from drk.gym.schema import Call, Candidate, Task, TensorSpec
from drk.gym.settings import GymSettings

INPUTS = Call((TensorSpec((40, 100)), TensorSpec((100, 48))))
TASK = Task("product", {"model.py": REFERENCE}, "model.py", "Model", inputs=INPUTS)


@pytest.fixture(scope="module")
def loop_gym():
    loop = asyncio.new_event_loop()
    gym = Gym(GymSettings(device="interpret", seeds=3, offline_compile=False))
    loop.run_until_complete(gym.__aenter__())
    yield loop, gym
    loop.run_until_complete(gym.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(("name", "source", "status", "flag"), CASES, ids=[case[0] for case in CASES])
def test_deceptions(loop_gym, name, source, status, flag) -> None:
    loop, gym = loop_gym
    verdict = loop.run_until_complete(gym.evaluate(TASK, Candidate(source)))
    assert verdict.status == status, (verdict.error, verdict.flags)
    kinds = [found.kind for found in verdict.flags]
    assert kinds == ([flag] if flag else [])


def test_what_a_loose_tolerance_accepts_is_not_called_stale(loop_gym) -> None:
    """The first call's output is read again by the rule that it was accepted by."""
    loop, gym = loop_gym
    reference = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
    task = Task(
        "relu", {"model.py": reference}, "model.py", "Model", inputs=Call((TensorSpec((40, 33)),)), tolerance="paper"
    )
    coarse = reference.replace("Model", "ModelNew").replace("(x)\n", "(x) * 1.001\n")
    verdict = loop.run_until_complete(gym.evaluate(task, Candidate(coarse)))
    assert verdict.accepted, (verdict.error, verdict.flags)
    assert "stale-output" not in [flag.kind for flag in verdict.flags]


def test_refusing_views_is_a_label_and_ignoring_their_strides_is_wrong() -> None:
    reference = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
    task = Task("relu", {"model.py": reference}, "model.py", "Model", inputs=Call((TensorSpec((40, 33)),)))
    refuses = reference.replace("Model", "ModelNew").replace(
        "return", "assert x.is_contiguous(), 'no views'\n        return"
    )
    ignores = reference.replace("Model", "ModelNew").replace(
        "(x)\n", "(torch.as_strided(x, x.shape, (x.shape[1], 1)))\n"
    )

    async def judged(source: str):
        async with Gym(GymSettings(device="interpret", seeds=5, offline_compile=False)) as gym:
            return await gym.evaluate(task, Candidate(source))

    refused, ignored = asyncio.run(judged(refuses)), asyncio.run(judged(ignores))
    assert refused.accepted, refused.error
    assert [(flag.kind, flag.severity) for flag in refused.flags][-1] == ("no-own-kernel", "label")
    assert "no views" in next(flag.proof for flag in refused.flags if flag.kind == "shape-specialised")
    assert ignored.status == "rejected" and "strided" in ignored.error.message


RIGHT = "torch.relu(x) * x.sum(0)"
BODIES = {
    "right": (RIGHT, "accepted"),
    "one wrong element in a hundred": (f"{RIGHT} * (torch.arange(9900) % 100 != 57).view(x.shape)", "rejected"),
    "another shape": (f"({RIGHT})[:-1]", "rejected"),
    "coarse": (f"({RIGHT}).bfloat16().float()", "rejected"),
    "changes its input": (f"{RIGHT} + 0 * x.mul_(2)", "rejected"),
}


def test_large_outputs_are_judged_by_rows_and_digests(monkeypatch) -> None:
    for constant, value in (("WHOLE_ELEMENTS", 1000), ("SAMPLED_ABOVE", 500), ("SAMPLE_ELEMENTS", 200)):
        monkeypatch.setattr(drk.gym.reference, constant, value)
    source = "import torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return BODY\n"
    files = {"model.py": source.replace("BODY", RIGHT)}
    task = Task("large", files, "model.py", "Model", inputs=Call((TensorSpec((300, 33)),)))

    async def scenario() -> None:
        async with Gym(GymSettings(device="interpret", seeds=5, offline_compile=False)) as gym:
            native = (await (await gym.reference(task)).trial(0)).native
            assert native["out"].numel() < 9900 and set(native) == {"out", "out~all", "out~shape"}
            for name, (body, status) in BODIES.items():
                candidate = Candidate(source.replace("Model", "ModelNew").replace("BODY", body))
                verdict = await gym.evaluate(task, candidate)
                assert verdict.status == status, (name, verdict.error)
                assert any(cell.name.endswith("out~all") for cell in verdict.cells) or status == "rejected"

    asyncio.run(scenario())


def test_nearest_rung() -> None:
    rungs = {"tf32": 3e-4, "bf16": 2e-3}
    assert nearest_rung(3.5e-4, rungs) == "tf32"
    assert nearest_rung(1.5e-3, rungs) == "bf16"
    assert nearest_rung(0.5, rungs) is None
    assert nearest_rung(0.0, {}) is None
