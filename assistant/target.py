"""Finds what ``FILE[:NAME]`` means in the text of the user's project; runs no user code.

A name is a class, a function, a factory (a function that returns a module), a module made at the top level, or a part
of one of them by a dotted path. Without a name it is ``Model``, or the one module that no other class of the file uses,
or the file's only function; anything else is ambiguous, and the error lists the lines to type.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from drk.assistant.errors import TargetError, UsageError, did_you_mean
from drk.assistant.import_closure import collect
from drk.assistant.project_index import ProjectIndex
from drk.assistant.source_index import ClassEntry, FunctionEntry
from drk.gym.schema import Inputs, Task

TargetKind = Literal["module", "function", "factory"]
INPUT_NAMES = ("get_inputs", "example_inputs")
INIT_NAMES = ("get_init_inputs", "example_init")
NO_TARGETS = frozenset({*INPUT_NAMES, *INIT_NAMES, "main"})


@dataclass(frozen=True)
class Target:
    """What in the file is meant. ``entry`` is None for a value (a module made at the top level)."""

    name: str
    kind: TargetKind
    submodule: str = ""
    entry: ClassEntry | FunctionEntry | None = None

    @property
    def label(self) -> str:
        """The part after the colon."""
        return f"{self.name}.{self.submodule}" if self.submodule else self.name


def split_target(target: str, cwd: Path | None = None) -> tuple[str, str]:
    """Split ``FILE[:NAME]``; a colon belongs to the file's name when such a file exists."""
    if ":" not in target or ((cwd or Path.cwd()) / target).exists():
        return target, ""
    file, _, name = target.rpartition(":")
    return file, name


def locate(file: str, cwd: Path | None) -> Path:
    """Return the absolute path of the user's file.

    Raises:
        TargetError: kinds ``not-found``, ``folder``, ``not-python``, ``empty``, ``unreadable``.
    """
    if not file:
        raise TargetError("no file is named", kind="not-found", help="type a file, such as model.py or model.py:Net")
    path = (cwd or Path.cwd()) / Path(file).expanduser()
    try:
        if path.is_dir():
            raise TargetError(f"{file} is a folder", kind="folder", file=file, help=_folder_help(path, file))
        if not path.exists():
            raise TargetError(f"{file} does not exist", kind="not-found", file=file, help=_near_files(path))
        if not path.is_file():
            raise TargetError(f"{file} is no regular file", kind="not-python", file=file)
        if path.suffix != ".py":
            advice = "export the cells to a .py file first" if path.suffix == ".ipynb" else ""
            raise TargetError(f"{file} is no Python file (.py)", kind="not-python", file=file, help=advice)
        if path.stat().st_size == 0:
            raise TargetError(f"{file} is empty", kind="empty", file=file)
    except OSError as error:
        raise TargetError(f"cannot read {file}: {error.strerror}", kind="unreadable", file=file) from error
    return Path(os.path.abspath(path))  # noqa: PTH100 - links are kept: imports are found beside the link


def _folder_help(path: Path, file: str) -> str:
    found = sorted(child.name for child in path.glob("*.py"))[:6]
    return "name one of its files: " + ", ".join(str(Path(file) / name) for name in found) if found else "name a file"


def _near_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    names = [child.name for child in path.parent.iterdir() if child.suffix == ".py"]
    return did_you_mean(path.name, names) or (f"there are: {', '.join(sorted(names)[:6])}" if names else "")


# --- which target ----------------------------------------------------------------------------------------------


def choose_target(project: ProjectIndex, file: str, factory: bool | None = None) -> Target:
    """Return the only sensible target of a file: ``Model``, or the module that no other class uses.

    Raises:
        TargetError: kinds ``ambiguous`` and ``no-target``, with the lines to type.
    """
    index = project.entry
    modules = project.modules()
    named = [entry for entry in modules if entry.name == "Model"]
    used = {name for entry in index.classes.values() for name in entry.used if name != entry.name}
    tops = named or [entry for entry in modules if entry.name not in used and "." not in entry.name] or modules
    if len(tops) == 1:
        return Target(tops[0].name, "module", entry=tops[0])
    if len(tops) > 1:
        raise _ambiguous(file, [(entry.name, entry.line) for entry in tops], "several modules could be meant")
    values = [(name, line) for name, (line, call) in index.values.items() if _makes_module(project, call)]
    if len(values) == 1:
        return Target(values[0][0], "module")
    functions = [f for name, f in index.functions.items() if name not in NO_TARGETS and not name.startswith("_")]
    if len(functions) == 1 and not values:
        return _function_target(project, functions[0], factory)
    choices = values + [(function.name, function.line) for function in functions]
    if choices:
        raise _ambiguous(file, choices, "no class of it is a torch.nn.Module; one of these could be meant")
    raise TargetError(
        f"{file} defines no torch.nn.Module and no function",
        kind="no-target",
        file=file,
        help="name a file that defines one",
    )


def _ambiguous(file: str, choices: Sequence[tuple[str, int]], why: str) -> TargetError:
    lines = [f"{file}:{name}    (line {line})" for name, line in sorted(choices, key=lambda choice: choice[1])[:20]]
    return TargetError(
        f"which part of {file} is meant?",
        kind="ambiguous",
        file=file,
        cause=why,
        help="type one of\n" + "\n".join(lines),
    )


def _makes_module(project: ProjectIndex, called: str) -> bool:
    if not called:
        return False
    path = project.closure.entry
    if project.is_module_name(path, called):
        return True
    found = project.find(path, called)
    return found is not None and isinstance(found[1], FunctionEntry) and project.is_factory(found[0], found[1])


def _function_target(project: ProjectIndex, entry: FunctionEntry, factory: bool | None, submodule: str = "") -> Target:
    if entry.is_async:
        raise TargetError(
            f"{entry.name} is an async function; drk judges plain ones", kind="no-target", line=entry.line
        )
    is_factory = project.is_factory(project.closure.entry, entry) if factory is None else factory
    if submodule and not is_factory:
        is_factory = True  # Only a module has parts; the Runner says so when it returns none.
    return Target(entry.name, "factory" if is_factory else "function", submodule, entry)


def find_target(project: ProjectIndex, name: str, file: str, factory: bool | None) -> Target:
    """Return what ``name`` (the text after the colon) means.

    Raises:
        TargetError: kinds ``no-target`` (with the nearest name) and ``not-a-module``.
    """
    index = project.entry
    parts = name.split(".")
    if not all(parts):
        raise TargetError(f"{name!r} is no name of a target", kind="no-target", file=file)
    for length in range(len(parts), 0, -1):
        head, rest = ".".join(parts[:length]), ".".join(parts[length:])
        if head in index.classes:
            return _class_target(project, project.closure.entry, index.classes[head], head, rest, file)
    head, rest = parts[0], ".".join(parts[1:])
    if head in index.functions:
        return _function_target(project, index.functions[head], factory, rest)
    if head in index.values:
        return Target(head, "module", rest)
    found = project.find(project.closure.entry, head) if head in index.imports or "*" in index.imports else None
    if found is not None:
        if isinstance(found[1], ClassEntry):
            return _class_target(project, found[0], found[1], head, rest, file)
        return _function_target(project, found[1], factory, rest)
    if head in index.imports:
        return Target(head, "module", rest)
    known = [*index.names(), *index.values]
    advice = did_you_mean(head, known)
    choices = [known_name for known_name in index.names() if known_name not in NO_TARGETS]
    if not advice and choices:
        advice = f"it defines: {', '.join(choices[:12])}"
    raise TargetError(f"{file} defines no {head!r}", kind="no-target", file=file, help=advice)


def _class_target(project: ProjectIndex, path: str, entry: ClassEntry, head: str, rest: str, file: str) -> Target:
    if project.module_kind(path, entry) == "no":
        names = [module.name for module in project.modules()]
        raise TargetError(
            f"{head} is not derived from torch.nn.Module",
            kind="not-a-module",
            file=file,
            line=entry.line if path == project.closure.entry else None,
            help=f"modules in this file: {', '.join(names)}" if names else "",
        )
    return Target(head, "module", rest, entry)


@dataclass(frozen=True)
class Located:
    """A target found in the text of a project; ``file`` is the path as the user typed it."""

    project: ProjectIndex
    target: Target
    file: str

    def task(self, init: Inputs, inputs: Inputs) -> Task:
        """Return a Task for this target in its default mode and policies."""
        closure, target = self.project.closure, self.target
        return Task(
            name=f"{Path(self.file).stem}:{target.label}",
            files=closure.files,
            entry=closure.entry,
            target=target.name,
            target_kind=target.kind,
            submodule=target.submodule,
            init=init,
            inputs=inputs,
        )


def locate_target(target: str, *, cwd: Path | None = None, factory: bool | None = None) -> Located:
    """Find what ``FILE[:NAME]`` means; inputs are not looked at.

    Raises:
        TargetError: the file or its target cannot be used; ``help`` holds the line to type.
        UsageError: ``factory`` is said of something that is no function.
    """
    file, name = split_target(target, cwd)
    closure = collect(locate(file, cwd))
    if not closure.files[closure.entry].strip():
        raise TargetError(f"{file} is empty", kind="empty", file=file)
    project = ProjectIndex(closure)
    found = find_target(project, name, file, factory) if name else choose_target(project, file, factory)
    if factory and found.kind != "factory":
        raise UsageError(f"--factory: {found.name} is no function", file=file)
    return Located(project, found, file)
