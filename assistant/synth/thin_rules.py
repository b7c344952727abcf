"""Contractions that read one tensor once, written as a multiplication and a sum that fuse with what stands around them.

``einsum("c,bcn->bn", score, x)`` and products of matrices with a single row or column have a thin side: every index of
it is an index of the other tensor too. The library brings the other tensor into a matrix's layout first, which is often
a copy; as a sum over products it is read where it lies. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes.

Left out: equations with ellipses, repeated indices, more than two tensors or results in another order than the wide
tensor's, and sides that are thin only at the captured sizes (a batch of one).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import REDUCTION_RULES, Rule, reducible
from drk.gym.graph import Node, Ref


def _einsum(node: Node, draft: Draft) -> Ref | None:
    equation, tensors = node.args[:2]
    known = isinstance(equation, str) and all(isinstance(item, Ref) and item.name in draft.metas for item in tensors)
    if not known or len(tensors) != 2 or "." in equation:
        return None
    sides, _, result = equation.replace(" ", "").partition("->")
    indices = sides.split(",")
    if "->" not in equation:
        joined = "".join(indices)
        result = "".join(sorted(index for index in set(joined) if joined.count(index) == 1))
    thin, wide = (0, 1) if len(indices[0]) <= len(indices[1]) else (1, 0)
    return contracted_thin(node, draft, (tensors[thin], indices[thin]), (tensors[wide], indices[wide]), result)


def contracted_thin(node: Node, draft: Draft, thin: tuple[Ref, str], wide: tuple[Ref, str], result: str) -> Ref | None:
    """Emit the contraction where every index of ``thin`` is one of ``wide`` too; else return None.

    Both are tensors with their indices, ``result`` has the indices that stay, in the wide tensor's order.
    """
    small, large = draft.metas[thin[0].name], draft.metas[wide[0].name]
    if {small.dtype, large.dtype, node.meta.dtype} - FLOATS or small.dtype != large.dtype:
        return None
    sizes = dict(zip(wide[1], large.shape, strict=True))
    in_order = [[index for index in wide[1] if index in part] for part in (thin[1], result)]
    if len(sizes) != len(wide[1]) or in_order != [list(thin[1]), list(result)]:
        return None
    if any(sizes[index] != size for index, size in zip(thin[1], small.shape, strict=True)):
        return None
    summed = tuple(place - len(wide[1]) for place, index in enumerate(wide[1]) if index not in result)
    if not thin[1] or (summed and reducible(large, summed) is None) or math.prod(large.shape) == 0:
        return None
    reach = wide[1][wide[1].index(thin[1][0]) :]  # from the outermost index that both have
    shape = tuple(sizes[index] if index in thin[1] else 1 for index in reach)
    view = thin[0] if shape == small.shape else draft.emit(node, "broadcast", "reshape.default", thin[0], shape)
    product = draft.emit(node, "products", "mul.Tensor", wide[0], view)
    return draft.emit(node, "contracted", "sum.dim_IntList", product, summed, False) if summed else product


def _matmul(node: Node, draft: Draft) -> Ref | None:
    """Batched products with a single row or column that was made by ``unsqueeze``."""
    found = REDUCTION_RULES["matmul"](node, draft) if node.bare_op == "matmul" else None
    left, right = node.args[:2]
    metas = [draft.metas.get(item.name) if isinstance(item, Ref) else None for item in (left, right)]
    first, second = metas
    if found is not None or first is None or second is None:
        return found
    batch = first.shape[:-2]
    if len(first.shape) < 3 or second.shape[:-2] != batch or {first.dtype, second.dtype} - FLOATS:
        return None
    inner = first.shape[-1]
    if first.shape[-2] == 1 and _unsqueezed(left, -2, draft) and reducible(second, -2) is not None:
        view = draft.emit(node, "column", "reshape.default", left, (*batch, inner, 1))
        return _kept_sum(node, draft, right, view, -2)
    if second.shape[-1] == 1 and _unsqueezed(right, -1, draft) and reducible(first, -1) is not None:
        view = draft.emit(node, "row", "reshape.default", right, (*batch, 1, inner))
        return _kept_sum(node, draft, left, view, -1)
    return None


def _kept_sum(node: Node, draft: Draft, wide: Ref, thin: Ref, dim: int) -> Ref:
    product = draft.emit(node, "products", "mul.Tensor", wide, thin)
    return draft.emit(node, "contracted", "sum.dim_IntList", product, (dim,), True)


def _unsqueezed(value: Ref, dim: int, draft: Draft) -> bool:
    """Whether ``value`` has a size of 1 at ``dim`` (negative) whatever the sizes of the inputs are."""
    made = next((item for item in draft.nodes if item.name == value.name), None)
    if made is None or made.bare_op != "unsqueeze":
        return False
    rank = len(made.meta.shape)
    return bool(made.args[1] % rank == dim % rank)


THIN_RULES: Mapping[str, Rule] = {"einsum": _einsum, "bmm": _matmul, "matmul": _matmul}
"""Rules by operator."""
