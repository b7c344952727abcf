"""A typed, seeded generator of tasks: small PyTorch modules over families of operations.

Families are grammars (:mod:`drk.training.families`, :mod:`drk.training.layer_families`,
:mod:`drk.training.pattern_families`, :mod:`drk.training.scale_families`): pointwise chains to ten operations, general
DAGs, reductions over any dimension, row norms, gates, losses, products with epilogues, layers, pooling, convolutions
with tails, attention-like scores, statistics, pairs, neighbours, columns, formulas, masks, rounding. What varies
besides: spelling, class layout, where constants live, open names, comments, shapes, dtypes.

A task's *signature* is its family and operations with their topology, without constants, names, layout and shapes.
Tasks are distinct by signature, and split by family or by a hash of the signature, so that no held-out composition is
ever trained on. ``seed`` fixes the structure, ``dress`` the words around it.

Honest limits: no recurrence, no indexing by values, no control flow; half precision only without parameters.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from drk.gym.schema import Argument, Call, Scalar, Task, TensorSpec
from drk.gym.wire import task_id
from drk.training import families as plain_families
from drk.training.dressing import CanonicalDress, Dress
from drk.training.errors import OptionError
from drk.training.families import Family
from drk.training.layer_families import LAYER_FAMILIES
from drk.training.module_text import module_text
from drk.training.pattern_families import PATTERN_FAMILIES
from drk.training.scale_families import SCALE_FAMILIES
from drk.training.task_writer import InputSpec, Writer

Split = Literal["train", "held-out"]
FAMILIES: dict[str, Family] = {**plain_families.FAMILIES, **LAYER_FAMILIES, **PATTERN_FAMILIES, **SCALE_FAMILIES}
FILE = "model.py"
MAX_REPEATS = 50
"""Draws in a row that bring nothing new, for each task asked for, after which the generator gives up."""


@dataclass(frozen=True)
class TrainingTask:
    """A task with where it comes from. ``signature`` names its operations; ``seed`` and ``dress`` repeat it."""

    task: Task
    family: str
    signature: str
    seed: int
    dress: int = 0


def draw_task(family: str, seed: int, *, rows: int = 0, dress: int = 0) -> TrainingTask:
    """Return the task that ``family``, ``seed`` and ``dress`` stand for. ``rows`` above 0 asks for small sizes.

    Raises:
        OptionError: no such family.
    """
    return draw_dressed(family, seed, Dress(random.Random(f"dress:{family}:{seed}:{dress}")), rows=rows, number=dress)


def draw_canonical(
    family: str, seed: int, *, rows: int = 0, fixed: Sequence[float] | None = None
) -> tuple[TrainingTask, Dress]:
    """Return a structure's task in canonical dress, with that dress: what is captured once for many texts.

    ``fixed`` are constants to use in the place of canonical ones.

    Raises:
        OptionError: no such family.
    """
    dress = CanonicalDress(fixed)
    return draw_dressed(family, seed, dress, rows=rows, number=-1), dress


def draw_dressed(family: str, seed: int, dress: Dress, *, rows: int, number: int) -> TrainingTask:
    """Return the task of a structure in ``dress``, which then holds the names and constants used.

    Raises:
        OptionError: no such family.
    """
    known = FAMILIES | plain_families.MEASURED_ONLY
    if family not in known:
        raise OptionError(f"unknown family {family!r}", help=f"one of {', '.join(known)}")
    writer = Writer(random.Random(f"{family}:{seed}"), dress, small=rows > 0)
    results = known[family](writer)
    if rows and writer.inputs[0].shape and family in ("pointwise", "dag", "long-chain", "reduction", "row", "loss"):
        _set_rows(writer, rows)
    source, target = module_text(writer, results)
    given = writer.arguments[: writer.given] if writer.given is not None else writer.arguments
    init: tuple[Argument, ...] = tuple(Scalar(value) for _, value in given) if writer.setup else ()
    args: tuple[Argument, ...] = tuple(_spec(one) for one in writer.inputs)
    task = Task(f"{family}-{seed}", {FILE: source}, FILE, target, init=Call(init), inputs=Call(args))
    return TrainingTask(task, family, f"{family}:{' '.join(writer.ops)}", seed, number)


def _spec(one: InputSpec) -> TensorSpec:
    if one.fill in ("normal", "bernoulli"):
        return TensorSpec(one.shape, one.dtype, fill=one.fill)
    return TensorSpec(one.shape, one.dtype, low=one.low, high=one.high, fill=one.fill)


def _set_rows(writer: Writer, rows: int) -> None:
    """Give all inputs that share their first size with the first one ``rows`` of them instead."""
    first = writer.inputs[0].shape[0]
    if len(writer.inputs[0].shape) == 2 and not writer.setup:
        for one in writer.inputs:
            if one.shape[:1] == (first,) and len(one.shape) == 2:
                one.shape = (rows, *one.shape[1:])
            elif one.shape == (first,) and one.fill == "integers":
                one.shape = (rows,)


def split_of(task: TrainingTask, *, held_out_families: Sequence[str] = (), share: float = 0.1) -> Split:
    """Return where ``task`` belongs: held out by family, or by a hash of its signature (about ``share`` of them)."""
    if task.family in held_out_families:
        return "held-out"
    digest = int.from_bytes(hashlib.sha256(task.signature.encode()).digest()[:8], "big")
    return "held-out" if digest / 2**64 < share else "train"


def draw_tasks(
    count: int,
    *,
    families: Sequence[str] = (),
    seed: int = 0,
    rows: int = 0,
    split: Split = "train",
    held_out_families: Sequence[str] = (),
    least_elements: int = 0,
) -> list[TrainingTask]:
    """Return ``count`` tasks of one split with distinct signatures, families in turn.

    ``least_elements`` leaves out tasks whose largest input is smaller.

    Raises:
        OptionError: an unknown family, or so few compositions that the count cannot be reached.
    """
    found: list[TrainingTask] = []
    stream = endless_tasks(
        families or tuple(FAMILIES), seed, rows=rows, split=split, held_out_families=held_out_families
    )
    seen: set[str] = set()
    tries = 0
    while len(found) < count:
        task, tries = next(stream), tries + 1
        if task is not None and task.signature not in seen and largest_input(task.task) >= least_elements:
            seen |= {task.signature, task_id(task.task)}
            found.append(task)
        elif tries > 200 + MAX_REPEATS * count:
            raise OptionError(f"only {len(found)} of {count} tasks could be drawn", help="add families")
    return found


def largest_input(task: Task) -> int:
    """Return the number of elements of the largest input that the task describes."""
    args = task.inputs.args if isinstance(task.inputs, Call) else ()
    return max((math.prod(one.shape) for one in args if isinstance(one, TensorSpec)), default=0)


def endless_tasks(
    families: Sequence[str], seed: int, *, rows: int = 0, split: Split = "train", held_out_families: Sequence[str] = ()
) -> Iterator[TrainingTask | None]:
    """Yield drawn tasks for ever, families in turn; None in the place of one that belongs to the other split."""
    number = seed * 1_000_003
    while True:
        for family in families:
            task = draw_task(family, number, rows=rows)
            yield task if split_of(task, held_out_families=held_out_families) == split else None
        number += 1
