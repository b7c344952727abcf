from __future__ import annotations

import shlex
import sys

import pytest
from safetensors.torch import load, save_file

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.input_capture import capture_tasks
from drk.gym.schema import Call, CapturedTensor, Scalar, TensorSpec
from drk.gym.wire import task_from_json, task_to_json

MODEL = """
import torch
from torch import nn

class Head(nn.Module):
    def __init__(self, dim, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.scale = scale

    def forward(self, x, ids=None, *, flag=True):
        return self.linear(x) * self.scale

class Config:
    dim = 4

class Built(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return x

if __name__ == "__main__":
    print("hello")
    head = Head(4, scale=2.0)
    for _ in range(3):
        head(torch.randn(8, 4))
    head.eval()
    with torch.no_grad():
        for _ in range(5):
            head(torch.randn(4, 2).t(), torch.tensor([3, 1, 2]), flag=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            head(torch.tensor([[1.0, float("-inf"), 0.0, 0.0]]))
    Built(Config())(torch.randn(2))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def python(*words):
    return shlex.join([sys.executable, *words])


def test_each_kind_of_call_becomes_a_task(folder, capfd):
    tasks = capture_tasks("model.py:Head", python("model.py"), cwd=folder)
    assert [round(task.weight * 9) for task in tasks] == [5, 3, 1]
    assert all(task.init == Call((Scalar(4),), {"scale": Scalar(2.0)}) for task in tasks)
    often, training, masked = tasks
    assert often.inputs == Call((TensorSpec((2, 4), strides=(1, 2)), CapturedTensor("0")), {"flag": Scalar(False)})
    assert load(often.tensors)["input.0"].tolist() == [3, 1, 2]
    assert (often.mode, often.grad, often.autocast) == ("eval", False, None)
    assert (training.mode, training.grad, training.inputs) == ("train", True, Call((TensorSpec((8, 4)),)))
    assert (masked.autocast, masked.inputs) == ("bfloat16", Call((CapturedTensor("0"),)))
    assert all(task_from_json(task_to_json(task)) == task for task in tasks)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "hello" in captured.err


def test_another_script_that_imports_the_file(folder):
    (folder / "train.py").write_text("import torch\nfrom model import Head\nHead(6)(torch.ones(2, 6))\n")
    (task,) = capture_tasks("model.py:Head", python("train.py"), cwd=folder)
    assert (task.inputs, task.init, task.weight) == (Call((TensorSpec((2, 6)),)), Call((Scalar(6),)), 1.0)


def test_a_part_of_a_module(folder):
    tasks = capture_tasks("model.py:Head.linear", python("model.py"), cwd=folder)
    assert {task.submodule for task in tasks} == {"linear"}
    assert sum(task.inputs.args[0] == TensorSpec((8, 4)) for task in tasks) == 1


def test_constructor_arguments_without_a_form_come_from_the_user(folder):
    with pytest.raises(TargetError, match="Built needs config"):
        capture_tasks("model.py:Built", python("model.py"), cwd=folder)
    (task,) = capture_tasks("model.py:Built", python("model.py"), cwd=folder, init=["none"])
    assert task.init == Call((Scalar(None),))


def test_weights_and_captured_values_travel_together(folder):
    import torch

    save_file({"linear.weight": torch.ones(4, 4)}, folder / "weights.safetensors")
    task = capture_tasks("model.py:Head", python("model.py"), cwd=folder, state_dict=folder / "weights.safetensors")[0]
    loaded = load(task.tensors)
    assert loaded["state.linear.weight"].sum() == 16
    assert loaded["input.0"].tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("command", "error", "told"),
    [
        ("", UsageError, "empty"),
        ("no-such-program-here", UsageError, "cannot run"),
        (
            python("-c", "import sys; sys.exit(3)"),
            TargetError,
            "never called Head of model.py and ended with exit code 3",
        ),
        (python("-c", "import time; time.sleep(60)"), TargetError, "took longer than 1 s"),
    ],
)
def test_commands_that_capture_nothing(folder, command, error, told):
    with pytest.raises(error, match=told):
        capture_tasks("model.py:Head", command, cwd=folder, timeout_s=1 if "sleep" in command else 60)


def test_functions_cannot_be_watched(folder):
    (folder / "function.py").write_text("def f(x):\n    return x\n")
    with pytest.raises(UsageError, match="watches classes"):
        capture_tasks("function.py", python("function.py"), cwd=folder)
