"""Contractions of two and more tensors, written as one matrix product each between views of the tensors.

``einsum("bijl,lk->bijk", x, w)`` is ``x @ w``, ``einsum("nchw,oc->nohw", x, w)`` is ``w @ x`` for each image. Indices
that both sides and the result have number the matrices of a batch; indices that are summed over, or that stand together
in the result, are taken as one. Of the two ways round the one that copies less is taken. Three and more tensors are
contracted from the left. ``tensordot``, ``inner`` and ``bilinear`` are contractions of known form, ``outer`` needs no
sum at all. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes; they are for inference.

Left out: ellipses that broadcast or stand behind indices, indices repeated within a tensor, indices that only one
tensor has and the result lacks, results whose memory order would be another than the library's.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule
from drk.assistant.synth.thin_rules import THIN_RULES, contracted_thin
from drk.gym.graph import Node, Ref, TensorMeta

MAX_BATCH = 2
"""Dimensions that number matrices, at most."""


@dataclass(frozen=True)
class Indexed:
    """A tensor and the letters of its dimensions."""

    ref: Ref
    indices: str


@dataclass(frozen=True)
class _Form:
    """One way to see a contraction as ``left @ right``: groups of indices, each one dimension of the product."""

    left: Indexed
    right: Indexed
    batch: str
    rows: str
    inner: str
    columns: str

    @property
    def made(self) -> str:
        """Indices of the product."""
        return self.batch + self.rows + self.columns


def contracted(node: Node, draft: Draft, operands: list[Indexed], result: str) -> Ref | None:
    """Emit the contraction of ``operands`` to ``result``, from the left; nothing is emitted where it has no rule."""
    first, second, *others = operands
    if not others:
        return _pair(node, draft, first, second, result, node.meta)
    later = set(result).union(*(item.indices for item in others))
    kept = [index for index in dict.fromkeys(first.indices + second.indices) if index in later]
    both = [index for index in kept if index in first.indices and index in second.indices]
    order = {index: place for place, index in enumerate(result)}
    alone = sorted((index for index in kept if index not in both), key=lambda index: order.get(index, len(order)))
    middle = "".join([*both, *alone])
    sizes = _sizes(draft, [first, second])
    if sizes is None:
        return None
    meta = contiguous_meta(tuple(sizes[index] for index in middle), node.meta.dtype)
    found = _pair(node, draft, first, second, middle, meta)
    return contracted(node, draft, [Indexed(found, middle), *others], result) if found else None


def _pair(node: Node, draft: Draft, first: Indexed, second: Indexed, result: str, wanted: TensorMeta) -> Ref | None:
    thin, wide = (first, second) if len(first.indices) <= len(second.indices) else (second, first)
    found = contracted_thin(node, draft, (thin.ref, thin.indices), (wide.ref, wide.indices), result)
    sizes = _sizes(draft, [first, second])
    if found is not None or sizes is None or set(result) - set(sizes):
        return found
    if set(result) == set(sizes):
        return _outer(node, draft, (first, second), result, wanted)
    forms = [item for item in _forms(first, second, result) if _strides(item.made, sizes, result) == wanted.strides]
    if not forms or math.prod(sizes.values()) == 0:
        return None
    form = min(forms, key=lambda item: _copied(draft, item))
    rows = [form.rows] if form.batch else list(form.rows)  # one matrix on the right takes any leading dimensions
    left = _arranged(node, draft, form.left, [*_present(form.batch, form.left), *rows, form.inner])
    right = _arranged(node, draft, form.right, [*_present(form.batch, form.right), form.inner, form.columns])
    groups = [*form.batch, *rows, form.columns]
    joined = tuple(math.prod(sizes[index] for index in group) for group in groups)
    meta = contiguous_meta(joined, wanted.dtype)
    made = replace(node, op="aten.matmul.default", args=(left, right), kwargs={}, metas=(meta,))
    product = draft.append(made, "contracted")
    shape = tuple(sizes[index] for index in form.made)
    product = product if joined == shape else _reshaped(node, draft, product, shape)
    return _arranged(node, draft, Indexed(product, form.made), list(result))


def _strides(made: str, sizes: Mapping[str, int], result: str) -> tuple[int, ...]:
    """Strides of the result, which is a view of a row-major tensor with the indices ``made``."""
    steps = contiguous_meta(tuple(sizes[index] for index in made), "").strides
    return tuple(steps[made.index(index)] for index in result)


def _sizes(draft: Draft, operands: list[Indexed]) -> dict[str, int] | None:
    """Each index' size; None where the letters do not fit, or the types are not all one that kernels take."""
    metas = [draft.metas[item.ref.name] for item in operands]
    if len({meta.dtype for meta in metas}) != 1 or metas[0].dtype not in FLOATS:
        return None
    sizes: dict[str, int] = {}
    for item, meta in zip(operands, metas, strict=True):
        if len(item.indices) != len(meta.shape) or len(set(item.indices)) != len(item.indices):
            return None
        for index, size in zip(item.indices, meta.shape, strict=True):
            if sizes.setdefault(index, size) != size:
                return None
    return sizes


def _forms(first: Indexed, second: Indexed, result: str) -> list[_Form]:
    """Ways to see the result as (batch, rows of the left factor, columns of the right one), or as a view of that."""
    found = []
    for left, right in ((first, second), (second, first)):
        inner = "".join(index for index in left.indices if index in right.indices and index not in result)
        only_left, only_right = (
            "".join(index for index in one.indices if index not in other.indices)
            for one, other in ((left, right), (right, left))
        )
        columns = _suffix(result, only_right)
        rows = _suffix(result[: len(result) - len(columns)], only_left)
        batch = result[: len(result) - len(columns) - len(rows)]
        found.append(_Form(left, right, batch, rows, inner, columns))
        both = "".join(index for index in left.indices if index in right.indices and index in result)
        found.append(_Form(left, right, both, only_left, inner, only_right))
    return [form for form in found if _possible(form, result)]


def _possible(form: _Form, result: str) -> bool:
    own = [_present(form.batch, item) for item in (form.left, form.right)]
    if not form.inner or not form.columns or not form.rows or len(form.batch) > MAX_BATCH:
        return False
    return sorted(form.made) == sorted(result) and own[1] == list(form.batch) and own[0] in ([], own[1])


def _suffix(text: str, letters: str) -> str:
    found = ""
    while text and text[-1] in letters:
        text, found = text[:-1], text[-1] + found
    return found


def _present(batch: str, item: Indexed) -> list[str]:
    return [index for index in batch if index in item.indices]


# --- Views ---------------------------------------------------------------------------------------------------


def _copied(draft: Draft, form: _Form) -> int:
    """How many elements are copied because groups of indices do not lie together."""
    total = 0
    parts = ((form.left, [form.rows, form.inner]), (form.right, [form.inner, form.columns]))
    for item, groups in parts:
        meta = draft.metas[item.ref.name]
        if not all(_together(meta, item.indices, group) for group in groups):
            total += meta.numel
    return total


def _together(meta: TensorMeta, indices: str, group: str) -> bool:
    """Whether dimensions are one dimension with one stride."""
    steps = [(meta.shape[indices.index(index)], meta.strides[indices.index(index)]) for index in group]
    return all(outer[1] == size * stride for outer, (size, stride) in pairwise(steps))


def _arranged(node: Node, draft: Draft, item: Indexed, groups: list[str]) -> Ref:
    """A tensor with one dimension for each group of indices."""
    order = "".join(groups)
    meta = draft.metas[item.ref.name]
    axes = tuple(item.indices.index(index) for index in order)
    found = item.ref
    if order != item.indices:
        turned = replace(
            meta, shape=tuple(meta.shape[axis] for axis in axes), strides=tuple(meta.strides[axis] for axis in axes)
        )
        made = replace(node, op="aten.permute.default", args=(found, axes), kwargs={}, metas=(turned,))
        found, meta = draft.append(made, "turned"), turned
    if all(len(group) == 1 for group in groups):
        return found
    sizes = dict(zip(order, meta.shape, strict=True))
    shape = tuple(math.prod(sizes[index] for index in group) for group in groups)
    strides = None
    if all(_together(meta, order, group) for group in groups):
        strides = tuple(meta.strides[order.index(group[-1])] for group in groups)
    return _reshaped(node, draft, found, shape, strides)


def _reshaped(
    node: Node, draft: Draft, value: Ref, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
) -> Ref:
    meta = contiguous_meta(shape, draft.metas[value.name].dtype)
    meta = replace(meta, strides=strides) if strides else meta
    made = replace(node, op="aten.reshape.default", args=(value, shape), kwargs={}, metas=(meta,))
    return draft.append(made, "regrouped")


def _outer(node: Node, draft: Draft, operands: tuple[Indexed, Indexed], result: str, wanted: TensorMeta) -> Ref | None:
    """Nothing is summed: a multiplication with broadcasting."""
    if wanted.strides != contiguous_meta(wanted.shape, wanted.dtype).strides:
        return None
    views = []
    for item in operands:
        order = "".join(index for index in result if index in item.indices)
        meta = draft.metas[item.ref.name]
        if order != item.indices or not meta.contiguous:
            return None
        sizes = dict(zip(item.indices, meta.shape, strict=True))
        reach = result[result.index(order[0]) :]
        shape = tuple(sizes.get(index, 1) for index in reach)
        views.append(item.ref if shape == meta.shape else _reshaped(node, draft, item.ref, shape))
    return draft.emit(node, "products", "mul.Tensor", *views)


# --- Rules ---------------------------------------------------------------------------------------------------


def _einsum(node: Node, draft: Draft) -> Ref | None:
    node = _without_dots(node, draft)
    found = THIN_RULES["einsum"](node, draft)
    equation, tensors = node.args[:2]
    known = isinstance(equation, str) and all(isinstance(item, Ref) and item.name in draft.metas for item in tensors)
    if found is not None or not known or not draft.by_channel or len(tensors) < 2 or "." in equation:
        return found
    sides, _, result = equation.replace(" ", "").partition("->")
    indices = sides.split(",")
    if "->" not in equation:
        joined = "".join(indices)
        result = "".join(sorted(index for index in set(joined) if joined.count(index) == 1))
    if len(indices) != len(tensors) or node.meta.dtype not in FLOATS:
        return None
    operands = [Indexed(ref, letters) for ref, letters in zip(tensors, indices, strict=True)]
    return contracted(node, draft, operands, result) if _sizes(draft, operands) else None


def _without_dots(node: Node, draft: Draft) -> Node:
    """The contraction with letters of their own where ``...`` stood for the leading dimensions of all tensors alike."""
    equation, tensors = node.args[:2]
    if not isinstance(equation, str) or not isinstance(tensors, tuple) or "->" not in equation:
        return node
    sides, _, result = equation.replace(" ", "").partition("->")
    parts = sides.split(",")
    if len(parts) != len(tensors) or not all(isinstance(item, Ref) and item.name in draft.metas for item in tensors):
        return node
    dotted = [
        draft.metas[ref.name].shape[: len(draft.metas[ref.name].shape) - len(part) + 3]
        for ref, part in zip(tensors, parts, strict=True)
        if part.startswith("...")
    ]
    if not dotted or any(shape != dotted[0] for shape in dotted) or not result.startswith("..."):
        return node
    free = [letter for letter in string.ascii_letters if letter not in equation]
    leading = "".join(free[: len(dotted[0])])
    written = ",".join(part.replace("...", leading) for part in parts) + "->" + result.replace("...", leading)
    return node if "." in written else replace(node, args=(written, *node.args[1:]))


def _tensordot(node: Node, draft: Draft) -> Ref | None:
    left, right, left_dims, right_dims = node.args[:4]
    if not draft.by_channel or any(item.name not in draft.metas for item in (left, right)):
        return None
    ranks = [len(draft.metas[item.name].shape) for item in (left, right)]
    letters = "abcdefghijklmnopqrstuvwxyz"
    if sum(ranks) > len(letters):
        return None
    first, second = letters[: ranks[0]], list(letters[ranks[0] : sum(ranks)])
    for one, other in zip(left_dims, right_dims, strict=True):
        second[other] = first[one]
    result = "".join(index for index in [*first, *second] if (index in first) != (index in second))
    return contracted(node, draft, [Indexed(left, first), Indexed(right, "".join(second))], result)


def _inner(node: Node, draft: Draft) -> Ref | None:
    left, right = node.args[:2]
    ranks = [len(draft.metas[item.name].shape) for item in (left, right)]
    return _tensordot(replace(node, args=(left, right, (-1,), (-1,))), draft) if min(ranks) > 0 else None


def _bilinear(node: Node, draft: Draft) -> Ref | None:
    left, right, weight, *rest = node.args
    if not draft.by_channel or len(draft.metas[left.name].shape) != 2:
        return None
    operands = [Indexed(left, "bi"), Indexed(weight, "oij"), Indexed(right, "bj")]
    found = contracted(node, draft, operands, "bo") if _sizes(draft, operands) else None
    if found is None or not rest or rest[0] is None:
        return found
    return draft.emit(node, "shifted", "add.Tensor", found, rest[0])


def _outer_product(node: Node, draft: Draft) -> Ref | None:
    left, right = (Indexed(item, letter) for item, letter in zip(node.args[:2], "ij", strict=True))
    if not draft.by_channel or _sizes(draft, [left, right]) is None:
        return None
    return _outer(node, draft, (left, right), "ij", node.meta)


def _transposed(node: Node, draft: Draft) -> Ref | None:
    """``x.T`` of a matrix, in the word that all other rules know."""
    source = node.args[0]
    if len(node.meta.shape) != 2:
        return None
    made = replace(node, op="aten.permute.default", args=(source, (1, 0)), kwargs={})
    return draft.append(made, "transposed")


CONTRACTION_RULES: Mapping[str, Rule] = {
    "einsum": _einsum,
    "tensordot": _tensordot,
    "inner": _inner,
    "bilinear": _bilinear,
    "outer": _outer_product,
    "ger": _outer_product,
    "numpy_T": _transposed,
}
"""Rules by operator."""
CONTRACTIONS = frozenset({"einsum", "tensordot", "inner", "bilinear"})
"""Operators that rules may write as matrix products."""
