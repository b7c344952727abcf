"""A user's project, a candidate for it, and a gym with scripted verdicts, for the tests of the optimize flow."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drk.gym.kernels import ReferenceProfile
from drk.gym.schema import Call, Candidate, Cell, Failure, Interval, Scalar, Speedups, Task, TensorSpec, Verdict
from drk.gym.wire import candidate_id, task_id

MODEL = textwrap.dedent('''\
    """A user's file."""
    import torch
    from torch import nn


    class ScaledSilu(nn.Module):
        """silu(x) * weight * gain"""

        def __init__(self, dim, gain=2.0):
            super().__init__()
            self.gain = gain
            self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim))
            self.register_buffer("shift", torch.full((dim,), 0.25))

        def forward(self, x):
            return nn.functional.silu(x) * self.weight * self.gain + self.shift


    def example_inputs():
        return (torch.randn(64, 96),)
    ''')

CANDIDATE = textwrap.dedent('''\
    """ScaledSilu as one kernel."""

    from __future__ import annotations

    import torch
    import triton
    import triton.language as tl
    from torch import nn


    @triton.jit
    def scaled_silu_kernel(x, weight, shift, out, cols, gain, BLOCK: tl.constexpr):
        row = tl.program_id(0)
        col = tl.arange(0, BLOCK)
        mask = col < cols
        value = tl.load(x + row * cols + col, mask=mask, other=0.0)
        scale = tl.load(weight + col, mask=mask, other=0.0)
        offset = tl.load(shift + col, mask=mask, other=0.0)
        tl.store(out + row * cols + col, value * tl.sigmoid(value) * scale * gain + offset, mask=mask)


    class ModelNew(nn.Module):
        def __init__(self, dim, gain=2.0):
            super().__init__()
            self.gain = gain
            self.weight = nn.Parameter(torch.empty(dim))
            self.register_buffer("shift", torch.empty(dim))

        def forward(self, x):
            out = torch.empty_like(x)
            cols = x.shape[1]
            scaled_silu_kernel[(x.shape[0],)](
                x, self.weight, self.shift, out, cols, self.gain, BLOCK=triton.next_power_of_2(cols)
            )
            return out
    ''')

CAPTURE = """
import importlib.util, json, sys, torch
from drk.gym.runner.capture import capture
spec = importlib.util.spec_from_file_location("model", sys.argv[1])
user = importlib.util.module_from_spec(spec)
spec.loader.exec_module(user)
print(json.dumps(capture(user.ScaledSilu(96).eval(), [torch.randn(64, 96)], {})))
"""


def accepted(low: float | None = None, *, coverage: float = 0.9, **changes: Any) -> Verdict:
    """An accepted verdict: measured with this lower bound over torch.compile, or by the interpreter when null."""
    measured = low is not None
    interval = Interval(low + 0.1, low, low + 0.2, 20) if measured else None
    facts: dict[str, Any] = {
        "status": "accepted",
        "evidence": "gpu" if measured else "interpreter",
        "reached": "measured" if measured else "correct",
        "correct": True,
        "honest": True if measured else None,
        "speedups": Speedups(Interval(2.5, 2.4, 2.6, 20), interval) if interval else None,
        "headline": "compile" if measured else None,
        "coverage_estimate": coverage,
        "weights": "copied",
        "cells": (Cell("seed 1", True, "", 1e-7, 2e-7, 1e-7, 2e-7, 3e-7, 8e-7),),
    }
    return Verdict(**{**facts, **changes})


def refused(kind: str = "mismatch", reached: str = "ran", **changes: Any) -> Verdict:
    """A verdict that refuses."""
    facts: dict[str, Any] = {
        "status": "rejected",
        "evidence": "interpreter",
        "reached": reached,
        "correct": False,
        "honest": None,
        "error": Failure("check", kind, "the outputs differ\nin many places", 3),
    }
    return Verdict(**{**facts, **changes})


@dataclass
class FakeGym:
    """A gym whose verdicts are scripted by candidate source; counts what it is asked."""

    verdicts: dict[str, Verdict]
    graph: dict[str, Any]
    device_facts: dict[str, Any] = field(default_factory=lambda: {"device": "interpret", "gpu": None})
    evaluated: list[str] = field(default_factory=list)
    inspected: int = 0
    profiled: int = 0
    profile: ReferenceProfile | Exception = field(default_factory=ReferenceProfile)
    delay_s: float = 0.0
    at_once: int = 1

    async def inspect(self, task: Task) -> Any:
        self.inspected += 1
        row = {"path": "[0][0]", "shape": [33, 96], "dtype": "float32"}
        return type("Inspection", (), {"inputs": [row], "reduced": {"[0][0]": {"0": 33}}})()

    async def capture(self, task: Task) -> dict[str, Any]:
        return self.graph

    async def parts(self, task: Task) -> list[dict[str, Any]]:
        return []

    async def kernels(self, task: Task) -> ReferenceProfile:
        self.profiled += 1
        if isinstance(self.profile, Exception):
            raise self.profile
        return self.profile

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        self.evaluated.append(candidate.source)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        from dataclasses import replace

        return replace(self.verdicts[candidate.source], task_id=task_id(task), candidate_id=candidate_id(candidate))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the user's model.py."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(MODEL)
    return folder


@pytest.fixture
def silu_task() -> Task:
    """The task that intake makes of the user's file."""
    return Task(
        name="ScaledSilu",
        files={"model.py": MODEL},
        entry="model.py",
        target="ScaledSilu",
        init=Call((Scalar(96),)),
        inputs=Call((TensorSpec((64, 96)),)),
    )


@pytest.fixture
def silu_candidate() -> Candidate:
    """A right candidate for it, KernelBench form."""
    return Candidate(CANDIDATE, proposer="file", note="one kernel")


@pytest.fixture(scope="session")
def silu_graph(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The graph of the user's module, captured for real in a process of its own."""
    file = tmp_path_factory.mktemp("capture") / "model.py"
    file.write_text(MODEL)
    done = subprocess.run([sys.executable, "-c", CAPTURE, str(file)], capture_output=True, text=True, check=True)
    graph: dict[str, Any] = json.loads(done.stdout)
    return graph


@pytest.fixture
def make_gym(silu_graph: dict[str, Any]) -> Any:
    """Make a gym with scripted verdicts by source."""

    def make(verdicts: dict[str, Verdict], **changes: Any) -> FakeGym:
        return FakeGym(verdicts, silu_graph, **changes)

    return make


@pytest.fixture
def verdicts() -> Any:
    """The makers of scripted verdicts: ``accepted`` and ``refused``."""
    return type("Verdicts", (), {"accepted": staticmethod(accepted), "refused": staticmethod(refused)})
