"""Places of a reference's operations: parts and lines of the user's files, told to a recorder in Proton's stead."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from drk.gym.runner.places import LINE, MODULE, place_scopes

SOURCE = """import torch
from torch import nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.relu(self.fc(x)) + 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.fails = False

    def forward(self, x):
        x = self.blocks(x)
        if self.fails:
            raise ValueError("no")
        return F.softmax(x, dim=-1)
"""


class Recorder:
    """Stands for Proton: keeps the open scopes, and what was open whenever a scope closed."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[str, ...]] = []

    def enter(self, name: str) -> None:
        self.open.append(name)

    def leave(self) -> None:
        self.seen.append(tuple(self.open))
        self.open.pop()

    def places(self) -> set[tuple[str, str]]:
        """Return (innermost part, innermost line) of every function that was called."""
        found = set()
        for scopes in self.seen:
            if scopes[-1].startswith(LINE):
                module = next(name for name in reversed(scopes) if name.startswith(MODULE))
                found.add((module.removeprefix(MODULE), scopes[-1].removeprefix(LINE)))
        return found


@pytest.fixture
def user(tmp_path: Path) -> Any:
    path = tmp_path / "src" / "pkg" / "model.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("places_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions_have_the_part_and_the_line_that_called_them(user: Any, tmp_path: Path) -> None:
    model, recorder = user.Model().eval(), Recorder()
    x = torch.randn(2, 4)
    expected = model(x)
    with place_scopes(model, tmp_path / "src", recorder.enter, recorder.leave):
        assert torch.equal(model(x), expected)
    assert recorder.open == []
    line = {text.strip(): f"pkg/model.py:{number}" for number, text in enumerate(SOURCE.splitlines(), 1)}
    block = line["return torch.relu(self.fc(x)) + 1"]
    assert {
        ("blocks.0.fc", block),
        ("blocks.1.fc", block),
        ("blocks.0", block),
        ("blocks.1", block),
        ("", line["return F.softmax(x, dim=-1)"]),
    } == recorder.places()


def test_scopes_close_when_a_part_raises_and_nothing_stays(user: Any, tmp_path: Path) -> None:
    model, recorder = user.Model(), Recorder()
    model.fails = True
    with pytest.raises(ValueError, match="no"), place_scopes(model, tmp_path / "src", recorder.enter, recorder.leave):
        model(torch.randn(2, 4))
    assert recorder.open == []
    count = len(recorder.seen)
    model.fails = False
    model(torch.randn(2, 4))
    assert len(recorder.seen) == count
    assert all(not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())


def test_lines_elsewhere_are_no_places(user: Any, tmp_path: Path) -> None:
    model, recorder = user.Model(), Recorder()
    with place_scopes(model, tmp_path / "other", recorder.enter, recorder.leave):
        model(torch.randn(2, 4))
    assert recorder.places() == set()
    assert (MODULE,) in recorder.seen


@torch.no_grad()
def test_a_compiled_part_belongs_to_whoever_called_it(user: Any, tmp_path: Path) -> None:
    model, recorder = user.Model().eval(), Recorder()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager", fullgraph=True)
    x = torch.randn(2, 4)
    expected = model(x)
    with place_scopes(model, tmp_path / "src", recorder.enter, recorder.leave):
        assert torch.equal(model(x), expected)
    assert recorder.open == []
    assert ("", f"pkg/model.py:{len(SOURCE.splitlines())}") in recorder.places()
