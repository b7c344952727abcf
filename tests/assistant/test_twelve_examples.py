"""The twelve user-style examples: the commands of their README resolve, and each runs on the meta device.

No kernel is proposed or judged here; shapes come from PyTorch's meta device, so that nothing large is allocated.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from drk.assistant.intake import resolve_target
from drk.gym.schema import Call, Task, TensorSpec, UserFunction

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "twelve"
REPOSITORY = FOLDER.parents[2]
PACKAGE_FILES = {"__init__.py", "config.py", "layers.py"}


def read_commands() -> list[str]:
    """Return the README's command lines."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    return [line for line in lines if line.startswith("drk optimize ")]


def resolve(command: str) -> Task:
    """Resolve a command line as ``drk optimize`` would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--input", action="append", default=[])
    parser.add_argument("--mode", default="eval")
    options = parser.parse_args(shlex.split(command)[2:])
    return resolve_target(options.target, inputs=options.input, mode=options.mode, cwd=REPOSITORY)


def typed(argument: Any) -> Any:
    """Return a meta tensor for a typed argument."""
    assert isinstance(argument, TensorSpec)
    return torch.empty(argument.shape, dtype=getattr(torch, argument.dtype), device="meta")


def call_on_meta(task: Task, module: Any) -> Any:
    """Call the task's target as a user would, on the meta device."""
    with torch.device("meta"), torch.no_grad():
        target = getattr(module, task.target)
        callee = target().train(task.mode == "train") if isinstance(target, type) else target
        if isinstance(task.inputs, UserFunction):
            return callee(*getattr(module, task.inputs.name)())
        assert isinstance(task.inputs, Call)
        named = {name: typed(value) for name, value in task.inputs.kwargs.items()}
        return callee(*[typed(value) for value in task.inputs.args], **named)


@pytest.mark.parametrize("command", read_commands(), ids=lambda text: Path(text.split()[2].split(":")[0]).stem)
def test_command_resolves_and_target_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = resolve(command)
    path = (REPOSITORY / command.split()[2].split(":")[0]).relative_to(FOLDER).with_suffix("")
    monkeypatch.syspath_prepend(str(FOLDER))
    name = ".".join(path.parts)
    try:
        output = call_on_meta(task, importlib.import_module(name))
    finally:
        for loaded in [loaded for loaded in sys.modules if loaded.split(".")[0] == path.parts[0]]:
            del sys.modules[loaded]
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    assert leaves
    assert all(leaf.device.type == "meta" and leaf.numel() > 0 for leaf in leaves)


def test_there_are_twelve_and_every_file_has_its_command() -> None:
    commands = read_commands()
    assert len(commands) == 12
    named = {REPOSITORY / command.split()[2].split(":")[0] for command in commands}
    files = {file for file in FOLDER.rglob("*.py") if file.name not in PACKAGE_FILES}
    assert named == files
    assert [command for command in commands if "--mode train" in command] == [
        "drk optimize tests/fixtures/twelve/batchnorm_train.py --mode train"
    ]


def test_none_is_in_benchmark_form() -> None:
    for file in FOLDER.rglob("*.py"):
        assert "def get_inputs" not in file.read_text(), file


def test_the_package_travels_with_its_relative_imports() -> None:
    task = resolve("drk optimize tests/fixtures/twelve/detector/models/head.py")
    assert {Path(path).name for path in task.files} == {"__init__.py", "config.py", "head.py", "layers.py"}
    assert task.target == "DetectionHead"
