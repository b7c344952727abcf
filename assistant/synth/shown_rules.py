"""Operators that are arithmetic on a few views of a tensor: cross products, integrals, traces, elements of sorted rows.

Rules have the form that :mod:`drk.assistant.synth.decompositions` describes; views cost nothing, and kernels read
through them.

Left out: points that lie apart unevenly; medians and quantiles, whose places depend on how long a row is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.orders import fits
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref, TensorMeta

END = 2**63 - 1
"""How a graph writes that a slice goes to the end."""


def _take(node: Node, draft: Draft) -> Ref | None:
    """``x.take(i)`` picks from ``x`` as if it were flat."""
    x, index = node.args[:2]
    meta = draft.metas[x.name]
    if not meta.contiguous or not meta.shape or not draft.metas[index.name].shape:
        return None
    flat = x if len(meta.shape) == 1 else draft.emit(node, "flat", "reshape.default", x, (meta.numel,))
    picked = replace(node, op="aten.index.Tensor", args=(flat, (index,)), metas=(node.meta,))
    return draft.append(picked, "taken")


def _cross(node: Node, draft: Draft) -> Ref | None:
    """Products of coordinates turned one way and the other, ``a[1] b[2] - a[2] b[1]`` and so on."""
    left, right = node.args[:2]
    metas = [draft.metas[item.name] for item in (left, right)]
    dim = argument(node, 2, "dim", -1 if node.bare_op == "linalg_cross" else None)
    if type(dim) is not int or metas[0].shape != metas[1].shape or metas[0].shape != node.meta.shape:
        return None
    if {meta.dtype for meta in metas} != {"float32"} or metas[0].shape[dim] != 3:
        return None

    def turned(x: Ref, shift: int) -> Ref:
        meta = contiguous_meta(draft.metas[x.name].shape, "float32")
        roll = replace(node, op="aten.roll.default", args=(x, (shift,), (dim,)), kwargs={}, metas=(meta,))
        return draft.append(roll, "turned")

    first = draft.emit(node, "product", "mul.Tensor", turned(left, -1), turned(right, 1))
    second = draft.emit(node, "product", "mul.Tensor", turned(left, 1), turned(right, -1))
    return draft.emit(node, "cross", "sub.Tensor", first, second)


def _trapezoid(node: Node, draft: Draft) -> Ref | None:
    """The sum of neighbours' sums, times half of the points' distance."""
    if node.op.split(".")[-1] != "dx":
        return None
    y, dim = node.args[0], argument(node, 2, "dim", -1)
    meta = draft.metas[y.name]
    step = float(node.kwargs.get("dx", node.args[1] if len(node.args) > 1 else 1.0))
    axis = dim % max(1, len(meta.shape))
    if meta.dtype != "float32" or not meta.shape or meta.shape[axis] < 3:
        return None
    shown = replace(meta, shape=(*meta.shape[:axis], meta.shape[axis] - 1, *meta.shape[axis + 1 :]))
    sides = [
        draft.append(replace(node, op="aten.slice.Tensor", args=(y, axis, *ends), kwargs={}, metas=(shown,)), name)
        for name, ends in (("later", (1, END)), ("earlier", (0, -1)))
    ]
    pair = draft.emit(node, "pair", "add.Tensor", *sides)
    total = draft.emit(node, "area", "sum.dim_IntList", pair, (axis - len(meta.shape),), False)
    return draft.emit(node, "integral", "mul.Tensor", total, step * 0.5)


def _trace(node: Node, draft: Draft) -> Ref | None:
    meta = draft.metas[node.args[0].name]
    count = min(meta.shape)
    if meta.dtype != "float32" or count < 2:
        return None
    shown = TensorMeta((count,), meta.dtype, (sum(meta.strides),))
    made = replace(node, op="aten.diagonal.default", args=(node.args[0],), kwargs={}, metas=(shown,))
    return draft.emit(node, "trace", "sum.dim_IntList", draft.append(made, "diagonal"), (-1,), False)


def _kth(node: Node, draft: Draft) -> Ref | None:
    """``kthvalue``: one element of each sorted row, and its place."""
    x, place = node.args[:2]
    dim, keep = argument(node, 2, "dim", -1), argument(node, 3, "keepdim", False) is True
    meta = draft.metas[x.name]
    rank = len(meta.shape)
    if type(place) is not int or not rank or dim % rank != rank - 1 or not fits(meta, dim, None):
        return None
    for number, (result, dtype) in enumerate((("values", meta.dtype), ("indices", "int64"))):
        own = contiguous_meta(meta.shape, dtype)
        made = replace(node, op=f"aten.sort.{result}", args=(x, None, False), kwargs={}, metas=(own,))
        rows = draft.append(made, f"sorted_{result}")
        shown = (
            replace(own, shape=(*meta.shape[:-1], 1)) if keep else TensorMeta(meta.shape[:-1], dtype, own.strides[:-1])
        )
        args = (rows, rank - 1, place - 1, 1) if keep else (rows, rank - 1, place - 1)
        op = "aten.narrow.default" if keep else "aten.select.int"
        cut = replace(node, op=op, args=args, kwargs={}, metas=(shown,))
        draft.renamed[f"{node.name}[{number}]"] = draft.append(cut, f"kth_{result}").name
    return None


SHOWN_RULES: Mapping[str, Rule] = {
    "take": _take,
    "cross": _cross,
    "linalg_cross": _cross,
    "trapezoid": _trapezoid,
    "trapz": _trapezoid,
    "trace": _trace,
    "kthvalue": _kth,
}
"""Rules by operator."""
