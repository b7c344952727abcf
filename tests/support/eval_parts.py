"""A suite of four problems, and a gym with scripted verdicts for them, for the tests of evaluations."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drk.assistant.evaluation import EvalPlan, find_problems
from drk.gym.errors import TaskError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Candidate, Flag, Task

PROBLEM = """
import torch
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) + {number}
def get_inputs():
    return [torch.randn(4, 4)]
def get_init_inputs():
    return []
"""


def source(number: int, turn: int) -> str:
    return f"class ModelNew:\n    number, turn = {number}, {turn}\n"


@dataclass
class Scripted:
    """Verdicts by problem number and turn: the table's rows are turns, ``None`` is a refusal."""

    table: dict[tuple[int, int], Any]
    verdicts: Any
    gpu: str | None = "NVIDIA H200"
    evaluated: int = 0
    broken: str = ""
    profiled: int = 0

    @property
    def device_facts(self) -> dict[str, Any]:
        return {"device": "cuda:0" if self.gpu else "interpret", "gpu": self.gpu}

    async def inspect(self, task: Task) -> Any:
        if task.name == self.broken:
            raise TaskError("the reference fails")

    async def capture(self, task: Task) -> dict[str, Any]:
        raise TaskError("cannot be captured")

    async def kernels(self, task: Task) -> ReferenceProfile:
        self.profiled += 1
        return ReferenceProfile(self.gpu or "", (ReferenceKernel("relu", 1, 2.0, 1.0),))

    async def evaluate(self, task: Task, candidate: Candidate) -> Any:
        self.evaluated += 1
        space: dict[str, Any] = {}
        exec(candidate.source, space)
        found = self.table.get((space["ModelNew"].number, space["ModelNew"].turn))
        if found == "hack":
            flag = Flag("cached-result", "caching", "fraud", "ablation")
            return replace(self.verdicts.refused(), correct=True, honest=False, flags=(flag,), error=None)
        if found is None:
            return self.verdicts.refused(evidence="gpu" if self.gpu else "interpreter")
        return self.verdicts.accepted(found if self.gpu else None)


def write_suite(folder: Path) -> Path:
    """Write four problems in two groups, and recordings of two turns for each."""
    for number in range(4):
        file = folder / "suite" / f"level{1 + number // 2}" / f"p{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PROBLEM.format(number=number))
        rows = [json.dumps({"source": source(number, turn), "note": f"turn {turn}"}) for turn in (1, 2)]
        place = folder / "recorded" / f"level{1 + number // 2}.p{number}.jsonl"
        place.parent.mkdir(exist_ok=True)
        place.write_text("\n".join(rows) + "\n")
    return folder / "suite"


def plan_of(suite: Path, **changes: Any) -> EvalPlan:
    problems, unusable = find_problems(suite)
    return replace(EvalPlan(problems, unusable, turns=2, workers=3), **changes)
