"""Products of matrices under other names: sums with a product, chains, powers, Kronecker products.

``addmm`` and ``baddbmm`` with factors are a product and a sum, ``multi_dot`` is products in the order that takes fewest
multiplications, a Kronecker product needs no sum at all. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes; they are for inference.

Left out: negative powers, and chains that begin or end with a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import REDUCTION_RULES, Rule, reducible
from drk.assistant.synth.thin_rules import THIN_RULES
from drk.gym.graph import Node, Ref

_PRODUCTS = {"baddbmm": "bmm", "addmm": "mm", "addmv": "mv"}
"""Sums with a product and the product."""


def _with_sum(node: Node, draft: Draft) -> Ref | None:
    """``beta * added + alpha * (left @ right)``; with a ``beta`` of 0 what is added is not even looked at."""
    added, left, right = node.args[:3]
    metas = [draft.metas.get(item.name) for item in (left, right, added)]
    alpha, beta = (node.kwargs.get(key, 1) for key in ("alpha", "beta"))
    if node.bare_op == "addmm" and alpha == beta == 1:
        return None  # as a layer with a bias
    floating = node.meta.dtype in FLOATS
    same = floating and all(meta is not None and meta.dtype == node.meta.dtype for meta in metas)
    if not draft.by_channel or not same:
        return None
    made = replace(node, op=f"aten.{_PRODUCTS[node.bare_op]}.default", args=(left, right), kwargs={})
    thin = THIN_RULES["bmm"] if made.bare_op == "bmm" else REDUCTION_RULES[made.bare_op]
    found = thin(made, draft) or draft.append(made, "product")
    if alpha != 1:
        found = draft.emit(node, "scaled", "mul.Tensor", found, alpha)
    if beta == 0:
        return found
    other = added if beta == 1 else draft.emit(node, "weighted", "mul.Tensor", added, beta)
    return draft.emit(node, "shifted", "add.Tensor", found, other)


def _multiplied(node: Node, draft: Draft, left: Ref, right: Ref) -> Ref:
    """The product of two matrices, or of two for each of a batch."""
    first, second = (draft.metas[item.name] for item in (left, right))
    meta = contiguous_meta((*first.shape[:-1], second.shape[-1]), first.dtype)
    name = "mm" if len(first.shape) == 2 else "matmul"
    return draft.append(replace(node, op=f"aten.{name}.default", args=(left, right), kwargs={}, metas=(meta,)), name)


def _multi_dot(node: Node, draft: Draft) -> Ref | None:
    """Several matrices in the order that takes fewest multiplications."""
    factors = node.args[0]
    metas = [draft.metas.get(item.name) if isinstance(item, Ref) else None for item in factors]
    known = [meta for meta in metas if meta is not None and len(meta.shape) == 2 and meta.dtype in FLOATS]
    if not draft.by_channel or len(known) != len(metas):
        return None
    sizes = [*(meta.shape[0] for meta in known), known[-1].shape[1]]
    best = {(i, i): (0, i) for i in range(len(known))}
    for width in range(1, len(known)):
        for i in range(len(known) - width):
            k = i + width
            ways = (
                (best[i, j][0] + best[j + 1, k][0] + sizes[i] * sizes[j + 1] * sizes[k + 1], j) for j in range(i, k)
            )
            best[i, k] = min(ways)

    def made(i: int, k: int) -> Ref:
        if i == k:
            return Ref(factors[i].name)
        cut = best[i, k][1]
        return _multiplied(node, draft, made(i, cut), made(cut + 1, k))

    return made(0, len(known) - 1)


def _matrix_power(node: Node, draft: Draft) -> Ref | None:
    x, count = node.args[:2]
    meta = draft.metas[x.name]
    if not draft.by_channel or meta.dtype not in FLOATS or type(count) is not int or count < 2 or meta.numel == 0:
        return None
    found: Ref | None = None
    while count:
        if count % 2:
            found = x if found is None else _multiplied(node, draft, found, x)
        count //= 2
        x = _multiplied(node, draft, x, x) if count else x
    return found


def _vecdot(node: Node, draft: Draft) -> Ref | None:
    left, right = node.args[:2]
    metas = [draft.metas[item.name] for item in (left, right)]
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else -1)
    dims = reducible(metas[0], dim)
    if dims is None or metas[0].shape != metas[1].shape or metas[1].dtype != metas[0].dtype:
        return None
    return draft.emit(
        node, "dot", "sum.dim_IntList", draft.emit(node, "products", "mul.Tensor", left, right), dims, False
    )


def _kron(node: Node, draft: Draft) -> Ref | None:
    """Every element of the one times the whole other: a multiplication of views."""
    metas = [draft.metas[item.name] for item in node.args[:2]]
    rank = len(node.meta.shape)
    plain = all(len(meta.shape) == rank and meta.contiguous and meta.dtype == node.meta.dtype for meta in metas)
    if not draft.by_channel or not plain or rank == 0:
        return None
    shapes = [[step for size in meta.shape for step in pair(size)] for meta, pair in zip(metas, _APART, strict=True)]
    views = [
        draft.emit(node, "factor", "reshape.default", ref, tuple(to))
        for ref, to in zip(node.args[:2], shapes, strict=True)
    ]
    product = draft.emit(node, "products", "mul.Tensor", *views)
    return draft.emit(node, "joined", "reshape.default", product, node.meta.shape)


_APART: tuple[Callable[[int], tuple[int, int]], ...] = (lambda size: (size, 1), lambda size: (1, size))
"""A dimension of a Kronecker product's factors as two: of the first and of the second factor."""


PRODUCT_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_PRODUCTS, _with_sum),
    **dict.fromkeys(("linalg_multi_dot", "chain_matmul"), _multi_dot),
    **dict.fromkeys(("linalg_matrix_power", "matrix_power"), _matrix_power),
    "linalg_vecdot": _vecdot,
    "kron": _kron,
}
"""Rules by operator."""
