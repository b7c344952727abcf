"""Reductions in PyTorch's many forms, written as the few that kernels know.

``std``, ``var`` by dimension, with their means too, vector norms, ``max`` and ``min`` with their indices, cosine
similarity, pairwise distances, and pooling to a single element. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes.

Left out: variances with corrections other than 0 and 1, norms of matrices but Frobenius'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

Rule = Callable[[Node, Draft], Ref | None]


def reducible(meta: TensorMeta, dims: Any) -> tuple[int, ...] | None:
    """Return ``dims`` (all, for None and ``()``) as sorted negative indices when kernels can reduce them, else None."""
    rank = len(meta.shape)
    items = dims if isinstance(dims, tuple) else (dims,)
    if dims is None or dims == ():
        items = tuple(range(rank))
    wanted = sorted(dim - rank if dim >= 0 else dim for dim in items)
    if not wanted or meta.dtype not in FLOATS:
        return None
    return tuple(wanted) if 2 <= math.prod(meta.shape[dim] for dim in wanted) < 2**31 else None


def argument(node: Node, index: int, name: str, default: Any) -> Any:
    """A positional or keyword argument of a node."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def vector_norm(node: Node, draft: Draft, x: Ref, order: float, dims: tuple[int, ...], *, keep: bool) -> Ref | None:
    """Emit a norm of ``x`` over ``dims``, of any order."""
    if order == 2:
        square = draft.emit(node, "square", "pow.Tensor_Scalar", x, 2)
        return draft.emit(
            node, "norm", "sqrt.default", draft.emit(node, "squares", "sum.dim_IntList", square, dims, keep)
        )
    if order == 0:
        some = draft.emit(node, "some", "ne.Scalar", x, 0)
        ones = draft.emit(node, "one", "_to_copy.default", some, dtype=Symbol("dtype", draft.metas[x.name].dtype))
        return draft.emit(node, "norm", "sum.dim_IntList", ones, dims, keep)
    size = draft.emit(node, "magnitude", "abs.default", x)
    if order == 1:
        return draft.emit(node, "norm", "sum.dim_IntList", size, dims, keep)
    if math.isinf(order):
        return draft.emit(node, "norm", "amax.default" if order > 0 else "amin.default", size, dims, keep)
    power = draft.emit(node, "power", "pow.Tensor_Scalar", size, order)
    total = draft.emit(node, "powers", "sum.dim_IntList", power, dims, keep)
    return draft.emit(node, "norm", "pow.Tensor_Scalar", total, 1.0 / order)


def _linalg_vector_norm(node: Node, draft: Draft) -> Ref | None:
    x, order, wanted = node.args[0], argument(node, 1, "ord", 2), argument(node, 2, "dim", None)
    dims = reducible(draft.metas[x.name], wanted)
    if dims is None or node.kwargs.get("dtype"):
        return None
    return vector_norm(node, draft, x, order, dims, keep=argument(node, 3, "keepdim", False) is True)


def _norm(node: Node, draft: Draft) -> Ref | None:
    """``aten.norm``: (x, p, dim, keepdim), p may be None."""
    if node.kwargs.get("dtype"):
        return None
    x, order = node.args[0], argument(node, 1, "p", 2)
    dims = reducible(draft.metas[x.name], argument(node, 2, "dim", None))
    keep = argument(node, 3, "keepdim", False) is True
    return None if dims is None else vector_norm(node, draft, x, 2 if order is None else order, dims, keep=keep)


def _matrix_norm(node: Node, draft: Draft) -> Ref | None:
    """The Frobenius norm, as ``linalg.matrix_norm`` gives it by default."""
    if argument(node, 1, "ord", "fro") != "fro" or node.kwargs.get("dtype"):
        return None
    dims = reducible(draft.metas[node.args[0].name], argument(node, 2, "dim", (-2, -1)))
    keep = argument(node, 3, "keepdim", False) is True
    return None if dims is None else vector_norm(node, draft, node.args[0], 2, dims, keep=keep)


def _with_mean(node: Node, draft: Draft) -> Ref | None:
    """``var_mean`` and ``std_mean``: both results by rules of their own."""
    spread, first = node.bare_op.removesuffix("_mean"), node.metas[0]
    if first is None:
        return None
    alone = replace(node, op=node.op.replace(f"{spread}_mean", spread), metas=(first,))
    made = _variance(alone, draft)
    if made is None and spread == "var":
        made = draft.append(alone, "variance")
    source = next((item for item in draft.nodes if made is not None and item.name == made.name), None)
    if source is not None and source.bare_op == "sqrt":
        source = next(item for item in draft.nodes if item.name == source.args[0].name)
    if made is None or source is None or source.bare_op != "var":
        return None
    dims, keep = argument(source, 1, "dim", None), source.kwargs.get("keepdim", False)
    wanted = reducible(draft.metas[node.args[0].name], dims)
    if wanted is None:
        return None
    draft.renamed[f"{node.name}[0]"] = made.name
    draft.renamed[f"{node.name}[1]"] = draft.emit(node, "mean", "mean.dim", node.args[0], wanted, keep).name
    return None


def _of_everything(node: Node, draft: Draft) -> Ref | None:
    """``prod`` and ``argmax`` without dimensions, along the one dimension that a row-major tensor is in memory."""
    x = node.args[0]
    meta = draft.metas.get(x.name) if isinstance(x, Ref) else None
    plain = len(node.args) == 1 or node.args[1] is None
    if meta is None or not plain or node.kwargs or meta.dtype not in FLOATS or not meta.contiguous or meta.numel < 2:
        return None
    flat = x if len(meta.shape) == 1 else draft.emit(node, "flat", "reshape.default", x, (meta.numel,))
    if node.bare_op == "prod":
        return draft.emit(node, "product", "prod.dim_int", flat, 0, False) if node.op.endswith(".default") else None
    return draft.emit(node, "place", f"{node.bare_op}.default", flat, 0, False) if len(meta.shape) > 1 else None


def _variance(node: Node, draft: Draft) -> Ref | None:
    overload = node.op.split(".")[-1]
    if overload == "correction":
        if node.bare_op == "var" and node.kwargs.get("correction") in (0, 1):
            return None
        dims, correction = argument(node, 1, "dim", None), node.kwargs.get("correction")
        keep = node.kwargs.get("keepdim", False)
    elif overload in {"default", "dim"}:
        rest = node.args[1:] if overload == "dim" else (None, *node.args[1:])
        dims = rest[0]
        correction = 0 if argument_of(rest, 1, node.kwargs.get("unbiased", True)) is False else 1
        keep = argument_of(rest, 2, node.kwargs.get("keepdim", False))
    else:
        return None
    x, correction = node.args[0], 1 if correction is None else correction
    wanted = reducible(draft.metas[x.name], dims)
    if wanted is None or correction not in (0, 1):
        return None
    made = draft.emit(node, "variance", "var.correction", x, wanted, correction=correction, keepdim=keep is True)
    return made if node.bare_op == "var" else draft.emit(node, "deviation", "sqrt.default", made)


def argument_of(items: tuple[Any, ...], index: int, default: Any) -> Any:
    """``items[index]`` or ``default``."""
    return items[index] if len(items) > index else default


def _extreme(node: Node, draft: Draft) -> Ref | None:
    """``max(x, dim, keepdim)`` gives values and indices; ``max(x)`` the largest of all."""
    x, side = node.args[0], node.bare_op
    if not isinstance(x, Ref) or x.name not in draft.metas or draft.metas[x.name].dtype not in FLOATS:
        return None
    if node.op.endswith(".default"):
        dims = reducible(draft.metas[x.name], None)
        return None if dims is None else draft.emit(node, f"{side}imum", f"a{side}.default", x, dims, False)
    if node.op.split(".")[-1] == "other":
        return draft.emit(node, f"{side}imum", f"{side}imum.default", x, node.args[1])
    if node.op.split(".")[-1] != "dim" or reducible(draft.metas[x.name], node.args[1]) is None:
        return None
    dim, keep = node.args[1], argument(node, 2, "keepdim", False) is True
    draft.renamed[f"{node.name}[0]"] = draft.emit(node, f"row_{side}", f"a{side}.default", x, (dim,), keep).name
    draft.renamed[f"{node.name}[1]"] = draft.emit(node, f"row_arg{side}", f"arg{side}.default", x, dim, keep).name
    return None


def _both_extremes(node: Node, draft: Draft) -> Ref | None:
    """``aminmax`` gives the smallest and the largest."""
    x, dim, keep = node.args[0], node.kwargs.get("dim"), node.kwargs.get("keepdim", False) is True
    dims = reducible(draft.metas[x.name], dim)
    if dims is None or len(node.args) > 1 or (dim is None and keep):
        return None
    for place, side in enumerate(("min", "max")):
        draft.renamed[f"{node.name}[{place}]"] = draft.emit(node, f"row_{side}", f"a{side}.default", x, dims, keep).name
    return None


def _largest_alone(node: Node, draft: Draft) -> Ref | None:
    """Adaptive pooling gives values and indices; where only values are read, they are an operator of their own."""
    first = node.metas[0]
    read = [user for user in draft.users.get(node.name, ()) if draft.users.get(user)]
    if first is None or node.kwargs or len(read) != 1 or not node.op.endswith(".default"):
        return None
    alone = replace(node, op=f"aten.{node.bare_op}.values", metas=(first,))
    draft.renamed[f"{node.name}[0]"] = draft.append(alone, "pooled").name
    return None


def _pool_to_one(node: Node, draft: Draft) -> Ref | None:
    x, size = node.args[0], node.args[1]
    meta = draft.metas.get(x.name)
    sizes = size if isinstance(size, tuple) else (size,)
    if meta is not None and set(sizes) != {1} and "max" in node.bare_op:
        return _largest_alone(node, draft)
    if meta is None or set(sizes) != {1} or len(meta.shape) <= len(sizes):
        return None
    dims = reducible(meta, tuple(range(-len(sizes), 0)))
    if dims is None:
        return None
    if "max" not in node.bare_op:
        return draft.emit(node, "pooled", "mean.dim", x, dims, True)
    draft.renamed[f"{node.name}[0]"] = draft.emit(node, "pooled", "amax.default", x, dims, True).name
    return None


def _cosine_similarity(node: Node, draft: Draft) -> Ref | None:
    left, right = node.args[:2]
    metas = [draft.metas[item.name] for item in (left, right)]
    dim = argument(node, 2, "dim", 1)
    if len(metas[0].shape) != len(metas[1].shape) or metas[0].dtype != metas[1].dtype or not metas[0].shape:
        return None
    dims = reducible(metas[0], dim)
    if dims is None or metas[0].shape[dim] != metas[1].shape[dim]:
        return None
    eps = argument(node, 3, "eps", 1e-8)
    parts = []
    for x in (left, right):
        square = draft.emit(node, "square", "pow.Tensor_Scalar", x, 2)
        length = draft.emit(
            node, "length", "sqrt.default", draft.emit(node, "squares", "sum.dim_IntList", square, dims, True)
        )
        parts.append(
            draft.emit(node, "unit", "div.Tensor", x, draft.emit(node, "bounded", "clamp_min.default", length, eps))
        )
    product = draft.emit(node, "product", "mul.Tensor", *parts)
    return draft.emit(node, "similarity", "sum.dim_IntList", product, dims, False)


def cosine(node: Node, draft: Draft, left: Ref, right: Ref, tiny: float = 1e-12) -> Ref | None:
    """Products over the root of both sums of squares (each with ``tiny`` added), along the last dimension."""
    dims = reducible(draft.metas[left.name], -1)
    if dims is None:
        return None
    sums = []
    for first, second in ((left, right), (left, left), (right, right)):
        product = draft.emit(node, "product", "mul.Tensor", first, second)
        sums.append(draft.emit(node, "sums", "sum.dim_IntList", product, dims, False))
    squares = [draft.emit(node, "squares", "add.Scalar", item, tiny) for item in sums[1:]]
    lengths = draft.emit(node, "lengths", "sqrt.default", draft.emit(node, "squares", "mul.Tensor", *squares))
    return draft.emit(node, "similarity", "div.Tensor", sums[0], lengths)


def _pairwise_distance(node: Node, draft: Draft) -> Ref | None:
    left, right = node.args[:2]
    shapes = [draft.metas[item.name].shape for item in (left, right)]
    if len(shapes[0]) != len(shapes[1]) or shapes[0][-1:] != shapes[1][-1:]:
        return None
    order, eps = argument(node, 2, "p", 2.0), argument(node, 3, "eps", 1e-6)
    return distance(node, draft, (left, right), order, eps, keep=argument(node, 4, "keepdim", False) is True)


def distance(
    node: Node, draft: Draft, pair: tuple[Ref, Ref], order: float, eps: float, *, keep: bool = False
) -> Ref | None:
    """``norm(left - right + eps)`` over the last dimension."""
    dims = reducible(draft.metas[pair[0].name], -1)
    if dims is None:
        return None
    apart = draft.emit(node, "apart", "add.Scalar", draft.emit(node, "difference", "sub.Tensor", *pair), eps)
    return vector_norm(node, draft, apart, order, dims, keep=keep)


def _broadcast_tensors(node: Node, draft: Draft) -> Ref | None:
    """Results that have their source's shape already are their sources."""
    for index, (source, meta) in enumerate(zip(node.args[0], node.metas, strict=True)):
        if meta is not None and draft.metas[source.name].shape == meta.shape:
            draft.renamed[f"{node.name}[{index}]"] = source.name
    return None


def _thin_product(node: Node, draft: Draft) -> Ref | None:
    """A matrix times a vector, or a single column, as a multiplication and a row sum; a diagonal times a matrix."""
    left, right = node.args[:2]
    metas = [draft.metas.get(item.name) if isinstance(item, Ref) else None for item in (left, right)]
    first, second = metas
    if first is None or second is None or first.dtype not in FLOATS or first.dtype != second.dtype:
        return None
    diagonal = next((item for item in draft.nodes if item.name == left.name and item.bare_op in _DIAGONALS), None)
    if diagonal is not None and len(second.shape) == 2 and len(diagonal.args) == 1:
        entries = diagonal.args[0]
        if len(draft.metas[entries.name].shape) == 1:
            column = draft.emit(node, "entries", "reshape.default", entries, (first.shape[-1], 1))
            return draft.emit(node, "scaled", "mul.Tensor", column, right)
    inner = first.shape[-1]
    single = second.shape == ((1, inner) if node.bare_op == "linear" else (inner, 1))
    if inner < 2 or len(first.shape) < 1 or not (len(second.shape) == 1 or single):
        return None
    if single and len(first.shape) > 1:
        row = draft.emit(node, "column", "reshape.default", right, (inner,))
        product = draft.emit(node, "products", "mul.Tensor", left, row)
        total = draft.emit(node, "dot", "sum.dim_IntList", product, (-1,), True)
        bias = node.args[2] if node.bare_op == "linear" and len(node.args) > 2 else None
        return total if bias is None else draft.emit(node, "shifted", "add.Tensor", total, bias)
    if len(second.shape) != 1 or node.bare_op == "linear":
        return None
    product = draft.emit(node, "products", "mul.Tensor", left, right)
    return draft.emit(node, "dot", "sum.dim_IntList", product, (-1,), False)


_DIAGONALS = frozenset({"diag", "diag_embed"})

REDUCTION_RULES: Mapping[str, Rule] = {
    "mv": _thin_product,
    "dot": _thin_product,
    "mm": _thin_product,
    "matmul": _thin_product,
    "linear": _thin_product,
    "linalg_vector_norm": _linalg_vector_norm,
    "norm": _norm,
    "frobenius_norm": lambda node, draft: _norm(_with_order(node), draft),
    "linalg_matrix_norm": _matrix_norm,
    "var": _variance,
    "std": _variance,
    "var_mean": _with_mean,
    "std_mean": _with_mean,
    "prod": _of_everything,
    "argmax": _of_everything,
    "argmin": _of_everything,
    "max": _extreme,
    "min": _extreme,
    "adaptive_avg_pool1d": _pool_to_one,
    "adaptive_avg_pool2d": _pool_to_one,
    "adaptive_avg_pool3d": _pool_to_one,
    "adaptive_max_pool1d": _pool_to_one,
    "adaptive_max_pool2d": _pool_to_one,
    "adaptive_max_pool3d": _pool_to_one,
    "cosine_similarity": _cosine_similarity,
    "pairwise_distance": _pairwise_distance,
    "broadcast_tensors": _broadcast_tensors,
    "aminmax": _both_extremes,
}
"""Rules by operator."""


def _with_order(node: Node) -> Node:
    """``frobenius_norm(x, dim, keepdim)`` in the argument order of ``norm``."""
    return replace(node, args=(node.args[0], 2, *node.args[1:]))
