"""Tasks whose making takes a run of the user's code: parts' inputs, pickled weights, captured calls, autocast."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.task_building import TaskOptions, build_task
from drk.gym.errors import TaskError
from drk.gym.schema import Call, Scalar, TensorSpec
from drk.gym.settings import GymSettings

GYM = GymSettings(device="interpret", offline_compile=False)
NET = """
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x, mask, scale=2.0, *, ids=None):
        return torch.sigmoid(x) * mask * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Gate(), Gate()])
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        x = self.lin(x)
        x = self.blocks[0](x.t(), x.t() > 0, scale=3.0, ids=torch.arange(4))
        return self.blocks[1](x, x > 0) + self.blocks[1](x[:2], x[:2] > 0).sum()


def example_inputs():
    return (torch.randn(5, 8),)


if __name__ == "__main__":
    net = Net().eval()
    with torch.no_grad():
        for _ in range(3):
            net(torch.randn(7, 8))
        net(torch.randn(2, 8))
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_parts_inputs_are_recorded_from_the_whole(net: Path) -> None:
    task = build_task(TaskOptions("net.py:Net.blocks.0"), GYM)
    assert task.submodule == "blocks.0"
    assert task.inputs == Call(
        (
            TensorSpec((8, 5), strides=(1, 8)),
            TensorSpec((8, 5), "bool", strides=(1, 8), fill="bernoulli"),
        ),
        {"scale": Scalar(3.0), "ids": TensorSpec((4,), "int64", low=0.0, high=4.0, fill="integers")},
    )
    for target, cause in (("blocks.1", "called in several ways"), ("unused", "never calls it")):
        with pytest.raises(TargetError, match="are not known") as caught:
            build_task(TaskOptions(f"net.py:Net.{target}"), GYM)
        assert cause in caught.value.cause
        assert "--input" in caught.value.help


def test_without_the_wholes_inputs_a_part_has_none(net: Path) -> None:
    (net / "net.py").write_text(NET.replace("def example_inputs", "def other"))
    with pytest.raises(TargetError, match=r"inputs of Net\.lin are not known") as caught:
        build_task(TaskOptions("net.py:Net.lin"), GYM)
    assert "nor are those of Net" in caught.value.cause
    given = build_task(TaskOptions("net.py:Net.lin", inputs=["f32[3,8]"]), GYM)
    assert given.inputs == Call((TensorSpec((3, 8)),))


def test_pickled_weights_are_read_in_a_sandbox(net: Path) -> None:
    linear = {"lin.weight": torch.rand(8, 8), "lin.bias": torch.rand(8)}
    torch.save({"state_dict": linear, "epoch": 3}, net / "weights.pt")
    task = build_task(TaskOptions("net.py:Net", state_dict=Path("weights.pt")), GYM)
    assert task.tensors is not None
    found = load(task.tensors)
    assert found.keys() == {"state.lin.weight", "state.lin.bias"}
    assert torch.equal(found["state.lin.weight"], linear["lin.weight"])
    (net / "bad.pt").write_bytes(b"cposix\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(TaskError, match=r"bad\.pt"):
        build_task(TaskOptions("net.py:Net", state_dict=Path("bad.pt")), GYM)
    assert not (net / "pwned").exists()


def test_captured_calls(net: Path) -> None:
    told: list[str] = []
    command = shlex.join([sys.executable, "net.py"])
    task = build_task(TaskOptions("net.py:Net", capture=command, autocast="bf16"), GYM, tell=told.append)
    assert task.inputs == Call((TensorSpec((7, 8)),))
    assert (task.weight, task.autocast, task.mode) == (0.75, "bfloat16", "eval")
    assert told == ["captured 2 kinds of calls; the most frequent one (75% of them) is taken"]
    with pytest.raises(UsageError, match="exclude each other"):
        build_task(TaskOptions("net.py:Net", inputs=["f32[1,8]"], capture=command), GYM)
    with pytest.raises(UsageError, match="none of bf16"):
        build_task(TaskOptions("net.py:Net", autocast="f8"), GYM)


def test_no_user_code_runs_where_the_text_is_enough(net: Path) -> None:
    nowhere = replace(GYM, device="cuda:99")
    assert build_task(TaskOptions("net.py:Net", autocast="f16"), nowhere).autocast == "float16"
