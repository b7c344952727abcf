"""From what a user types to a Task: finds the target in the user's file, and its inputs; runs no user code.

``model.py``, ``model.py:Class``, ``model.py:function``, ``model.py:factory``, ``model.py:Class.blocks.0.mlp`` and
KernelBench files (``Model``, ``get_inputs``, ``get_init_inputs``) are understood. Inputs come from ``--input`` and
``--init``, from ``get_inputs`` / ``example_inputs`` and ``get_init_inputs`` in the file, and are never guessed: what is
missing is named, with the line to type.

Limits: everything is read from the text. Whether a function returns a module is known from its annotation or its
return statements (or said by ``factory=True``); whether inputs fit is known by count and name only, the Runner tells
the rest. Submodules have no known signature here, so their inputs are given or captured.
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
from drk.assistant.signature import Need, check_call, constructor_need, forward_need, function_need
from drk.assistant.source_index import ClassEntry, FunctionEntry
from drk.assistant.state_file import StateConverter, read_state
from drk.gym.schema import Call, Inputs, Mode, Precision, Task, Tolerance, UserFunction

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


# --- its inputs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """One of the two argument lists, constructor or call: where it may come from and what it must fill."""

    option: str
    names: tuple[str, ...]
    need: Need | None
    texts: Sequence[str]


def _resolve_inputs(project: ProjectIndex, wanted: _Wanted, file: str, target: str) -> Inputs:
    index = project.entry
    if wanted.texts:
        return check_call(wanted.texts, wanted.option, wanted.need, file, target)
    for name in wanted.names:
        function = index.functions.get(name)
        known = function is not None or name in index.values or name in index.imports
        if not known:
            continue
        count = function.returned_count if function is not None else None
        if wanted.need is None or count is None or wanted.need.takes(count):
            return UserFunction(name)
        if wanted.need.required:
            raise wanted.need.missing(
                wanted.option,
                file,
                target,
                f"{name}() gives {count} arguments, which {wanted.need.owner} does not take",
            )
    if wanted.need is None or not wanted.need.required:
        return Call()
    raise wanted.need.missing(wanted.option, file, target, "")


def _needs(project: ProjectIndex, target: Target) -> tuple[Need | None, Need | None]:
    """Return what the constructor and the call need; None where the text cannot say."""
    path = project.closure.entry
    found = project.find(path, target.name)
    place = found[0] if found is not None else path
    if isinstance(target.entry, ClassEntry):
        init = constructor_need(project, place, target.entry)
        call = None if target.submodule else forward_need(project, place, target.entry)
        return init, call
    if isinstance(target.entry, FunctionEntry):
        need = function_need(target.entry)
        if target.kind == "function":
            return None, need
        return need, None if target.submodule else _factory_forward(project, place, target.entry)
    return None, None


def _factory_forward(project: ProjectIndex, path: str, entry: FunctionEntry) -> Need | None:
    """Return the forward of the class that a factory returns, when the text names one of the project."""
    for name in [*entry.returned, entry.returns]:
        found = project.find_class(path, name)
        if found is not None:
            return forward_need(project, *found)
    return None


def _unknown_inputs(target: Target, file: str, cause: str = "") -> TargetError:
    return TargetError(
        f"the inputs of {target.label} are not known",
        kind="missing-inputs",
        file=file,
        cause=cause,
        help=f"type them, with your own shapes, such as\n{file}:{target.label} --input 'f32[8,128,1024]'"
        + ("" if target.submodule else "\nor define example_inputs() in the file"),
    )


def _arguments(
    project: ProjectIndex, target: Target, file: str, inputs: Sequence[str], init: Sequence[str]
) -> tuple[Inputs, Inputs]:
    """Return the constructor's and the call's arguments."""
    init_need, call_need = _needs(project, target)
    if target.submodule and not inputs:
        raise _unknown_inputs(target, file, "inputs that the file gives are those of the whole module")
    constructed = target.entry is not None and target.kind != "function"
    if init and not constructed:
        raise UsageError(f"--init: {target.name} is not constructed, it takes none", file=file)
    built: Inputs = Call()
    if constructed:
        built = _resolve_inputs(project, _Wanted("--init", INIT_NAMES, init_need, init), file, target.label)
    call = _resolve_inputs(project, _Wanted("--input", INPUT_NAMES, call_need, inputs), file, target.label)
    if call_need is None and call == Call():
        raise _unknown_inputs(target, file)
    return built, call


def resolve_target(  # noqa: PLR0913 - the command line's options, all by name
    target: str,
    *,
    inputs: Sequence[str] = (),
    init: Sequence[str] = (),
    mode: Mode = "eval",
    precision: Precision = "match",
    tolerance: Tolerance = "float64",
    state_dict: Path | None = None,
    cwd: Path | None = None,
    factory: bool | None = None,
    convert_state: StateConverter | None = None,
) -> Task:
    """Turn ``FILE[:NAME]`` and the options into a Task.

    Args:
        target: the file, and optionally a class, function, factory, module-level module, or a part of one.
        inputs: texts of ``--input`` (:mod:`drk.assistant.input_language`); they replace what the file gives.
        init: texts of ``--init``.
        mode: ``eval`` or ``train``.
        precision: see :class:`drk.gym.schema.Task`.
        tolerance: see there.
        state_dict: ``.safetensors`` file with weights; other formats need ``convert_state``.
        cwd: folder that relative paths start from, the current one by default.
        factory: True says that a function returns a module, False that it does not, None asks the text.
        convert_state: turns a pickled state dict into safetensors bytes in a sandboxed process.

    Raises:
        TargetError: the file or its target cannot be used; ``help`` holds the line to type.
        UsageError: an option's text is wrong.
    """
    file, name = split_target(target, cwd)
    closure = collect(locate(file, cwd))
    if not closure.files[closure.entry].strip():
        raise TargetError(f"{file} is empty", kind="empty", file=file)
    project = ProjectIndex(closure)
    found = find_target(project, name, file, factory) if name else choose_target(project, file, factory)
    if factory and found.kind != "factory":
        raise UsageError(f"--factory: {found.name} is no function", file=file)
    built, call = _arguments(project, found, file, inputs, init)
    return Task(
        name=f"{Path(file).stem}:{found.label}",
        files=closure.files,
        entry=closure.entry,
        target=found.name,
        target_kind=found.kind,
        submodule=found.submodule,
        init=built,
        inputs=call,
        mode=mode,
        precision=precision,
        tolerance=tolerance,
        tensors=read_state(state_dict, cwd, convert_state) if state_dict is not None else None,
    )
