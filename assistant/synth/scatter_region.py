"""Regions that end in a scatter: elementwise operators and gathers make values, integers say where each is added.

So messages along the edges of a graph, gathered from their senders and weighed, are added up at their receivers
without ever being written.

Left out: operators behind the scatter, whose sums are complete only when the kernel ends; reductions before it; indices
that the region itself makes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from drk.assistant.synth.domain import Operand, align
from drk.assistant.synth.frames import Frame
from drk.assistant.synth.gather_region import build_gather_region
from drk.assistant.synth.gathers import gather_of
from drk.assistant.synth.regions import MAX_OPERANDS, Facts, Region, Rules, build_region
from drk.assistant.synth.scatters import Scatter, scatter_of
from drk.gym.graph import Node


def build_scatter_region(nodes: list[Node], facts: Facts, rules: Rules) -> Region | None:
    """Return the region of ``nodes`` (in graph order) that end in one scatter, or None."""
    found = [item for node in nodes if (item := scatter_of(node, facts.metas)) is not None]
    if len(found) != 1:
        return None
    made = found[0]
    before = [node for node in nodes if node is not made.node]
    names = {node.name for node in before}
    if names & {made.base, made.index} or any(made.node.name in node.inputs() for node in before):
        return None
    values = _values(before, made, facts, rules)
    index = None if values is None else _index(made, facts)
    if values is None or index is None:
        return None
    known = next((item for item in values.inputs if item.value == made.index), index)
    if known != index or made.base in {item.value for item in values.inputs}:
        return None
    inputs = values.inputs if any(item is known for item in values.inputs) else (*values.inputs, index)
    if len(inputs) + 2 > MAX_OPERANDS or math.prod(values.shape) == 0:
        return None
    fresh = made.base in facts.made.filled and facts.users[made.base] == (made.node.name,)
    result = _result(made)
    scatter = replace(made, fresh=fresh, result=result)
    return replace(values, kind="scatter", nodes=tuple(nodes), inputs=inputs, outputs=(result,), scatter=scatter)


def _values(before: list[Node], made: Scatter, facts: Facts, rules: Rules) -> Region | None:
    """What is added, as a region whose one result is the scatter's source, walked as its dimensions come."""
    meta = facts.metas[made.source]
    rank = len(meta.shape)
    if not before:
        operand = Frame(meta.shape, tuple(range(rank)), 0).place(made.source, meta, fixed=made.source in facts.fixed)
        return None if operand is None else Region("pointwise", (), meta.shape, 0, (operand,), ())
    if any(gather_of(node, facts.metas) is not None for node in before):
        found = build_gather_region(before, facts)
    else:
        found = build_region(before, facts, rules)
    if found is None or found.kind != "pointwise" or [item.value for item in found.outputs] != [made.source]:
        return None
    plain = found.outputs[0].axes == tuple(range(-rank, 0)) and found.shape == meta.shape
    return found if plain and facts.users[made.source] == (made.node.name,) else None


def _index(made: Scatter, facts: Facts) -> Operand | None:
    """The index, aligned to the source's dimensions."""
    meta, shape = facts.metas[made.index], facts.metas[made.source].shape
    behind = len(shape) - 1 - made.dim if made.walks else 0
    return align(made.index, meta, shape, dropped=behind, fixed=made.index in facts.fixed)


def _result(made: Scatter) -> Operand:
    """Where a result lies, apart from its place along the dimension that the index tells."""
    meta, rank = made.node.meta, len(made.node.meta.shape)
    varies = tuple(dim != made.dim for dim in range(rank))
    axes = tuple(dim - rank if dim != made.dim else None for dim in range(rank))
    return Operand(made.node.name, meta, varies, axes, strided=True, order=tuple(range(-rank, 0)))
