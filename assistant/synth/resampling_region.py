"""Regions around interpolation or adaptive pooling: light pointwise operators, the operator, pointwise operators.

Operators before it are computed again for each place that reads their element, so only light ones join: a convolution's
bias, a norm's scale and shift, an activation. Left out: two resampling operators in one kernel, reductions beside one,
and operators before cubic interpolation, which reads sixteen places.
"""

from __future__ import annotations

from drk.assistant.synth.domain import Operand
from drk.assistant.synth.expression import is_pointwise, scalar_flops
from drk.assistant.synth.frames import Frame, is_channels_last
from drk.assistant.synth.regions import (
    MAX_OPERANDS,
    Facts,
    Region,
    leading_names,
    region_inputs,
    region_outputs,
)
from drk.assistant.synth.resamples import Resample, resample_of
from drk.gym.graph import Node

MAX_REPEATED = 12
"""Most arithmetic instructions for an element that are repeated for each place that reads it."""


def build_resampling_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of ``nodes`` (in graph order) around one resampling operator, or None."""
    found = [item for node in nodes if (item := resample_of(node, facts.metas)) is not None]
    if len(found) != 1:
        return None
    made = found[0]
    before = leading_names([node for node in nodes if node is not made.node], made.source)
    first = [node for node in nodes if node.name in before]
    after = [node for node in nodes if node.name not in before and node is not made.node]
    shape, rank = made.node.meta.shape, len(made.node.meta.shape)
    if not all(is_pointwise(node, facts.metas) and node.meta.shape == shape for node in after):
        return None
    if any({made.source, *before} & set(node.inputs()) for node in after):
        return None
    inside = {node.name for node in nodes}
    order = (0, *range(2, rank), 1) if is_channels_last(made.node.meta) else tuple(range(rank))
    frame = Frame(shape, order, 1)
    early = _early(first, made, inside, facts)
    late = region_inputs(after, inside, frame, frozenset(), facts, [])
    outputs = region_outputs([made.node, *after], inside, frame, frozenset(), facts)
    if early is None or late is None or outputs is None or {x.value for x in early} & {x.value for x in late}:
        return None
    if len(early) + len(late) + len(outputs) > MAX_OPERANDS:
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    return Region(
        "resample", tuple(nodes), frame.shape, 1, late, outputs, scalars=scalars, pooled=early, order=order,
        resample=made,
    )  # fmt: skip


def _early(first: list[Node], made: Resample, inside: set[str], facts: Facts) -> tuple[Operand, ...] | None:
    """What is read to make an element of the source, aligned to it; None where that takes too much."""
    source = facts.metas[made.source]
    whole = Frame(source.shape, tuple(range(len(source.shape))), 0)
    if not first:
        operand = whole.place(made.source, source, fixed=made.source in facts.fixed)
        return None if operand is None else (operand,)
    names = {node.name for node in first}
    if made.kind == "cubic" or not all(is_pointwise(node, facts.metas) for node in first):
        return None
    if any(set(facts.users[node.name]) - {*names, made.node.name} for node in first):
        return None  # something else reads what is resampled
    for node in first:
        sizes = zip(reversed(node.meta.shape), reversed(source.shape), strict=False)
        if len(node.meta.shape) > len(source.shape) or not all(size in (1, other) for size, other in sizes):
            return None
    if scalar_flops([node for node in first if node.meta.shape == source.shape]) > MAX_REPEATED:
        return None
    found = region_inputs(first, inside, whole, frozenset(), facts, [])
    return found if found is not None and any(all(item.varies) for item in found) else None
