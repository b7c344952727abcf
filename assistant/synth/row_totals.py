"""Totals of what is made from reductions of rows: by rows first, then over the rows' totals.

A kernel that reduces rows can add up what it makes of each of them, but not of all: that takes a second kernel. Where a
loss or a plain ``sum`` or ``mean`` goes over everything (a divergence of two softmaxes, say), the first kernel would
write values of full size and the second read them. With the rows' totals between them neither happens.

Left out: totals of half precision, whose partial ones would be rounded, and of values that two different kinds of rows
lead to.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.reduction_rules import Rule, reducible
from drk.assistant.synth.regions import reduced_dims
from drk.assistant.synth.size_constants import LEAST_SCALAR
from drk.assistant.synth.stack_rules import STACK_RULES, reduced_stack
from drk.assistant.synth.tally_rules import counted
from drk.gym.graph import Node, Ref


def total(node: Node, draft: Draft, value: Ref, op: str) -> Ref | None:
    """Emit ``op`` (a sum or mean with dimensions) over all of ``value``, None where kernels cannot."""
    dims = reducible(draft.metas[value.name], None)
    rows = _row_dims(draft, value)
    if rows is not None:
        value = draft.emit(node, "row_total", op, value, rows, True)
    return None if dims is None else draft.emit(node, "loss", op, value, dims, False)


def _row_dims(draft: Draft, value: Ref) -> tuple[int, ...] | None:
    """The dimensions (negative) over which rows of ``value``'s shape were reduced on the way to it, if some were."""
    shape, rank = draft.metas[value.name].shape, len(draft.metas[value.name].shape)
    if draft.metas[value.name].dtype != "float32":
        return None
    by_name = {node.name: node for node in draft.nodes}
    found: set[tuple[int, ...]] = set()
    seen: set[str] = set()
    pending = [value.name]
    while pending:
        node = by_name.get(pending.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        reduced = reduced_dims(node, draft.metas)
        if reduced is not None and reduced[1] and draft.metas[node.args[0].name].shape == shape:
            found.add(tuple(dim - rank for dim in reduced[0]))
        elif reduced is None and is_pointwise(node, draft.metas):
            pending += node.inputs()
    dims = found.pop() if len(found) == 1 else None
    return dims if dims is not None and len(dims) < rank else None


def _over_all(node: Node, draft: Draft) -> Ref | None:
    """``sum`` and ``mean`` of everything, where that is made from reductions of rows; sums of booleans are counts."""
    if node.bare_op == "sum" and draft.metas[node.args[0].name].dtype == "bool":
        return counted(node, draft)
    stacked = reduced_stack(node, draft)
    if stacked is not None:
        return stacked
    reduced = reduced_dims(node, draft.metas)
    if reduced is None or reduced != (tuple(range(len(draft.metas[node.args[0].name].shape))), False):
        return None
    op = "sum.dim_IntList" if node.bare_op == "sum" else "mean.dim"
    return None if _row_dims(draft, node.args[0]) is None else total(node, draft, node.args[0], op)


def _averaged(node: Node, draft: Draft) -> Ref | None:
    """A total divided by how many were added (a divergence's mean over the batch) is their mean, at any size."""
    if len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Ref) or type(node.args[1]) is not int:
        return None
    made = next((item for item in draft.nodes if item.name == node.args[0].name), None)
    reduced = None if made is None or made.bare_op != "sum" else reduced_dims(made, draft.metas)
    if made is None or reduced is None or reduced[1] or made.kwargs or node.args[1] < LEAST_SCALAR:
        return None
    value, count = made.args[0], node.args[1]
    meta = draft.metas[value.name]
    everything = reduced[0] == tuple(range(len(meta.shape)))
    if not everything or count not in (meta.numel, meta.shape[0]) or {meta.dtype, node.meta.dtype} != {"float32"}:
        return None
    if count != meta.numel:
        value = draft.emit(node, "row_total", "sum.dim_IntList", value, tuple(range(1 - len(meta.shape), 0)), True)
    return draft.emit(node, "average", "mean.dim", value, reducible(draft.metas[value.name], None), False)


TOTAL_RULES: Mapping[str, Rule] = {**STACK_RULES, "sum": _over_all, "mean": _over_all, "div": _averaged}
"""Rules by operator."""
