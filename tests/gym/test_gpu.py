"""The gym on a real GPU: honest kernels are accepted and timed, deceptions that only a GPU shows are seen."""

from __future__ import annotations

import asyncio

import pytest
from gpu_corpus import CASES, KERNEL, REFERENCE, candidate

from drk.gym.devices import list_gpus
from drk.gym.engine import Gym
from drk.gym.schema import Call, Candidate, Task, TensorSpec
from drk.gym.settings import GymSettings, Timing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not list_gpus(), reason="needs a CUDA device")]
TASK = Task("root", {"model.py": REFERENCE}, "model.py", "Model", inputs=Call((TensorSpec((4096, 4096)),)))


@pytest.fixture(scope="module")
def loop_gym():
    loop = asyncio.new_event_loop()
    gym = Gym(GymSettings(device="cuda:0", timing=Timing(compile_baseline=False, max_s=1.0)))
    loop.run_until_complete(gym.__aenter__())
    yield loop, gym
    loop.run_until_complete(gym.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(("name", "source", "status", "kinds"), CASES, ids=[case[0] for case in CASES])
def test_cases(loop_gym, name, source, status, kinds) -> None:
    loop, gym = loop_gym
    verdict = loop.run_until_complete(gym.evaluate(TASK, Candidate(source)))
    found = {flag.kind for flag in verdict.flags} | ({verdict.error.kind} if verdict.error else set())
    assert verdict.status == status, (verdict.error, verdict.flags, verdict.notes)
    assert (not found and not kinds) or found & set(kinds), (found, verdict.notes)


def test_honest_kernel_is_measured(loop_gym) -> None:
    loop, gym = loop_gym
    verdict = loop.run_until_complete(gym.evaluate(TASK, Candidate(candidate("return root(x)"))))
    assert verdict.reached == "measured" and verdict.honest is True
    assert verdict.coverage is not None and verdict.coverage > 0.95
    assert verdict.speedups is not None and verdict.speedups.eager.low > 1.5
    assert [row.name for row in verdict.kernels if row.owned] == ["root_kernel"]


def test_the_references_kernels_are_measured(loop_gym) -> None:
    loop, gym = loop_gym
    found = loop.run_until_complete(gym.kernels(TASK))
    assert found.gpu == gym.gpu.name
    assert found.kernels and all(row.time_us > 0 and row.launches >= 1 for row in found.kernels)
    assert 0.99 < sum(row.share for row in found.kernels) < 1.01
    lines = REFERENCE.splitlines()
    places = {row.source for row in found.kernels if row.source}
    assert places and all("torch" in lines[int(place.removeprefix("model.py:")) - 1] for place in places), places
    again = loop.run_until_complete(gym.evaluate(TASK, Candidate(candidate("return root(x)"))))
    assert again.status == "accepted", (again.error, again.flags, again.notes)


def test_candidate_equal_to_the_reference_is_no_faster(loop_gym) -> None:
    loop, gym = loop_gym
    same = REFERENCE.replace("Model", "ModelNew")
    verdict = loop.run_until_complete(gym.evaluate(TASK, Candidate(same)))
    assert verdict.speedups is not None
    assert 0.97 < verdict.speedups.eager.value < 1.03, verdict.speedups


def test_who_looks_at_a_task_finds_its_compiled_baseline_ready() -> None:
    async def work() -> None:
        async with Gym(GymSettings(device="cuda:0", timing=Timing(max_s=1.0))) as gym:
            await gym.inspect(TASK)
            session = await gym.reference(TASK)
            assert session.baseline is not None
            handle, answer = await session.baseline.ready()
            assert answer["ok"] and handle is not session.handle
            assert session.baseline.compiled_ahead
            both = [gym.evaluate(TASK, Candidate(candidate(text))) for text in ("return root(x)", "return root(x) * 1")]
            for verdict in await asyncio.gather(*both):
                assert verdict.accepted and verdict.speedups is not None and verdict.speedups.compile is not None

    asyncio.run(work())


def test_a_kernel_named_like_an_aten_kernel_is_not_confused(loop_gym) -> None:
    loop, gym = loop_gym
    source = KERNEL.replace("root_kernel", "add") + (
        "\n\nclass ModelNew(nn.Module):\n    def forward(self, x):\n"
        "        return torch.add(root(x), torch.zeros_like(x))\n"
    )
    verdict = loop.run_until_complete(gym.evaluate(TASK, Candidate(source)))
    assert verdict.accepted and verdict.coverage is not None and 0.1 < verdict.coverage < 0.6
