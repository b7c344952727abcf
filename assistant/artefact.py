"""From a verified candidate to files that a user can merge: module, test, diff (DESIGN 5).

The module is the candidate's source, then constants with what was verified (constructor arguments, shapes, dtypes,
layouts, mode), then the runtime of :mod:`drk.assistant.artefact_runtime_template`: ``optimize``, ``restore``, ``stats``
and the decorator ``optimized``. It imports without CUDA and falls back to the original there. The diff adds one import
and one decorator. Everything is written into the run folder; :mod:`drk.assistant.apply` moves it to the user's.

Under ``torch.compile`` and ``torch.export`` the kernels are one registered operator with a fake implementation
(:mod:`drk.assistant.artefact_operator_template`).

Honest limits: where gradients are needed, and under ``torch.jit.trace``, the original runs; only batch-like dimensions
are free; constructor arguments must be plain values or the file's own function.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from drk.assistant.artefact_gradient_test import GRADIENT_TESTS
from drk.assistant.artefact_record import ArtefactError, Shapes, constants, literal, nested_source
from drk.assistant.artefact_test_template import STATE_TESTS, TEST
from drk.assistant.check_record import record_lines
from drk.assistant.episode import Turn, describe_gain
from drk.assistant.errors import TargetError
from drk.assistant.regions_source import top_names
from drk.assistant.source_edit import add_kernels, unified_diff
from drk.gym.graph import Graph
from drk.gym.module_names import place_module
from drk.gym.schema import Argument, CapturedTensor, Nested, Scalar, Task, TensorSpec, UserFunction
from drk.gym.wire import candidate_id

HEADER = "# Written and verified by drk"
"""First words of every artefact's module."""
_TEMPLATES = ("artefact_guard_template", "artefact_operator_template", "artefact_runtime_template")
_LINE = "# " + "-" * 100
_IMPORTS = """\
import copy  # noqa: E402
import functools  # noqa: E402
import inspect  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import types  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Callable, Iterable, Iterator  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import triton  # noqa: E402
from torch import nn  # noqa: E402
"""


@dataclass(frozen=True)
class SourceFile:
    """The user's file as it was when it was optimised: ``entry`` is its path relative to ``root``."""

    root: Path
    entry: str
    data: bytes

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self.root / self.entry

    @property
    def sha256(self) -> str:
        """Digest that the version guard compares."""
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Artefact:
    """Names and contents of the three files, and the user's file with the edit; ``parts`` are further modules."""

    module_name: str
    module: bytes
    test_name: str
    test: bytes
    diff_name: str
    diff: bytes
    edited: bytes
    parts: tuple[tuple[str, bytes], ...] = ()


def build_artefact(
    task: Task, best: Turn, graph: Graph | None, source: SourceFile, run_dir: Path, judged: Shapes = ()
) -> Artefact:
    """Return the artefact of an accepted turn. Nothing is written.

    Args:
        task: the task that was optimised.
        best: the accepted turn.
        graph: the captured call, which says what to guard.
        source: the user's file.
        run_dir: where the files will lie at first; the test finds the user's file from there.
        judged: shapes of the tensor inputs as the gym judged them.

    Raises:
        ArtefactError: no artefact can be made for this target, with the reason.
    """
    stem = kernels_stem(source.entry)
    verified = constants(task, graph, best.verdict, judged)
    module = module_source(task, best, verified)
    edited = edit_source(task, source)
    return Artefact(
        module_name=f"{stem}_kernels.py",
        module=module.encode(),
        test_name=f"test_{stem}_kernels.py",
        test=_test_source(task, verified, stem, source, run_dir).encode(),
        diff_name=f"{stem}.diff",
        diff=unified_diff(source.data, edited, source.entry),
        edited=edited,
    )


def edit_source(task: Task, source: SourceFile) -> bytes:
    """Return the user's file with the import and the decorator.

    Raises:
        ArtefactError: the edit cannot be made.
    """
    place = place_module(task.entry, task.files, relative=_is_relative(task))
    in_package = "." in place.name and not place.synthetic
    dotted = f"{'.' if in_package else ''}{kernels_stem(task.entry)}_kernels"
    try:
        return add_kernels(source.data, target=task.target, kernels_module=dotted, name=source.entry)
    except TargetError as error:
        raise ArtefactError(f"the edit of {source.entry} cannot be made: {error.message}") from error


def user_place(task: Task) -> tuple[str, bool]:
    """Return the dotted name under which a test imports the user's file, and whether that is in a package."""
    place = place_module(task.entry, task.files, relative=_is_relative(task))
    name = place.name if not place.name.startswith("drk_entry_") else PurePosixPath(task.entry).stem
    return name, "." in name


def module_source(task: Task, best: Turn, verified: Mapping[str, str]) -> str:
    """Return the text of ``<stem>_kernels.py``.

    Raises:
        ArtefactError: the candidate defines a name that the runtime needs.
    """
    runtime = "\n\n".join(below_marker(name) for name in _TEMPLATES)
    clash = top_names(best.candidate.source) & (top_names(runtime) | set(verified))
    if clash:
        raise ArtefactError(f"the candidate defines {', '.join(sorted(clash))}, which the artefact needs itself")
    values = "".join(f"{name} = {value}\n" for name, value in verified.items())
    return (
        f"{_header(task, best)}\n{best.candidate.source.strip()}\n\n\n{_LINE}\n"
        "# What was verified. Calls and models that differ use the original code instead.\n"
        f"{_LINE}\n{_IMPORTS}\n{values}\n{runtime.strip()}\n"
    )


def _header(task: Task, best: Turn) -> str:
    verdict = best.verdict
    how = {"gpu": "measured on a GPU", "interpreter": "logic checked by Triton's interpreter"}
    facts = [
        f"{HEADER} for {task.target} in {task.entry}: optimize(model), restore(model), stats(model), @optimized.",
        f"# Evidence: {how.get(verdict.evidence, verdict.evidence)}; {describe_gain(verdict)}.",
        f"# Candidate {candidate_id(best.candidate)} by {best.candidate.proposer}.",
    ]
    return "\n".join([*(line.replace("\n", " ")[:200] for line in facts), *record_lines(task, best)])


def below_marker(name: str) -> str:
    """Return the copied part of a template module, without what only a type checker reads."""
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    text = re.split(r"^# --- drk \w+ -+\n", text, maxsplit=1, flags=re.MULTILINE)[1]
    return re.sub(r"  # type: ignore\[[^\]]*\]", "", text).strip() + "\n"


def kernels_stem(entry: str) -> str:
    """Return the start of the artefact's file names."""
    path = PurePosixPath(entry)
    stem = path.parent.name if path.stem == "__init__" else path.stem
    cleaned = re.sub(r"\W", "_", stem) or "module"
    return cleaned if cleaned.isidentifier() else f"m{cleaned}"


def _is_relative(task: Task) -> bool:
    text = task.files[task.entry].lstrip("\ufeff")
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(text)))


# --- the test ------------------------------------------------------------------------------------------------


def _test_source(task: Task, verified: Mapping[str, str], stem: str, source: SourceFile, run_dir: Path) -> str:
    entry = PurePosixPath(task.entry)
    name, packaged = user_place(task)
    top = source.path.parents[name.count(".")]
    package = f"{name.rpartition('.')[0]}." if packaged else ""
    is_module = task.target_kind != "function"
    autocast = (task.autocast or "").removeprefix("torch.")
    calling = {
        "autocast_dtype": f"torch.{autocast or 'bfloat16'}",
        "autocast": bool(autocast),
        "exact": "copy.deepcopy(original).double()" if is_module else "original",
    }
    text = TEST.substitute(
        calling,
        kernels=f"{stem}_kernels",
        kernels_when_beside=f"{package}{stem}_kernels",
        entry_name=entry.name,
        user_module=name,
        root_when_beside=os.path.relpath(top, source.path.parent),
        root_when_not=os.path.relpath(top, run_dir),
        small=2 if "], " in verified["_ARGUMENTS"] or _has_deep_tensor(verified["_ARGUMENTS"]) else 33,
        build=build_lines(task),
        build_argument=f", build=inspect.unwrap(user.{task.target})" if task.target_kind == "factory" else "",
        draw=draw_lines(task),
        exact_now="build().double()" if is_module else "build()",
    )
    text += STATE_TESTS if is_module and not task.submodule else ""
    return text + (GRADIENT_TESTS.substitute(calling) if task.grad else "")


def _has_deep_tensor(arguments: str) -> bool:
    return re.search(r'\("tensor", torch\.\w+, \(\d+, \d+, ', arguments) is not None


def build_lines(task: Task) -> str:
    """Return the lines of a test that build the original."""
    if task.target_kind == "function":
        return f"    model = user.{task.target}"
    if isinstance(task.init, UserFunction):
        lines = [
            f"    given = user.{task.init.name}",
            "    given = given() if callable(given) else given",
            "    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})",
            f"    model = user.{task.target}(*args, **kwargs)",
        ]
    else:
        lines = [f"    model = user.{task.target}(*kernels._INIT_ARGS, **kernels._INIT_KWARGS)"]
    lines.append(f"    model = model.to(DEVICE).train({task.mode == 'train'})")
    return "\n".join(lines)


def draw_lines(task: Task) -> str:
    """Return the lines of a test that draw the arguments of one call.

    Raises:
        ArtefactError: they were captured.
    """
    inputs = task.inputs
    if isinstance(inputs, UserFunction):
        lines = [
            f"    given = user.{inputs.name}",
            "    given = given() if callable(given) else given",
            "    given = (given,) if isinstance(given, torch.Tensor) else given",
            "    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})",
        ]
        return "\n".join(lines)
    args = nested_source("tuple", [_draw(one) for one in inputs.args])
    kwargs = nested_source("dict", [_draw(one) for one in inputs.kwargs.values()], inputs.kwargs)
    return f"    args, kwargs = {args}, {kwargs}"


def _draw(argument: Argument) -> str:
    """Return Python source that draws one argument at its verified shape."""
    if isinstance(argument, Scalar):
        return literal(argument.value)
    if isinstance(argument, Nested):
        return nested_source(argument.form, [_draw(item) for item in argument.items], argument.keys)
    if isinstance(argument, CapturedTensor):
        raise ArtefactError("inputs that were captured from a run cannot be written into a test")
    return _draw_tensor(argument)


def _draw_tensor(spec: TensorSpec) -> str:
    shape, dtype = tuple(spec.shape), f"torch.{spec.dtype}"
    low = 0 if spec.low is None else spec.low
    if spec.dtype == "bool" or spec.fill == "bernoulli":
        text = f"(torch.rand({shape}) < 0.5).to({dtype})"
    elif spec.fill in ("zeros", "ones"):
        text = f"torch.{spec.fill}({shape}, dtype={dtype})"
    elif spec.fill == "integers" or "int" in spec.dtype:
        text = f"torch.randint({int(low)}, {int(2 if spec.high is None else spec.high)}, {shape}, dtype={dtype})"
    elif spec.fill == "uniform":
        high = 1.0 if spec.high is None else spec.high
        text = f"torch.empty({shape}).uniform_({float(low)!r}, {float(high)!r}).to({dtype})"
    else:
        text = f"torch.randn({shape}).to({dtype})"
    if spec.strides is not None:
        return f"torch.empty_strided({shape}, {tuple(spec.strides)}, dtype={dtype}).copy_({text})"
    return text if spec.layout == "contiguous" else f"{text}.contiguous(memory_format=torch.{spec.layout})"
