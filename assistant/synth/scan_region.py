"""Regions around a running sum, product or extreme: pointwise operators before and after it, and reversal.

``flip(cumsum(flip(x)))`` over one dimension is a scan from the end; both flips belong to the region then.

Left out: exclusive scans (they come as concatenations), running extremes with their indices, and few long rows, which
one program each would not keep the device busy with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drk.assistant.synth.expression import FLOATS, INTEGERS, is_pointwise
from drk.assistant.synth.frames import Frame
from drk.assistant.synth.regions import MAX_OPERANDS, Facts, Region, Scan, region_inputs, region_outputs
from drk.gym.graph import Node, Ref, TensorMeta

SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})
FEWEST_ROWS = 128
LONG_COLUMNS = 4096


def is_scan(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` is a running sum, product or extreme that kernels can compute."""
    if not node.op.startswith("aten.") or node.bare_op not in SCANS or len(node.metas) != 1 or node.kwargs:
        return False
    source = metas.get(node.args[0].name) if isinstance(node.args[0], Ref) else None
    if source is None or not source.shape or node.metas[0] is None:
        return False
    counted = node.bare_op == "cumsum" and node.meta.dtype == "int64" and source.dtype in {*INTEGERS, "bool"}
    if not counted and (source.dtype not in FLOATS or source.dtype != node.meta.dtype):
        return False
    columns = source.shape[int(node.args[1])]
    rows = source.numel // max(1, columns)
    return columns >= 2 and (rows >= FEWEST_ROWS or columns <= LONG_COLUMNS)


def is_flip(node: Node) -> bool:
    """Whether ``node`` reverses a single dimension."""
    return node.op == "aten.flip.default" and len(node.args[1]) == 1 and node.meta.dtype in FLOATS


def build_scan_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of ``nodes`` (in graph order) around one scan, or None."""
    scans = [node for node in nodes if is_scan(node, facts.metas)]
    if len(scans) != 1:
        return None
    scan, shape = scans[0], scans[0].meta.shape
    dim = int(scan.args[1]) % len(shape)
    inside = {node.name for node in nodes}
    flips = [node for node in nodes if is_flip(node)]
    if flips and not _reverses(scan, flips, dim, facts):
        return None
    others = [node for node in nodes if node is not scan and node not in flips]
    if not all(is_pointwise(node, facts.metas) for node in others):
        return None
    if any(node.meta.shape != shape for node in nodes):
        return None
    frame = Frame(shape, (*(axis for axis in range(len(shape)) if axis != dim), dim), 1)
    reading = [node for node in nodes if node is not scan]
    inputs = region_inputs(others, inside, frame, frozenset(), facts, [])
    first = flips[0] if flips else scan
    source = first.args[0].name
    outputs = region_outputs(nodes, inside, frame, frozenset(), facts)
    if inputs is None or outputs is None or any(node in flips[:1] for node in reading if _leaves(node, facts, inside)):
        return None
    if source not in inside and source not in {item.value for item in inputs}:
        operand = frame.place(source, facts.metas[source], fixed=source in facts.fixed)
        inputs = None if operand is None else (*inputs, operand)
    if inputs is None or len(inputs) + len(outputs) > MAX_OPERANDS or math.prod(shape) == 0:
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    made = Scan(scan.name, source, tuple(node.name for node in flips))
    return Region("scan", tuple(nodes), frame.shape, 1, inputs, outputs, scalars=scalars, scan=made)


def _reverses(scan: Node, flips: list[Node], dim: int, facts: Facts) -> bool:
    """Whether the two flips stand right before and right after the scan, over its dimension."""
    rank = len(scan.meta.shape)
    if len(flips) != 2 or any(node.args[1][0] % rank != dim for node in flips):
        return False
    before, after = flips
    chained = scan.args[0] == Ref(before.name) and after.args[0] == Ref(scan.name)
    return chained and facts.users[before.name] == (scan.name,) and facts.users[scan.name] == (after.name,)


def _leaves(node: Node, facts: Facts, inside: set[str]) -> bool:
    return any(user not in inside for user in facts.users[node.name])
