"""From what a user types to a Task: the target and its inputs; runs no user code.

``model.py``, ``model.py:Class``, ``model.py:function``, ``model.py:factory``, ``model.py:Class.blocks.0.mlp`` and
KernelBench files (``Model``, ``get_inputs``, ``get_init_inputs``) are understood (:mod:`drk.assistant.target`). Inputs
come from ``--input`` and ``--init``, from ``get_inputs`` / ``example_inputs`` and ``get_init_inputs`` in the file, and
are never guessed: what is missing is named, with the line to type.

Limits: everything is read from the text. Whether a function returns a module is known from its annotation or its
return statements (or said by ``factory=True``); whether inputs fit is known by count and name only, the Runner tells
the rest. Submodules have no known signature here, so their inputs are given or captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drk.assistant.errors import TargetError, UsageError
from drk.assistant.project_index import ProjectIndex
from drk.assistant.signature import Need, check_call, constructor_need, forward_need, function_need
from drk.assistant.source_index import ClassEntry, FunctionEntry
from drk.assistant.state_file import StateConverter, read_state
from drk.assistant.target import INIT_NAMES, INPUT_NAMES, Located, Target, locate, locate_target, split_target
from drk.gym.schema import Call, Inputs, Mode, Precision, Task, Tolerance, UserFunction

__all__ = ["call_inputs", "constructor_inputs", "locate", "locate_target", "resolve_target", "split_target"]


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


def constructor_inputs(located: Located, init: Sequence[str]) -> Inputs:
    """Return the constructor's arguments from ``--init`` or the file.

    Raises:
        TargetError: kind ``missing-init``.
        UsageError: a text is wrong, or the target is not constructed.
    """
    target = located.target
    if target.entry is None or target.kind == "function":
        if init:
            raise UsageError(f"--init: {target.name} is not constructed, it takes none", file=located.file)
        return Call()
    need, _ = _needs(located.project, target)
    return _resolve_inputs(located.project, _Wanted("--init", INIT_NAMES, need, init), located.file, target.label)


def call_inputs(located: Located, inputs: Sequence[str]) -> Inputs:
    """Return the call's arguments from ``--input`` or the file.

    Raises:
        TargetError: kind ``missing-inputs``.
        UsageError: a text is wrong.
    """
    target, file = located.target, located.file
    if target.submodule and not inputs:
        raise _unknown_inputs(target, file, "inputs that the file gives are those of the whole module")
    _, need = _needs(located.project, target)
    call = _resolve_inputs(located.project, _Wanted("--input", INPUT_NAMES, need, inputs), file, target.label)
    if need is None and call == Call():
        raise _unknown_inputs(target, file)
    return call


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
    known_inputs: Inputs | None = None,
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
        known_inputs: the call's arguments, where they are known otherwise (a part's, recorded from a run).

    Raises:
        TargetError: the file or its target cannot be used; ``help`` holds the line to type.
        UsageError: an option's text is wrong.
    """
    located = locate_target(target, cwd=cwd, factory=factory)
    called = call_inputs(located, inputs) if known_inputs is None else known_inputs
    task = located.task(constructor_inputs(located, init), called)
    tensors = read_state(state_dict, cwd, convert_state) if state_dict is not None else None
    return replace(task, mode=mode, precision=precision, tolerance=tolerance, tensors=tensors)
