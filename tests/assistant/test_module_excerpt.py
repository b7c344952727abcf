"""What a small model is shown of a file: what the target needs, inputs under their usual names, and nothing else."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from drk.assistant.module_excerpt import module_excerpt
from drk.gym.schema import Call, Nested, Scalar, Task, TensorSpec, UserFunction

FILE = '''\
"""A module of a project.

With a long text.
"""
from __future__ import annotations

import argparse
import os

import torch
from torch import nn
from .other import needed, unneeded

WIDTH = 8
UNUSED = os.environ.get("X")


# what a block is
class Block(nn.Module):
    def forward(self, x):
        return needed(x) * WIDTH


class Other(nn.Module):
    def forward(self, x):
        return x


class Net(nn.Module):
    """Blocks."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        return self.blocks(x)


def example_inputs() -> tuple[torch.Tensor, ...]:
    """Return what one call gets."""
    rows = 4
    return (torch.randn(rows, 8), torch.rand(8))


# what follows is a script
def main() -> None:
    print(argparse.ArgumentParser())


if __name__ == "__main__":
    main()
'''
EXCERPT = '''\
from __future__ import annotations

import torch
from torch import nn
from .other import needed, unneeded

WIDTH = 8


# what a block is
class Block(nn.Module):
    def forward(self, x):
        return needed(x) * WIDTH


class Net(nn.Module):
    """Blocks."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))

    def forward(self, x):
        return self.blocks(x)


def get_inputs():
    rows = 4
    return [torch.randn(rows, 8), torch.rand(8)]


def get_init_inputs():
    return [3]'''


def task(text: str = FILE, **changes: object) -> Task:
    usual = Task("net", {"m.py": text}, "m.py", "Net", inputs=UserFunction("example_inputs"), init=Call((Scalar(3),)))
    return replace(usual, **changes)


def test_only_what_the_target_needs_is_shown() -> None:
    assert module_excerpt(task()) == EXCERPT
    ast.parse(EXCERPT)


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: f"\ufeff{t}\n\n"])
def test_newlines_and_byte_order_marks_change_nothing(change: object) -> None:
    assert module_excerpt(task(change(FILE))) == EXCERPT  # type: ignore[operator]


def test_an_excerpt_is_its_own_excerpt() -> None:
    again = task(EXCERPT, inputs=UserFunction("get_inputs"), init=UserFunction("get_init_inputs"))
    assert module_excerpt(again) == EXCERPT


def test_inputs_of_the_command_line_are_written_as_a_function() -> None:
    specs = (
        TensorSpec((2, 3)), TensorSpec((4,), "float16"), TensorSpec((5,), "int64", low=0, high=9, fill="integers"),
        TensorSpec((2,), "bool", fill="bernoulli"), Scalar("same"),
    )  # fmt: skip
    text = module_excerpt(task("class Net: pass", inputs=Call(specs), init=Call()))
    assert text.splitlines()[3:5] == [
        "def get_inputs():",
        "    return [torch.randn(2, 3), torch.randn(4, dtype=torch.float16), torch.randint(0, 9, (5,)), "
        "torch.rand(2) > 0.5, 'same']",
    ]
    assert text.endswith("def get_init_inputs():\n    return []")
    # what no short text makes is left out, not invented
    strided = module_excerpt(task("class Net: pass", inputs=Call((TensorSpec((2, 3), strides=(1, 2)),))))
    assert "get_inputs" not in strided
    nested = module_excerpt(
        task("class Net: pass", inputs=Call((Nested("list", ()),)), init=Call((), {"a": Scalar(1)}))
    )
    assert nested == "class Net: pass"


def test_a_value_that_gives_inputs_becomes_a_function() -> None:
    text = "import torch\nclass Net: pass\nexample_inputs = (torch.randn(3), 2)\n"
    assert "def get_inputs():\n    return [torch.randn(3), 2]" in module_excerpt(task(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("class Net(:\n", "class Net(:"),
        ("make('Net')\nx = 1\n\n", "make('Net')\nx = 1"),
        ("from a import Net\nx = 1\n", "from a import Net"),
    ],
)
def test_a_file_that_does_not_define_its_target_is_shown_whole(text: str, shown: str) -> None:
    assert module_excerpt(task(text, inputs=UserFunction("f"), init=UserFunction("g"))) == shown
