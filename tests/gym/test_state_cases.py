"""Modules with state and side effects: each is judged right, beside a candidate that misses the effect."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from drk.gym.engine import Gym
from drk.gym.schema import Call, Candidate, Mode, Task, TensorSpec, Verdict
from drk.gym.settings import GymSettings, Limits

SETTINGS = GymSettings(
    device="interpret", seeds=1, limits=Limits(load_s=60, compile_s=60, run_s=60), offline_compile=False
)
HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


@pytest.fixture(scope="module")
def loop_gym() -> object:
    loop = asyncio.new_event_loop()
    gym = Gym(SETTINGS)
    loop.run_until_complete(gym.__aenter__())
    yield loop, gym
    loop.run_until_complete(gym.__aexit__(None, None, None))
    loop.close()


@dataclass(frozen=True)
class Case:
    """A module, and the edit that makes a wrong candidate of it. ``shape`` is that of its one input."""

    source: str
    right: str
    wrong: str
    mode: Mode = "eval"
    shape: tuple[int, ...] = (6, 8)
    dtype: str = "float32"


def module(init: str, forward: str) -> str:
    """Return a module's source."""
    made = "".join(f"        {line}\n" for line in ["super().__init__()", *init.splitlines()])
    ran = "".join(f"        {line}\n" for line in forward.splitlines())
    return f"{HEAD}class Model(nn.Module):\n    def __init__(self):\n{made}\n    def forward(self, x):\n{ran}"


CASES = {
    "buffer": Case(
        module(
            'self.register_buffer("mean", torch.zeros(8))',
            "self.mean.mul_(0.5).add_(x.mean(0) * 0.5)\nreturn x - self.mean",
        ),
        "self.mean.mul_(0.5).add_(x.mean(0) * 0.5)\n        return x - self.mean",
        "return x - self.mean.mul(0.5).add(x.mean(0) * 0.5)",
    ),
    "replaced buffer": Case(
        module('self.register_buffer("mean", torch.zeros(8))', "self.mean = self.mean * 0.5 + x.mean(0)\nreturn x * 2"),
        "self.mean = self.mean * 0.5 + x.mean(0)",
        "pass",
    ),
    "parameter": Case(
        module(
            "self.weight = nn.Parameter(torch.rand(8) + 0.5)",
            "with torch.no_grad():\n    self.weight.clamp_(max=0.9)\nreturn x * self.weight",
        ),
        "self.weight.clamp_(max=0.9)",
        "pass",
    ),
    "counter": Case(
        module('self.register_buffer("calls", torch.zeros((), dtype=torch.int64))', "self.calls.add_(1)\nreturn x * 2"),
        "self.calls.add_(1)",
        "pass",
    ),
    "plain counter": Case(
        module("self.calls = 0\nself.seen = []", "self.calls += 1\nself.seen.append(1)\nreturn x * len(self.seen)"),
        "return x * len(self.seen)",
        "return x * (len(self.seen) + 1)",
    ),
    "own input": Case(module("", "x.mul_(2)\nreturn x + 1"), "x.mul_(2)", "x = x * 2"),
    "view": Case(module("", "x = torch.relu(x)\nreturn x, x[:, :4]"), "x[:, :4]", "x[:, 4:]"),
    "random numbers": Case(
        module("", "return F.dropout(x, 0.5, training=True)"), "F.dropout(x, 0.5, training=True)", "x * 1"
    ),
    "hook": Case(
        module("self.register_forward_pre_hook(lambda module, args: (args[0] * 3,))", "return torch.relu(x)"),
        "self.register_forward_pre_hook(lambda module, args: (args[0] * 3,))",
        "pass",
    ),
    "hook on a part": Case(
        module(
            "self.part = nn.Linear(8, 8)\nself.part.register_forward_hook(lambda module, args, out: out * 2)",
            "return torch.relu(self.part(x))",
        ),
        "self.part.register_forward_hook(lambda module, args, out: out * 2)",
        "pass",
    ),
    "tied weights": Case(
        module(
            "self.embed = nn.Embedding(16, 8)\nself.head = nn.Linear(8, 16, bias=False)\n"
            "self.head.weight = self.embed.weight",
            "return self.head(self.embed(x))",
        ),
        "self.embed(x)",
        "self.embed(x) * 2",
        dtype="int64",
        shape=(4, 5),
    ),
    "train mode": Case(
        module("self.bn = nn.BatchNorm1d(8)", "return torch.relu(self.bn(x))"),
        "return torch.relu(self.bn(x))",
        "return torch.relu(F.batch_norm(x, self.bn.running_mean, self.bn.running_var, self.bn.weight, self.bn.bias))",
        mode="train",
        shape=(16, 8),
    ),
    "eval mode": Case(
        module("self.bn = nn.BatchNorm1d(8)\nself.drop = nn.Dropout(0.5)", "return self.drop(self.bn(x))"),
        "return self.drop(self.bn(x))",
        "self.train()\n        return self.drop(self.bn(x))",
        shape=(16, 8),
    ),
}


def judge(loop_gym: object, case: Case, candidate: str) -> Verdict:
    loop, gym = loop_gym
    spec = TensorSpec(case.shape, case.dtype, **({"low": 0, "high": 16} if case.dtype == "int64" else {}))
    task = Task("t", {"model.py": case.source}, "model.py", "Model", inputs=Call((spec,)), mode=case.mode)
    return loop.run_until_complete(gym.evaluate(task, Candidate(candidate.replace("class Model(", "class ModelNew("))))


@pytest.mark.parametrize("name", CASES)
def test_the_effect_is_judged(loop_gym, name: str) -> None:
    case = CASES[name]
    assert case.right in case.source
    right = judge(loop_gym, case, case.source)
    assert right.status == "accepted", (right.error, [cell for cell in right.cells if not cell.passed])
    wrong = judge(loop_gym, case, case.source.replace(case.right, case.wrong))
    assert wrong.status == "rejected", (wrong.status, wrong.error)


PARAMETRISED = module(
    "self.lin = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))", "return torch.relu(self.lin(x))"
)
CONVERTING = (
    HEAD
    + """class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.folded = nn.Parameter(torch.empty(8, 8))
        self.bias = nn.Parameter(torch.empty(8))

    @classmethod
    def from_reference(cls, model):
        new = cls()
        with torch.no_grad():
            new.folded.copy_(model.lin.weight)
            new.bias.copy_(model.lin.bias)
        return new

    def forward(self, x):
        return torch.relu(F.linear(x, self.folded, self.bias))
"""
)
UNSAVED = module(
    'self.register_buffer("table", torch.randn(8), persistent=False)\nself.scale = torch.randn(8)',
    "return x * self.table + self.scale",
)
TAKING_OVER = (
    HEAD
    + """class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(8), persistent=False)
        self.register_buffer("scale", torch.empty(8), persistent=False)

    @classmethod
    def from_reference(cls, model):
        new = cls()
        new.table, new.scale = model.table, model.scale
        return new

    def forward(self, x):
        return x * self.table + self.scale
"""
)


def test_parametrised_weights_are_converted(loop_gym) -> None:
    verdict = judge(loop_gym, Case(PARAMETRISED, "", ""), CONVERTING)
    assert (verdict.status, verdict.weights) == ("accepted", "converted"), verdict.error
    same_keys = judge(loop_gym, Case(PARAMETRISED, "", ""), PARAMETRISED)
    assert (same_keys.status, same_keys.weights) == ("accepted", "copied"), same_keys.error


def test_from_reference_brings_what_no_state_dict_holds(loop_gym) -> None:
    verdict = judge(loop_gym, Case(UNSAVED, "", ""), TAKING_OVER)
    assert (verdict.status, verdict.weights) == ("accepted", "copied"), verdict.error
    broken = judge(loop_gym, Case(UNSAVED, "", ""), TAKING_OVER.replace("model.table,", "model.missing,"))
    assert (broken.status, broken.error.stage) == ("failed", "load")
    assert "missing" in broken.error.message


def test_few_indices_with_wide_rows_are_reduced_by_what_they_make(loop_gym) -> None:
    loop, gym = loop_gym
    source = module("self.embed = nn.Embedding(50, 512)", "return self.embed(x) * 2")
    spec = TensorSpec((8, 128), "int64", low=0, high=50)
    task = Task("t", {"model.py": source}, "model.py", "Model", inputs=Call((spec,)))
    inspection = loop.run_until_complete(gym.inspect(task))
    assert inspection.inputs[0]["shape"] != [8, 128]
