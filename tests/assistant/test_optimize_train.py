"""``drk optimize --train``: gradients are asked for, judged, written into the artefact and held by its own test."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.answer_parser import missing_reason
from drk.assistant.artefact import SourceFile
from drk.assistant.budget import Budget
from drk.assistant.optimize import Plan, begin_run, optimize
from drk.assistant.proposers import BuiltinProposer, ProposeContext
from drk.assistant.task_building import TaskOptions, build_task
from drk.gym.devices import device_facts
from drk.gym.engine import Gym
from drk.gym.graph import graph_from_json
from drk.gym.schema import Task
from drk.gym.settings import GymSettings


def test_the_flag_asks_for_train_mode_and_gradients(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    options = TaskOptions("model.py", inputs=["f32[64,96]"], init=["96"], train=True)
    task = build_task(options, GymSettings())
    assert (task.mode, task.grad) == ("train", True)
    assert not build_task(replace(options, train=False, mode="train"), GymSettings()).grad


async def test_the_builtin_proposer_writes_both_passes(silu_task: Task, silu_graph: dict[str, Any]) -> None:
    graph = graph_from_json(silu_graph)
    context = ProposeContext(replace(silu_task, mode="train", grad=True), graph, device_facts("sm_90"))
    found = await BuiltinProposer().propose(context)
    assert all("torch.autograd.Function" in one.source for one in found)
    without = await BuiltinProposer().propose(replace(context, task=silu_task))
    assert all("torch.autograd.Function" not in one.source for one in without)


async def test_where_there_is_none_the_reason_is_a_turn(silu_task: Task, silu_graph: dict[str, Any]) -> None:
    graph = graph_from_json(silu_graph)
    sort = replace(graph.nodes[0], op="aten.cumsum.default", args=(graph.nodes[0].args[0], 0))
    only = replace(graph, nodes=(sort,), output=replace(graph.output, name=sort.name))
    context = ProposeContext(replace(silu_task, mode="train", grad=True), only, device_facts("sm_90"))
    (missing,) = await BuiltinProposer().propose(context)
    assert "left to torch: cumsum" in (missing_reason(missing) or "")


@pytest.mark.long
async def test_it_is_judged_with_gradients_and_so_is_the_artefact(
    project: Path, silu_task: Task, tmp_path: Path
) -> None:
    task = replace(silu_task, mode="train", grad=True)
    source = SourceFile(project, "model.py", (project / "model.py").read_bytes())
    plan = Plan(task, source, Budget(turns=1, samples=1), cache_dir=tmp_path / "cache")
    run = begin_run(plan, tmp_path / "runs", {"target": "model.py"})
    async with Gym(GymSettings(device="interpret", sandbox="basic", seeds=2)) as gym:
        answer = await optimize(plan, run, gym, BuiltinProposer(), emit=lambda _event: None)
    assert answer.outcome.status == "unmeasured", answer.outcome.reason
    best = answer.outcome.best
    assert best is not None
    judged = [cell.name for cell in best.verdict.cells]
    assert any("grad:input" in name for name in judged)
    assert any("grad:param" in name for name in judged)
    assert any("backward" in kernel.name and kernel.registers for kernel in best.verdict.kernels)
    test = Path(answer.result["artefact"]["test"])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test.name, "-k", "gradients"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=test.parent, env=one_thread, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
