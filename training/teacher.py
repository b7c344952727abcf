"""The teacher: right answers to generated tasks by the builtin compiler, with launch choices that state no opinion.

A structure is captured once in canonical dress, in this process (the modules are our own); its graph is then put into
any dress by text, and compiled. Each answer draws block sizes, warps, tiles and precision evenly, and leaves part of
the work to torch in about 45 % of cases (*lazy* answers: right, but slower), so that what to choose is left for
reinforcement to learn. Nothing is judged here: the gym judges samples, and tests hold a share of them right.

Measured: a capture takes some 80 ms and an answer some 20 ms of one core.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.module_writer import UnsupportedGraph
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.propose import compile_graph
from drk.assistant.synth.regions import Rules
from drk.assistant.synth.variants import Variant
from drk.gym.errors import BundleError
from drk.gym.graph import Graph, graph_from_json
from drk.gym.graph_cost import VIEWS
from drk.gym.schema import Call, Scalar, TensorSpec
from drk.training.answer_style import Reference, StyleError, nano_answer
from drk.training.dressing import Dress, redress
from drk.training.errors import TrainingError
from drk.training.tasks import TrainingTask, draw_canonical, draw_dressed

LAZY_SHARE = 0.6
"""Of the answers asked for; fewer come out lazy, since the smallest modules have nothing to leave out."""
BLOCK_ELEMENTS = (256, 512, 1024, 2048, 4096)
ELEMENTS_PER_WARP = (64, 128, 256, 512)
PRECISIONS = ("tf32x3", "ieee")
_FAULTS = (UnsupportedGraph, StyleError, BundleError, SyntaxError, KeyError, IndexError, ValueError, AttributeError)


class NotTeachable(TrainingError):
    """The teacher has no answer for a task; the message says why."""


@dataclass(frozen=True)
class Structure:
    """A captured composition: where it comes from, its graph in canonical dress, and that dress."""

    family: str
    seed: int
    rows: int
    graph_text: str
    dress: Dress


@dataclass(frozen=True)
class Answer:
    """One right answer. ``lazy``: part of the work is torch's on purpose; ``left`` counts operators left to it."""

    source: str
    lazy: bool
    left: int


def capture_task(task: TrainingTask) -> str:
    """Return the graph of one of our own modules as JSON text, captured in this process on no device.

    Raises:
        NotTeachable: it cannot be captured.
    """
    import torch

    from drk.gym.runner.capture import CaptureError, capture

    names: dict[str, Any] = {}
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        exec(compile(task.task.files[task.task.entry], task.task.name, "exec"), names)  # our own generator's text
        init = task.task.init.args if isinstance(task.task.init, Call) else ()
        module = names[task.task.target](*(one.value for one in init if isinstance(one, Scalar))).eval()
        calls = task.task.inputs.args if isinstance(task.task.inputs, Call) else ()
        args = [torch.empty(one.shape, dtype=getattr(torch, one.dtype)) for one in calls if isinstance(one, TensorSpec)]
        try:
            return json.dumps(capture(module, args))
        except (CaptureError, RuntimeError) as error:
            raise NotTeachable(f"{task.task.name}: {str(error)[:200]}") from error


def capture_structure(family: str, seed: int, *, rows: int = 0) -> Structure:
    """Capture a composition in canonical dress.

    Raises:
        NotTeachable: it cannot be captured.
    """
    task, dress = draw_canonical(family, seed, rows=rows)
    text = capture_task(task)
    try:
        redress(text, dress, dress)
    except ValueError:
        # a constant is computed with before it reaches the graph: it stays the same in all dresses
        natural = Dress(random.Random(f"constants:{family}:{seed}"))
        draw_dressed(family, seed, natural, rows=rows, number=-1)
        task, dress = draw_canonical(family, seed, rows=rows, fixed=natural.constants)
        text = capture_task(task)
    return Structure(family, seed, rows, text, dress)


def dressed(structure: Structure, number: int) -> tuple[TrainingTask, Graph]:
    """Return the structure's task in dress ``number`` with its graph.

    Raises:
        NotTeachable: the graph is not what the compiler reads.
    """
    seed = f"dress:{structure.family}:{structure.seed}:{number}"
    dress = Dress(random.Random(seed), structure.dress.fixed)
    task = draw_dressed(structure.family, structure.seed, dress, rows=structure.rows, number=number)
    try:
        return task, graph_from_json(json.loads(redress(structure.graph_text, structure.dress, dress)))
    except BundleError as error:
        raise NotTeachable(f"{task.task.name}: {error}") from error


def teach(task: TrainingTask, graph: Graph, rng: random.Random, *, lazy: bool | None = None) -> Answer:
    """Return one right answer with drawn choices; ``lazy`` null draws that too.

    Raises:
        NotTeachable: the compiler has nothing for this graph.
    """
    lazy = rng.random() < LAZY_SHARE if lazy is None else lazy
    workers = [node.name for node in graph.nodes if node.bare_op not in VIEWS]
    lazy = lazy and len(workers) > 2
    for _ in range(4):
        excluded = left_to_torch(workers, rng) if lazy else frozenset()
        try:
            source = _compile(task, graph, rng, excluded)
        except _FAULTS as error:
            reason = f"{type(error).__name__}: {error}"
            if not lazy:
                break
            continue
        return Answer(source, lazy, len(excluded))
    raise NotTeachable(f"{task.task.name}: {reason}")


def left_to_torch(workers: Sequence[str], rng: random.Random) -> frozenset[str]:
    """Return the nodes that a lazy answer leaves out: the first ones, the last ones, or any; two are kept at least."""
    count = rng.randint(1, len(workers) - 2)
    kind = rng.random()
    if kind < 0.45:
        return frozenset(workers[:count])
    return frozenset(workers[-count:]) if kind < 0.8 else frozenset(rng.sample(list(workers), count))


def drawn_variant(rng: random.Random, excluded: frozenset[str]) -> Variant:
    """Return a variant whose launch choices are drawn evenly."""
    elements = rng.choice(BLOCK_ELEMENTS)
    per_warp = min(rng.choice(ELEMENTS_PER_WARP), elements)
    per_warp = max(per_warp, elements // 16)
    rules = replace(Rules(), excluded=excluded, shared_left=rng.random() < 0.5)
    return Variant(rules, "drawn", rng.randrange(6), Block(elements, per_warp))


def _compile(task: TrainingTask, graph: Graph, rng: random.Random, excluded: frozenset[str]) -> str:
    source = compile_graph(graph, drawn_variant(rng, excluded)).source
    source = source.replace('PRECISION="tf32x3"', f'PRECISION="{rng.choice(PRECISIONS)}"')
    return nano_answer(source, Reference(task.task.files[task.task.entry], task.task.target))
