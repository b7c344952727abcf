from __future__ import annotations

import pytest

from drk.assistant.errors import TargetError
from drk.assistant.source_index import index_source, is_torch_module, origin

SOURCE = """
import torch
import torch.nn as nn
from torch.nn import Module as Base, functional as F
from .layers import Norm
from . import blocks

if torch.cuda.is_available():
    def fast(x): ...
else:
    def slow(x): ...

try:
    import extra
except ImportError:
    extra = None

class Outer(nn.Module):
    class Inner(Base): pass

    def __init__(self, dim: int, /, *rest, eps: "float" = 1e-5, **more):
        self.norm = Norm(dim)

    @staticmethod
    def make(width): return Outer(width)

    async def later(self): ...

def get_inputs():
    if torch.rand(1) > 0:
        return [1, 2]
    return (3, 4)

def starred():
    return [*range(3)]

def relu(x):
    return F.relu(x)

def made() -> "nn.Module":
    net = Outer(3)
    def inner():
        return 1
    return net

model: nn.Module = nn.Linear(3, 3)

if __name__ == "__main__":
    class Hidden(nn.Module): pass
"""


@pytest.fixture(scope="module")
def index():
    return index_source(SOURCE, "model.py")


def test_classes_functions_and_values(index):
    assert list(index.classes) == ["Outer", "Outer.Inner"]
    assert list(index.functions) == ["fast", "slow", "get_inputs", "starred", "relu", "made"]
    assert index.values["model"][1] == "nn.Linear"
    assert index.names()[:2] == ["fast", "slow"]


def test_parameters(index):
    told = [str(parameter) for parameter in index.classes["Outer"].methods["__init__"].parameters]
    assert told == ["dim: int", "*rest", "eps: float = 1e-05", "**more"]
    assert [p.required for p in index.classes["Outer"].methods["__init__"].parameters] == [True, False, False, False]
    assert [p.name for p in index.classes["Outer"].methods["make"].parameters] == ["width"]
    assert index.classes["Outer"].methods["later"].is_async


def test_what_functions_return(index):
    assert index.functions["get_inputs"].returned_count == 2
    assert index.functions["starred"].returned_count is None
    assert index.functions["made"].returned == ("Outer",)
    assert index.functions["made"].returns == "nn.Module"


def test_origins(index):
    assert origin(index, "nn.Module") == "torch.nn.Module"
    assert origin(index, "Base") == "torch.nn.Module"
    assert origin(index, "Norm") == ".layers.Norm"
    assert origin(index, "blocks.Base") == ".blocks.Base"
    assert origin(index, "F.relu") == "torch.nn.functional.relu"
    assert origin(index, "Outer") == "Outer"


@pytest.mark.parametrize(
    ("dotted", "expected"),
    [
        ("torch.nn.Module", True),
        ("torch.nn.modules.linear.Linear", True),
        ("torch.nn.functional.relu", False),
        ("torch.nn.Parameter", False),
        ("torch.nn.init.Anything", False),
        ("torch.Tensor", False),
    ],
)
def test_what_counts_as_a_module_of_torch(dotted, expected):
    assert is_torch_module(dotted) is expected


def test_syntax_errors_show_the_place():
    with pytest.raises(TargetError) as caught:
        index_source("x = 1\nclass Net(nn.Module:\n", "model.py")
    error = caught.value
    assert (error.kind, error.file, error.line) == ("syntax", "model.py", 2)
    assert error.cause.split("\n") == ["class Net(nn.Module:", "                   ^"]


@pytest.mark.parametrize("text", ["(" * 5000 + ")" * 5000, "x = '\\d'\n"])
def test_extreme_and_sloppy_sources(text):
    if text.startswith("("):
        with pytest.raises(TargetError):
            index_source(text, "model.py")
    else:
        assert "x" in index_source(text, "model.py").values
