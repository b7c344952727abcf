"""From a committed artefact to the Task that judges it again: the user's code as it is now, without drk's edit.

The artefact lies beside the file it was made for. That file has drk's import and decorator in it, so a reference made
of it would run the very kernels it is to judge: both are taken out of the text (lines stay where they are, so that
errors point to the user's lines). No user code runs here.

Left out: artefacts that were moved away from their file, and edits made by hand in another form.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path, PurePosixPath

from drk.assistant.check_record import Record
from drk.assistant.errors import TargetError
from drk.assistant.source_edit import DECORATOR
from drk.assistant.target import locate_target
from drk.gym.schema import Task


def committed_task(artefact: Path, record: Record) -> Task:
    """Return the task of an artefact: recorded target, inputs and mode, present sources.

    Raises:
        TargetError: the file is not beside the artefact, or no longer defines the target.
    """
    then = record.task
    file = artefact.with_name(PurePosixPath(then.entry).name)
    if not file.is_file():
        raise TargetError(
            f"{file.name}, which these kernels were made for, is not beside them",
            kind="record-file",
            file=str(artefact),
        )
    label = f"{then.target}.{then.submodule}" if then.submodule else then.target
    factory = {"factory": True, "function": False, "module": None}[then.target_kind]
    now = locate_target(f"{file.resolve()}:{label}", factory=factory).task(then.init, then.inputs)
    kernels = stem(artefact)
    files = {
        path: without_kernels(text, kernels)
        for path, text in now.files.items()
        if PurePosixPath(path).stem != kernels or path == now.entry
    }
    return replace(
        now,
        name=then.name,
        files=files,
        mode=then.mode,
        precision=then.precision,
        tolerance=then.tolerance,
        grad=then.grad,
        autocast=then.autocast,
    )


def stem(artefact: Path) -> str:
    """Return the name of the module that the user's file imports: that of the whole, for a part of it."""
    whole, _, number = artefact.stem.rpartition("_")
    return whole if number.isdigit() and whole.endswith("_kernels") else artefact.stem


def without_kernels(text: str, kernels: str) -> str:
    """Return ``text`` without drk's import from ``kernels``, its decorators and rebindings; lines stay in place."""
    if kernels not in text:
        return text
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return text
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and _is_of(node, kernels)]
    names = {one.asname or one.name for node in imports for one in node.names if one.name == DECORATOR}
    drop: set[int] = set()
    for node in imports:
        drop |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for part in ast.walk(tree):
        if isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            uses = [one for one in part.decorator_list if isinstance(one, ast.Name) and one.id in names]
            drop |= {one.lineno for one in uses}
        elif isinstance(part, ast.Assign) and _calls(part.value, names):
            drop.add(part.lineno)
    lines = text.splitlines(keepends=True)
    return "".join(_blank(line) if number in drop else line for number, line in enumerate(lines, start=1))


def uses_kernels(text: str, kernels: str) -> bool:
    """Say whether a file imports from the module of the kernels."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ImportFrom) and _is_of(node, kernels) for node in ast.walk(tree))


def _is_of(node: ast.ImportFrom, kernels: str) -> bool:
    return (node.module or "").rpartition(".")[2] == kernels


def _calls(value: ast.expr, names: set[str]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in names


def _blank(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]
