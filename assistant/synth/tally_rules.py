"""Questions and counts over dimensions: ``any``, ``all``, ``count_nonzero``, and sums that pass over NaN.

They are maxima, minima and sums of numbers that are 0 or 1, which kernels reduce with everything else. Rules have the
form that :mod:`drk.assistant.synth.decompositions` describes.

Left out: counts of more than 2**24 elements a row, which float32 cannot hold, and ``any`` of bytes, which are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS, FUSIBLE_DTYPES
from drk.assistant.synth.reduction_rules import Rule, argument, reducible
from drk.gym.graph import Node, Ref, Symbol

MAX_COUNT = 2**24
"""Largest number up to which float32 counts every one."""


def _ones(node: Node, draft: Draft, truth: Ref) -> Ref:
    """1.0 where ``truth``, a boolean tensor, holds, 0.0 elsewhere."""
    return draft.emit(node, "one", "_to_copy.default", truth, dtype=Symbol("dtype", "float32"))


def _truth(node: Node, draft: Draft, x: Ref) -> Ref | None:
    dtype = draft.metas[x.name].dtype
    if dtype not in FUSIBLE_DTYPES - {"uint8"}:
        return None
    return x if dtype == "bool" else draft.emit(node, "some", "ne.Scalar", x, 0)


def _dims(node: Node, draft: Draft, x: Ref) -> tuple[int, ...] | None:
    return reducible(replace(draft.metas[x.name], dtype="float32"), argument(node, 1, "dim", None))


def _any(node: Node, draft: Draft) -> Ref | None:
    x = node.args[0]
    truth, dims = _truth(node, draft, x), _dims(node, draft, x)
    if truth is None or dims is None or node.meta.dtype != "bool":
        return None
    keep = argument(node, 2, "keepdim", False) is True
    op = "amax.default" if node.bare_op == "any" else "amin.default"
    found = draft.emit(node, "found", op, _ones(node, draft, truth), dims, keep)
    return draft.emit(node, node.bare_op, "ne.Scalar", found, 0)


def _count(node: Node, draft: Draft) -> Ref | None:
    x = node.args[0]
    truth, dims = _truth(node, draft, x), _dims(node, draft, x)
    if truth is None or dims is None or math.prod(draft.metas[x.name].shape[dim] for dim in dims) > MAX_COUNT:
        return None
    total = draft.emit(node, "counted", "sum.dim_IntList", _ones(node, draft, truth), dims, False)
    return draft.emit(node, "count", "_to_copy.default", total, dtype=Symbol("dtype", "int64"))


def counted(node: Node, draft: Draft) -> Ref | None:
    """``sum`` of a boolean tensor: how many of a row hold."""
    x = node.args[0]
    dims = _dims(node, draft, x)
    if draft.metas[x.name].dtype != "bool" or dims is None or node.meta.dtype != "int64":
        return None
    if math.prod(draft.metas[x.name].shape[dim] for dim in dims) > MAX_COUNT:
        return None
    keep = argument(node, 2, "keepdim", False) is True
    total = draft.emit(node, "counted", "sum.dim_IntList", _ones(node, draft, x), dims, keep)
    return draft.emit(node, "count", "_to_copy.default", total, dtype=Symbol("dtype", "int64"))


def _past_nan(node: Node, draft: Draft) -> Ref | None:
    """``nansum`` and ``nanmean``."""
    x = node.args[0]
    dims = reducible(draft.metas[x.name], argument(node, 1, "dim", None))
    if dims is None or node.kwargs.get("dtype") or draft.metas[x.name].dtype not in FLOATS:
        return None
    keep = argument(node, 2, "keepdim", False) is True
    missing = draft.emit(node, "missing", "ne.Tensor", x, x)
    kept = draft.emit(node, "kept", "masked_fill.Scalar", x, missing, 0.0)
    total = draft.emit(node, "total", "sum.dim_IntList", kept, dims, keep)
    if node.bare_op == "nansum":
        return total
    if draft.metas[x.name].dtype != "float32":
        return None
    present = _ones(node, draft, draft.emit(node, "present", "logical_not.default", missing))
    return draft.emit(
        node, "average", "div.Tensor", total, draft.emit(node, "count", "sum.dim_IntList", present, dims, keep)
    )


TALLY_RULES: Mapping[str, Rule] = {
    "any": _any,
    "all": _any,
    "count_nonzero": _count,
    "nansum": _past_nan,
    "nanmean": _past_nan,
}
"""Rules by operator."""
