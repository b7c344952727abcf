"""Regions around a pooling operator or depthwise convolution: pointwise operators, the window, pointwise operators.

Operators before the window are computed again for each window that covers their element. That is free where windows
do not overlap, and cheaper than a round trip through memory for light operators where they do.

Left out: two pools in one kernel, and reductions beside one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drk.assistant.synth.expression import is_pointwise, scalar_flops
from drk.assistant.synth.frames import Frame, is_channels_last
from drk.assistant.synth.regions import MAX_OPERANDS, Facts, Region, region_inputs, region_outputs
from drk.assistant.synth.windows import Window, window_of
from drk.gym.graph import Node

MAX_REPEATED = 12
"""Most arithmetic instructions for an element that are repeated for each window over it, in a usual window: 3 x 3."""
USUAL_REPEATS = 4.5
"""How often a 3 x 3 convolution repeats them, with 4 results a lane."""

_MORE: Mapping[str, int] = {"hardswish": 4, "hardsigmoid": 3, "hardtanh": 1, "relu6": 1, "clamp": 1}
"""Instructions of operators beyond the one that :func:`scalar_flops` counts."""


def build_pooling_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of ``nodes`` (in graph order) around one window, or None."""
    windows = [item for node in nodes if (item := window_of(node, facts.metas)) is not None]
    others = [node for node in nodes if node is not windows[0].node]
    if {windows[0].weight, windows[0].bias} & {node.name for node in nodes}:
        return None
    if len(windows) != 1 or not all(is_pointwise(node, facts.metas) for node in others):
        return None
    window = windows[0]
    inside = {node.name for node in nodes}
    before = _ancestors(window, nodes)
    first = [node for node in others if node.name in before]
    after = [node for node in others if node.name not in before]
    source = facts.metas[window.source].shape
    if any(set(facts.users[node.name]) - {*before, window.node.name} for node in first):
        return None  # something else reads what is pooled
    if not _light(first, source, window):
        return None
    shape = window.node.meta.shape
    if any(set(node.inputs()) & before for node in after) or not all(_stands_behind(node, window) for node in after):
        return None
    order = (0, *range(2, len(shape)), 1) if is_channels_last(window.node.meta) else tuple(range(len(shape)))
    frame, whole = Frame(shape, order, 0), Frame(source, tuple(range(len(source))), 0)
    late = region_inputs(after, inside, frame, frozenset(), facts, [])
    early = region_inputs(first, inside, whole, frozenset(), facts, [])
    outputs = region_outputs([window.node, *after], inside, frame, frozenset(), facts)
    if late is None or early is None or outputs is None:
        return None
    if not first:
        operand = whole.place(window.source, facts.metas[window.source], fixed=window.source in facts.fixed)
        early = () if operand is None else (operand,)
    if not any(all(operand.varies) for operand in early) or len(early) + len(late) + len(outputs) > MAX_OPERANDS:
        return None
    if {item.value for item in early} & {item.value for item in late}:
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    kind = "pool" if window.weight is None else "depthwise"
    return Region(
        kind, tuple(nodes), frame.shape, 0, late, outputs, scalars=scalars, window=window, pooled=early, order=order
    )


def _stands_behind(node: Node, window: Window) -> bool:
    """Whether a node has the result's shape, or behind a convolution one that broadcasts to it (a norm's scale)."""
    own, shape = node.meta.shape, window.node.meta.shape
    if window.weight is None or len(own) > len(shape):
        return own == shape
    return all(size in (1, other) for size, other in zip(reversed(own), reversed(shape), strict=False))


def _ancestors(window: Window, nodes: list[Node]) -> set[str]:
    """Names of the region's nodes that lead to the window."""
    found: set[str] = set()
    wanted = {window.source}
    for node in reversed(nodes):
        if node.name in wanted:
            found.add(node.name)
            wanted |= set(node.inputs())
    return found


def _light(nodes: list[Node], source: tuple[int, ...], window: Window) -> bool:
    """Whether ``nodes`` have the shape of what is pooled, or one that broadcasts, and are cheap if repeated."""
    for node in nodes:
        sizes = zip(reversed(node.meta.shape), reversed(source), strict=False)
        if len(node.meta.shape) > len(source) or not all(size in (1, other) for size, other in sizes):
            return False
    whole = [node for node in nodes if node.meta.shape == source]
    flops = scalar_flops(whole) + sum(_MORE.get(node.bare_op, 0) for node in whole)
    return not _repeats(window) or flops <= _most_repeated(window)


def _most_repeated(window: Window) -> float:
    """Instructions whose repetition costs no more than writing an element and reading it again would."""
    if window.weight is None:
        return MAX_REPEATED
    repeats = float(math.prod(window.sizes))
    if window.rank > 1:
        repeats *= (window.sizes[-2] + 3) / (4 * window.sizes[-2])
    return MAX_REPEATED * USUAL_REPEATS / max(repeats, USUAL_REPEATS)


def _repeats(window: Window) -> bool:
    return any(size > stride for size, stride in zip(window.sizes, window.strides, strict=True))
