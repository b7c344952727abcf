"""What was verified, as the Python constants that stand in an artefact: arguments, constructor, mode, weights.

Shapes, dtypes and strides come from the captured graph (the user's own call), constructor arguments from the task.
Values are written so that a person can read them and Python reads them back equal.

Which sizes may change: dimensions that the gym shrank for the interpreter, since the candidate was verified at both
sizes; where nothing was shrunk (on a GPU), the first dimension, when the target has one tensor input or several whose
first dimensions agree with each other and with no other one. Everything else must be as it was.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drk.assistant.errors import DrkError
from drk.assistant.random_operators import draws
from drk.gym.graph import Graph, Pack, Parameter, Placeholder, Ref, TensorMeta
from drk.gym.schema import Argument, Call, Nested, Scalar, Task, UserFunction, Verdict


class ArtefactError(DrkError):
    """No artefact can be written for this target; the message is the reason, for people."""

    default_kind = "artefact"


Shapes = Sequence[Sequence[int]]


def constants(task: Task, graph: Graph | None, verdict: Verdict, judged: Shapes = ()) -> dict[str, str]:
    """Return the constants of the guard template by name, as Python source.

    ``judged`` are the shapes of the tensor inputs as the gym judged them, in the order of the call.

    Raises:
        ArtefactError: what was verified cannot be written down (no graph, tensors in the constructor, seeded weights).
    """
    if graph is None:
        raise ArtefactError("the module could not be captured, so the shapes to guard are not known")
    if verdict.weights == "seeded" and graph.state:
        raise ArtefactError(
            "the candidate's parameters have other names than the module's, so it cannot use its weights"
        )
    free, sizes = _freedom(graph, judged)
    args, kwargs, function = init_source(task)
    return {
        "_TARGET": _quoted(task.target),
        "_KIND": _quoted(task.target_kind),
        "_SUBMODULE": _quoted(task.submodule),
        "_INIT_ARGS": args,
        "_INIT_KWARGS": kwargs,
        "_INIT_FUNCTION": _quoted(function),
        "_ARGUMENTS": _arguments(task, graph, free),
        "_FREE_SIZES": repr(sizes),
        "_TRAINING": repr(task.mode == "train" and task.target_kind != "function"),
        "_GRADIENTS": repr(task.grad),
        "_AUTOCAST": _quoted((task.autocast or "").removeprefix("torch.")),
        "_WEIGHTS": _quoted("converted" if verdict.weights == "converted" else "copied"),
        "_CHECK_NEW_SIZES": repr(not graph.mutations and (task.mode == "eval" or not any(map(draws, graph.nodes)))),
        "_OUTPUT": _output(graph.output, graph.metas()),
        "_CHANGED": repr(tuple(graph.mutations)),
        "_OPERATOR_NAME": _quoted(_operator_name(task, verdict)),
    }


def _operator_name(task: Task, verdict: Verdict) -> str:
    """Return the name under which the kernels are registered with torch."""
    words = re.sub(r"\W+", "_", f"{task.target}_{task.submodule}".strip("_")).lower()
    return f"drk::{words}_{verdict.candidate_id[:8] or 'kernels'}"


def _output(value: Any, metas: Mapping[str, TensorMeta]) -> str:
    """Return the result's structure; a tensor's record is the order of its dimensions in memory."""
    if isinstance(value, Ref):
        meta = metas[value.name]
        dims = sorted(range(len(meta.shape)), key=lambda dim: (-meta.strides[dim], dim))
        return f'("tensor", {tuple(dims)!r})'
    if not isinstance(value, Pack):
        return f'("value", {literal(value)})'
    items = [_output(item, metas) for item in value.items]
    if value.form == "dict":
        items = [f"({_quoted(key)}, {item})" for key, item in zip(value.keys, items, strict=True)]
    form = value.keys[0] if value.form == "tuple" and value.keys else value.form
    return f"({_quoted(form)}, {nested_source('list', items)})"


def literal(value: Any) -> str:
    """Return Python source of a plain value; infinities and NaN included."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Return the text in double quotes where that needs no escapes, as formatters prefer."""
    return f'"{text}"' if text.isprintable() and not set(text) & {'"', "\\"} else repr(text)


def argument_source(argument: Argument) -> str:
    """Return Python source of a constructor argument.

    Raises:
        ArtefactError: it is a tensor.
    """
    if isinstance(argument, Scalar):
        return literal(argument.value)
    if isinstance(argument, Nested):
        items = [argument_source(item) for item in argument.items]
        return nested_source(argument.form, items, argument.keys)
    raise ArtefactError("the constructor takes tensors, which cannot be written into the artefact")


def nested_source(form: str, items: list[str], keys: Iterable[str] = ()) -> str:
    """Return Python source of a list, tuple or dict whose items are given as source."""
    if form == "dict":
        return "{" + ", ".join(f"{literal(key)}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
    if form == "list":
        return f"[{', '.join(items)}]"
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def init_source(task: Task) -> tuple[str, str, str]:
    """Return the constructor's arguments as Python source, and the user's function that gives them, if any.

    Raises:
        ArtefactError: they hold tensors.
    """
    if isinstance(task.init, UserFunction):
        return "()", "{}", task.init.name
    assert isinstance(task.init, Call)
    args = nested_source("tuple", [argument_source(one) for one in task.init.args])
    kwargs = nested_source("dict", [argument_source(one) for one in task.init.kwargs.values()], task.init.kwargs)
    return args, kwargs, ""


Free = dict[str, tuple[int, ...]]


def _freedom(graph: Graph, judged: Shapes) -> tuple[Free, dict[int, int]]:
    """Return the free dimensions of each input, and their recorded sizes with the smaller verified ones."""
    inputs = [item for item in graph.placeholders if item.kind == "input"]
    if len(judged) == len(inputs):
        free, sizes = _shrunk(inputs, judged)
        if free:
            return free, sizes
    batch = _batch(item.meta.shape for item in inputs)
    free = {item.path: (0,) for item in inputs if batch and len(item.meta.shape) > 1 and _has_layout(item.meta)}
    return free, ({batch: batch} if free else {})


def _shrunk(inputs: Sequence[Placeholder], judged: Shapes) -> tuple[Free, dict[int, int]]:
    free: Free = {}
    sizes: dict[int, int] = {}
    for item, shape in zip(inputs, judged, strict=True):
        if len(shape) != len(item.meta.shape) or not _has_layout(item.meta):
            continue
        dims = [dim for dim, size in enumerate(item.meta.shape) if shape[dim] < size]
        fitting = [dim for dim in dims if sizes.setdefault(item.meta.shape[dim], shape[dim]) == shape[dim]]
        if fitting:
            free[item.path] = tuple(fitting)
    return free, sizes if free else {}


def _batch(all_shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the size of the free first dimension, or 0 where none is free."""
    shapes = [shape for shape in all_shapes if len(shape) > 1]
    if not shapes:
        return 0
    batch = shapes[0][0]
    others = {size for shape in shapes for size in shape[1:]}
    alike = len({shape[0] for shape in shapes}) == 1 and batch not in others
    return batch if len(shapes) == 1 or alike else 0


def _has_layout(meta: TensorMeta) -> bool:
    """Say whether the strides are those of a named layout, which exists at every size."""
    return meta.contiguous or (len(meta.shape) == 4 and meta.strides == _channels_last(meta.shape))


def _arguments(task: Task, graph: Graph, free: Free) -> str:
    metas = {item.path: item.meta for item in graph.placeholders if item.kind == "input"}
    rows = [
        f"    ({_quoted(name)}, {_expected(value, metas, free)}),\n"
        for name, value in _named_values(task, graph.signature)
    ]
    return "(\n" + "".join(rows) + ")" if rows else "()"


def _named_values(task: Task, signature: tuple[Parameter, ...]) -> list[tuple[str, Any]]:
    """Return name and value of each argument that was given; a function's names come from its own source."""
    given = [(one.name, one.value) for one in signature if one.has_value]
    kinds = {one.name: one.kind for one in signature}
    if task.target_kind != "function" or "var_positional" not in kinds.values():
        return given
    positional = [item for name, value in given if kinds[name] == "var_positional" for item in value.items]
    named = [
        pair
        for name, value in given
        if kinds[name] == "var_keyword"
        for pair in zip(value.keys, value.items, strict=True)
    ]
    names = _function_parameters(task)
    if len(positional) > len(names):
        raise ArtefactError("the function takes a variable number of arguments")
    by_name = {**dict(zip(names, positional, strict=False)), **dict(named)}
    return [(name, by_name[name]) for name in [*names, *by_name.keys() - set(names)] if name in by_name]


def _function_parameters(task: Task) -> list[str]:
    name = task.target.rpartition(".")[2]
    for node in ast.walk(ast.parse(task.files[task.entry].lstrip("\ufeff"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    raise ArtefactError(f"{task.entry} does not define {name} by def, so its arguments' names are not known")


def _expected(value: Any, metas: dict[str, TensorMeta], free: Free) -> str:
    if not isinstance(value, Pack):
        return f'("value", {literal(value)})'
    if value.form == "input":
        if value.items[0] not in metas:
            raise ArtefactError(f"the captured call does not say what {value.items[0]} is")
        return _expected_tensor(metas[value.items[0]], free.get(value.items[0], ()))
    items = [_expected(item, metas, free) for item in value.items]
    if value.form == "dict":
        items = [f"({_quoted(key)}, {item})" for key, item in zip(value.keys, items, strict=True)]
    return f"({_quoted(value.form)}, {nested_source('list', items)})"


def _expected_tensor(meta: TensorMeta, free: tuple[int, ...]) -> str:
    if meta.contiguous:
        layout = "torch.contiguous_format"
    elif len(meta.shape) == 4 and meta.strides == _channels_last(meta.shape):
        layout = "torch.channels_last"
    else:
        layout = repr(meta.strides)
    return f'("tensor", torch.{meta.dtype}, {meta.shape!r}, {layout}, {free!r})'


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    _, channels, height, width = shape
    return (channels * height * width, 1, width * channels, channels)
