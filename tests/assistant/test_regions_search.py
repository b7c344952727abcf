"""A module whose control flow cannot be captured: its parts get kernels, the rest stays, the whole is judged."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drk.assistant.apply import apply_artefact, restore_file
from drk.assistant.artefact import SourceFile
from drk.assistant.budget import Budget
from drk.assistant.optimize import Answer, Plan, begin_run, optimize
from drk.assistant.proposers import BuiltinProposer
from drk.assistant.runs import Run
from drk.assistant.summary import summary
from drk.gym.engine import Gym
from drk.gym.schema import Call, Task, TensorSpec
from drk.gym.settings import GymSettings, Limits

NET = '''"""A network with a branch on its data."""
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return x + F.silu(self.norm(x)) * self.gain


class Net(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if x.abs().max().item() > 1e6:
            x = x / 2
        return x * 3
'''


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path, list[str]]:
    project = tmp_path_factory.mktemp("net")
    file = project / "net.py"
    file.write_text(NET)
    task = Task("net", {"net.py": NET}, "net.py", "Net", inputs=Call((TensorSpec((6, 48)),)))
    plan = Plan(task, SourceFile(project, "net.py", file.read_bytes()), budget=Budget(max_time_s=600))
    settings = GymSettings(device="interpret", seeds=1, limits=Limits(load_s=60), offline_compile=False)
    told: list[str] = []

    async def work() -> Answer:
        run = begin_run(plan, project / ".drk" / "runs", {})
        async with Gym(settings) as gym:
            found = await optimize(
                plan, run, gym, BuiltinProposer(), emit=lambda event: told.append(event.get("text", ""))
            )
            again = await optimize(plan, Run(run.folder), gym, BuiltinProposer(), emit=lambda _event: None)
            assert again.result["best"] == found.result["best"]
        return found

    return asyncio.run(work()), file, told


def test_the_whole_module_is_judged(answer: tuple[Answer, Path, list[str]]) -> None:
    found, _, told = answer
    assert found.outcome.status == "unmeasured", found.outcome.reason
    assert found.outcome.best is not None
    assert found.outcome.best.candidate.proposer == "regions"
    assert found.outcome.best.verdict.weights == "copied"
    (row,) = found.result["regions"]
    assert row["paths"] == ["blocks.0", "blocks.1"]
    assert row["status"] == "unmeasured"
    assert any("part blocks.0 and 1 alike (Block" in text for text in told)
    text = summary(found.outcome, found.result, where=Path.cwd())
    assert "blocks.0, blocks.1" in text
    assert "the rest stays as it is" in text


@pytest.mark.long
def test_the_artefact_is_one_file_a_region_and_can_be_taken_back(answer: tuple[Answer, Path, list[str]]) -> None:
    found, file, _ = answer
    applied = apply_artefact(found.run, file)
    assert {path.name for path in applied.written} == {"net_kernels.py", "net_kernels_1.py", "test_net_kernels.py"}
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    code = (
        "import copy, json, torch, net, net_kernels as k\n"
        "m = net.Net().eval(); plain = k.restore(copy.deepcopy(m)); x = torch.randn(6, 48)\n"
        "with torch.no_grad():\n"
        "    same = torch.allclose(m(x), plain(x), atol=1e-4)\n"
        "m(x).sum().backward()\n"
        "s = k.stats(m)\n"
        "print(json.dumps([same, s['kernel_calls'], s['fallback_calls'], k.stats(plain)['optimized']]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=file.parent, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, 2, 2, False]
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "test_net_kernels.py"]
    own = subprocess.run(tested, cwd=file.parent, env=environ, capture_output=True, text=True, check=False)
    assert "2 passed" in own.stdout, own.stdout + own.stderr
    restored = restore_file(file)
    assert restored.exact
    assert file.read_text() == NET
    assert not list(file.parent.glob("*_kernels*.py"))
