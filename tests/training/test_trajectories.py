"""Demonstrations by the builtin compiler, each turn judged by the real gym under the interpreter."""

from __future__ import annotations

import ast

import pytest

from drk.gym.engine import Gym
from drk.gym.settings import GymSettings
from drk.training.faults import KINDS, insert_fault
from drk.training.tasks import draw_tasks
from drk.training.trajectories import DemonstrationPlan, builtin_candidates, collect_demonstrations


@pytest.mark.slow
@pytest.mark.long
async def test_faults_are_judged_wrong_and_demonstrations_end_right() -> None:
    tasks = draw_tasks(3, families=["pointwise", "row"], rows=16, seed=5)
    async with Gym(GymSettings(device="interpret", seeds=1, offline_compile=False)) as gym:
        (right, *_) = await builtin_candidates(gym, tasks[0].task, limit=1)
        reached = {}
        for kind in KINDS:
            fault = insert_fault(right.source, kind)
            assert fault is not None, kind
            assert fault.source != right.source
            verdict = await gym.evaluate(tasks[0].task, type(right)(fault.source))
            assert not verdict.accepted, (kind, fault.what)
            reached[kind] = verdict.status
        assert reached == {"syntax": "failed", "compile": "failed", "wrong": "rejected", "crash": "failed"}
        found = await collect_demonstrations(gym, tasks, DemonstrationPlan(fault_share=1.0, variants=2))
    assert len(found.demonstrations) == 3
    assert found.without == {}
    for one in found.demonstrations:
        assert 2 <= len(one.turns) <= 3
        assert [turn.index for turn in one.turns] == list(range(1, len(one.turns) + 1))
        assert not one.turns[0].verdict.accepted
        assert one.turns[-1].verdict.accepted


def test_faults_are_repeatable_and_of_their_kind() -> None:
    source = (
        "import torch, triton\nimport triton.language as tl\n\n\n@triton.jit\ndef k(x, y):\n"
        "    o = tl.arange(0, 8)\n    v = tl.load(x + o)\n    tl.store(y + o, v)\n\n\n"
        "class ModelNew(torch.nn.Module):\n    def forward(self, x):\n        y = torch.empty_like(x)\n"
        "        k[(1,)](x, y)\n        return y\n"
    )
    made = {kind: insert_fault(source, kind, seed=4) for kind in KINDS}
    assert made == {kind: insert_fault(source, kind, seed=4) for kind in KINDS}
    sources = {kind: fault.source for kind, fault in made.items() if fault is not None}
    assert sources.keys() == set(KINDS)
    with pytest.raises(SyntaxError):
        ast.parse(sources["syntax"])
    for kind in ("compile", "wrong", "crash"):
        ast.parse(sources[kind])
    assert "torc." in sources["crash"]
    assert insert_fault("x = 1\n", "wrong") is None
