"""Distances of all pairs of rows: by a matrix product where PyTorch takes one too, else as norms of differences.

``cdist`` of order 2 with more than 25 rows on a side is ``sqrt(|x|**2 + |y|**2 - 2 x y)`` in PyTorch, which cancels for
near rows as it does here; sums of squares and root are the product's epilogue. Other orders reduce differences which
are never written. Rules have the form that :mod:`drk.assistant.synth.decompositions` describes.

``pdist`` is the same for the pairs of one tensor's rows.

Left out: tiles of differences, whose rows would be read once for many pairs, and batches that broadcast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.reduction_rules import Rule, argument, reducible, vector_norm
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

BY_PRODUCT = 25
"""PyTorch multiplies matrices where either side has more rows than this."""


def _cdist(node: Node, draft: Draft) -> Ref | None:
    pair = node.args[:2]
    left, right = (draft.metas[item.name] for item in pair)
    alike = left.dtype == right.dtype == "float32" and left.contiguous and right.contiguous
    if not alike or len(left.shape) not in (2, 3) or left.shape[:-2] != right.shape[:-2] or not node.meta.numel:
        return None
    if left.shape[-1] != right.shape[-1] or reducible(left, -1) is None:
        return None
    if _multiplies(node, draft.metas):
        return _by_product(node, draft, pair)
    rows = (_with_ones(node, draft, pair[0], -2), _with_ones(node, draft, pair[1], -3))
    apart = draft.emit(node, "difference", "sub.Tensor", *rows)
    return vector_norm(node, draft, apart, float(argument(node, 2, "p", 2.0)), (-1,), keep=False)


def _multiplies(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` is a ``cdist`` that PyTorch computes by a matrix product."""
    if node.bare_op != "cdist" or float(argument(node, 2, "p", 2.0)) != 2.0:
        return False
    mode = argument(node, 3, "compute_mode", None)
    rows = max(metas[item.name].shape[-2] for item in node.args[:2])
    return mode == 1 or (mode in (None, 0) and rows > BY_PRODUCT)


def _by_product(node: Node, draft: Draft, pair: tuple[Ref, ...]) -> Ref:
    x, y = pair
    meta = draft.metas[y.name]
    squares = [
        draft.emit(
            node, "squares", "sum.dim_IntList", draft.emit(node, "square", "mul.Tensor", item, item), (-1,), keep
        )
        for item, keep in ((x, True), (y, False))
    ]
    result = contiguous_meta(node.meta.shape, "float32")
    if len(meta.shape) == 2:
        made = replace(node, op="aten.linear.default", args=(x, y), kwargs={}, metas=(result,))
    else:
        batch, rows, width = meta.shape
        turned = TensorMeta((batch, width, rows), meta.dtype, (meta.strides[0], meta.strides[2], meta.strides[1]))
        columns = draft.append(
            replace(node, op="aten.transpose.int", args=(y, 1, 2), kwargs={}, metas=(turned,)), "columns"
        )
        made = replace(node, op="aten.bmm.default", args=(x, columns), kwargs={}, metas=(result,))
    product = draft.append(made, "product")
    row = squares[1] if len(meta.shape) == 2 else _with_ones(node, draft, squares[1], -2)
    twice = draft.emit(node, "twice", "mul.Tensor", product, 2.0)
    sums = draft.emit(node, "both_squares", "add.Tensor", squares[0], row)
    apart = draft.emit(node, "squared", "sub.Tensor", sums, twice)
    return draft.emit(node, "distance", "sqrt.default", draft.emit(node, "bounded", "clamp_min.default", apart, 0.0))


def _with_ones(node: Node, draft: Draft, value: Ref, dim: int) -> Ref:
    """``value`` with a dimension of size 1 before ``dim + 1``."""
    shape = list(draft.metas[value.name].shape)
    place = len(shape) + 1 + dim
    shape.insert(place, 1)
    meta = contiguous_meta(tuple(shape), draft.metas[value.name].dtype)
    made = replace(node, op="aten.unsqueeze.default", args=(value, place), kwargs={}, metas=(meta,))
    return draft.append(made, "broadcast")


def _pdist(node: Node, draft: Draft) -> Ref | None:
    """Distances of the pairs ``i < j``: norms of differences of rows that two lists of integers pick."""
    x, order = node.args[0], float(argument(node, 1, "p", 2.0))
    meta = draft.metas[x.name]
    if len(meta.shape) != 2 or meta.dtype != "float32" or meta.shape[0] < 2 or reducible(meta, -1) is None:
        return None
    rows, pairs = meta.shape[0], node.meta.numel
    places = contiguous_meta((2, pairs), "int64")
    made = replace(
        node,
        op="aten.triu_indices.default",
        args=(rows, rows, 1),
        kwargs={"device": Symbol("device", "cuda")},
        metas=(places,),
    )
    both = draft.append(made, "pairs")
    sides = []
    for side in range(2):
        own = replace(
            node, op="aten.select.int", args=(both, 0, side), kwargs={}, metas=(contiguous_meta((pairs,), "int64"),)
        )
        index = draft.append(own, ("first", "second")[side])
        meta = contiguous_meta((pairs, draft.metas[x.name].shape[1]), "float32")
        picked = replace(node, op="aten.index_select.default", args=(x, 0, index), kwargs={}, metas=(meta,))
        sides.append(draft.append(picked, f"{('first', 'second')[side]}_rows"))
    return vector_norm(node, draft, draft.emit(node, "difference", "sub.Tensor", *sides), order, (-1,), keep=False)


DISTANCE_RULES: Mapping[str, Rule] = {"cdist": _cdist, "pdist": _pdist}
"""Rules by operator."""
