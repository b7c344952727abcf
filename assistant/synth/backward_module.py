"""The builtin proposer for code that trains: kernels for the forward and the backward pass.

A graph is cut into segments (:mod:`drk.assistant.synth.backward_segments`), each is differentiated
(:mod:`drk.assistant.synth.backward_graph`), both passes are planned and written like any graph, and the module calls
one ``torch.autograd.Function`` for each segment. What is left over stays calls of torch under torch's own autograd.

Left out: channels-last variants, fused attention and pooling (their backward kernels), and shapes beyond the captured
one where a number could be a size or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.backward_function import Passes, write_function
from drk.assistant.synth.backward_graph import Reverse, Segment, differentiate
from drk.assistant.synth.backward_plan import kernels_for, plan_backward, with_own_sums
from drk.assistant.synth.backward_segments import segments, with_kept_detaches
from drk.assistant.synth.body import KernelText
from drk.assistant.synth.module_writer import Step, UnsupportedGraph, write_module
from drk.assistant.synth.naming import NameTable, kernel_words, value_names
from drk.assistant.synth.planner import plan
from drk.assistant.synth.pointwise import BLOCKS
from drk.assistant.synth.propose import Compiled, write_steps, wrong_elsewhere
from drk.assistant.synth.regions import Region, Rules, product_of
from drk.assistant.synth.rewrites import rewrite
from drk.assistant.synth.variants import Variant
from drk.gym.graph import Graph, Pack, Placeholder, Ref
from drk.gym.schema import Candidate

LONGEST_NAME = 32
_MAXIMA = frozenset({"amax", "max", "amin", "min"})


@dataclass(frozen=True)
class _Writing:
    """What all segments of one module share."""

    graph: Graph
    names: Mapping[str, str]
    table: NameTable
    variant: Variant
    exact_maxima: bool
    multiprocessors: int


def compile_training(graph: Graph, variant: Variant, *, multiprocessors: int = 132) -> Compiled:
    """Return the module that ``variant`` makes of ``graph``, with kernels for gradients.

    Raises:
        UnsupportedGraph: nothing can be fused, or the graph cannot be written as a module; the message says why.
    """
    exact_maxima = any(node.bare_op in _MAXIMA for node in graph.nodes)
    rewritten = rewrite(with_kept_detaches(graph))
    names = value_names(rewritten)
    table = NameTable([*names.values(), *(f"d_{name}" for name in names.values())])
    writing = _Writing(rewritten, names, table, variant, exact_maxima, multiprocessors)
    steps: list[Step] = []
    regions: list[Region] = []
    for item in segments(rewritten):
        written = _function(item, writing) if isinstance(item, Segment) else None
        if written is None:
            steps += [Step((node,)) for node in (item.nodes if isinstance(item, Segment) else (item,))]
            continue
        kernel, own = written
        assert isinstance(item, Segment)
        steps.append(Step(item.nodes, kernel))
        regions += own
    kernels = tuple(step.kernel for step in steps if step.kernel is not None)
    if not kernels:
        raise UnsupportedGraph(_why_not(rewritten))
    source = write_module(rewritten, steps, names, _summary(kernels, variant), exact_shapes=variant.exact_shapes)
    return Compiled(source, kernels, tuple(regions), variant.note)


def _why_not(graph: Graph) -> str:
    left = dict.fromkeys(node.bare_op for item in segments(graph) if not isinstance(item, Segment) for node in (item,))
    told = f" (left to torch: {', '.join(list(left)[:6])})" if left else ""
    return f"no operators whose forward and backward pass kernels could take together{told}"


def _summary(kernels: Sequence[KernelText], variant: Variant) -> str:
    lines = [f"{variant.note}.", "", "Forward and backward kernels, so that intermediate results stay in registers:"]
    lines += [f"- ``{kernel.name}``: {kernel.formula}"[:600] for kernel in kernels]
    return "\n".join(lines) + "\n"


def _function(segment: Segment, writing: _Writing) -> tuple[KernelText, list[Region]] | None:
    """The segment's autograd function and its regions, or None where torch does as well."""
    if not segment.needing & {*segment.inputs}:
        return None
    metas = writing.graph.metas()
    reverse = differentiate(segment, metas, writing.names, exact_maxima=writing.exact_maxima)
    reverse = replace(reverse, graph=with_own_sums(reverse.graph))
    forward = _forward_graph(segment, reverse, writing.graph)
    rules = writing.variant.rules
    planned = [kernels_for(plan(forward, rules)), kernels_for(plan_backward(reverse.graph, rules))]
    if not any(planned):
        return None
    name = _segment_name(planned[0] or planned[1])
    back_names = _backward_names(reverse, writing.names)
    variant, table, count = writing.variant, writing.table, writing.multiprocessors
    ahead = write_steps(forward, planned[0], writing.names, table, variant, multiprocessors=count)
    back = write_steps(
        reverse.graph,
        planned[1],
        back_names,
        table,
        variant,
        multiprocessors=count,
        words=lambda _region: f"{name}_backward",
    )
    own = table.claim(name if name not in {s.kernel.name for s in ahead if s.kernel is not None} else f"{name}_train")
    class_name = table.claim("".join(word.capitalize() for word in name.split("_")))
    passes = Passes(segment, reverse, forward, ahead, writing.names, back, back_names)
    return write_function(passes, own, class_name), [*planned[0], *planned[1]]


def _forward_graph(segment: Segment, reverse: Reverse, graph: Graph) -> Graph:
    """The segment as a graph of its own; what the backward pass saves leaves it too."""
    metas, inside = graph.metas(), {node.name for node in segment.nodes}
    values = {item.name: item for item in graph.placeholders}
    placeholders = tuple(
        replace(values[name], kind=values[name].kind if name in segment.fixed else "input")
        if name in values
        else Placeholder(name, "parameter" if name in segment.fixed else "input", name, metas[name])
        for name in segment.inputs
    )
    leaving = dict.fromkeys([*segment.outputs, *(name for name in reverse.saved if name in inside)])
    output = Pack("tuple", tuple(Ref(name) for name in leaving))
    return Graph(graph.method, graph.training, (), (), placeholders, segment.nodes, output)


def _segment_name(regions: Sequence[Region]) -> str:
    words = list(dict.fromkeys(kernel_words(region) for region in regions))
    name = "_to_".join(words[:2])
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME].rpartition("_")[0]


def _backward_names(reverse: Reverse, names: Mapping[str, str]) -> dict[str, str]:
    """Forward values keep their names; gradients get theirs."""
    table = NameTable(names.values())
    return {value: names[value] if value in names else table.claim(value) for value in reverse.graph.names()}


# --- Variants ------------------------------------------------------------------------------------------------


def training_variants(graph: Graph) -> list[Variant]:
    """All variants of a graph that trains, most promising first; several may come to the same code."""
    metas = graph.metas()
    products = [node for node in graph.nodes if product_of(node, metas) is not None]
    library = Rules(matmul=False, attention=False, pool=False, depthwise=False)
    plain = "Products by the library, everything between them fused, forward and backward"
    note = plain if products else "Neighbouring operators fused, forward and backward"
    found = [
        Variant(library, note),
        Variant(library, f"{note}, larger blocks", 0, BLOCKS[1]),
        Variant(library, f"{note}, more warps", 0, BLOCKS[3]),
    ]
    if not products:
        return found
    full, text = replace(library, matmul=True), "Every product with its epilogue in one kernel, forward and backward"
    own = [Variant(full, text), Variant(full, f"{text}, second tile", 1, BLOCKS[1])]
    half = all(node.meta.dtype != "float32" for node in products)
    return [found[0], *own, *found[1:]] if half else [own[0], found[0], own[1], *found[1:]]


class TrainingProposer:
    """The fusion compiler for tasks whose gradients are judged."""

    name = "builtin"

    def propose(
        self, graph: Graph, *, hardware: Any = None, history: Sequence[Any] = (), limit: int = 8
    ) -> tuple[list[Candidate], str]:
        """Return up to ``limit`` candidates, most promising first, and why there is none.

        Those in ``history`` (turns with ``candidate`` and ``verdict``) are left out.
        """
        multiprocessors = int(getattr(hardware, "sm_count", 132))
        tried = {turn.candidate.source.split('"""', 2)[-1] for turn in history}
        found: list[Candidate] = []
        reason = ""
        variants = training_variants(graph)
        if wrong_elsewhere(history):
            variants = [*(replace(item, exact_shapes=True) for item in variants), *variants]
        for variant in variants:
            try:
                compiled = compile_training(graph, variant, multiprocessors=multiprocessors)
            except UnsupportedGraph as error:
                reason = reason or str(error)
                continue
            code = compiled.source.split('"""', 2)[-1]
            if code not in tried:
                tried.add(code)
                found.append(Candidate(compiled.source, proposer=self.name, note=compiled.note))
        return found[:limit], reason
