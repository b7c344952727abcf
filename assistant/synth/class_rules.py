"""Losses of class indices, and what else compares an index with a dimension's own numbers.

Class indices are compared with an ``arange`` along the class dimension (in kernels the column's index), so that no
gather is needed: the row is read anyway. What is the same for a whole row is subtracted behind such a choice, so that
it need not be known before. Cross-entropy of half-precision logits is computed in float32 and rounded once. Rules have
the form that :mod:`drk.assistant.synth.decompositions` describes.

Left out: a single row of scores with a label that has no dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.loss_rules import reduced_loss
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref, Symbol

MAX_CLASSES = 2**18
"""Rows longer than this are read twice anyway, and a gather is cheap beside that."""


def _class_hits(node: Node, draft: Draft, x: Ref, target: Ref) -> tuple[Ref, Ref] | None:
    """Labels with the class dimension, and ``label == class`` with the shape of ``x``; None for other targets."""
    shape, labels = draft.metas[x.name].shape, draft.metas[target.name]
    if labels.dtype != "int64" or labels.shape != shape[:1] + shape[2:] or shape[1] < 2:
        return None
    column = _viewed(node, draft, target, (shape[0], 1, *shape[2:]))
    return column, draft.emit(node, "hit", "eq.Tensor", column, _counted(node, draft, shape, 1))


def _viewed(node: Node, draft: Draft, value: Ref, shape: tuple[int, ...]) -> Ref:
    """``value`` in another shape, by way of what it is made from: kernels take arithmetic in, but no views."""
    if draft.metas[value.name].shape == shape:
        return value
    made = _maker(draft, value)
    if made is not None and made.bare_op in _ORDER_KEEPING and isinstance(made.args[0], Ref):
        return _viewed(node, draft, made.args[0], shape)
    plain = made is not None and made.bare_op != "contiguous" and is_pointwise(made, draft.metas)
    if made is not None and plain and made.meta.dtype not in FLOATS:
        tensors = [name for name in made.inputs() if draft.metas[name].shape]
        if all(draft.metas[name].shape == made.meta.shape for name in tensors):
            args = tuple(
                _viewed(node, draft, item, shape) if isinstance(item, Ref) and item.name in tensors else item
                for item in made.args
            )
            return draft.append(replace(made, args=args, metas=(contiguous_meta(shape, made.meta.dtype),)), made.name)
    return draft.emit(node, "labels", "reshape.default", value, shape)


_ORDER_KEEPING = frozenset({"view", "reshape", "unsqueeze", "squeeze", "flatten"})


def _maker(draft: Draft, value: Ref) -> Node | None:
    """The node that makes ``value``, or None for inputs."""
    return next((node for node in reversed(draft.nodes) if node.name == value.name), None)


def _counted(node: Node, draft: Draft, shape: tuple[int, ...], axis: int) -> Ref:
    """0, 1, 2, ... along ``axis`` of ``shape``, to be broadcast along the others."""
    count, rest = shape[axis], (1,) * (len(shape) - axis - 1)
    options: dict[str, Any] = {"dtype": Symbol("dtype", "int32"), "device": Symbol("device", "cuda")}
    meta = contiguous_meta((count,), "int32")
    made = replace(node, op="aten.arange.default", args=(count,), kwargs=options, metas=(meta,))
    classes = draft.append(made, "classes")
    return draft.emit(node, "classes_shaped", "reshape.default", classes, (count, *rest)) if rest else classes


def _gathered(node: Node, draft: Draft) -> Ref | None:
    """``x.gather(dim, index)`` of one element a row, where others read ``x`` too: a masked sum along the row.

    Taken where it saves memory: the row's other reader need not store what it computes for the sake of the gather, nor
    need a softmax whose other probabilities nobody reads.
    """
    x, dim, index = node.args[:3]
    meta, chosen = draft.metas[x.name], draft.metas[index.name]
    if not isinstance(dim, int) or meta.dtype not in FLOATS or chosen.dtype != "int64" or not meta.shape:
        return None
    axis, rank = dim % len(meta.shape), len(meta.shape)
    one_a_row = chosen.shape == (*meta.shape[:axis], 1, *meta.shape[axis + 1 :])
    if not one_a_row or not 2 <= meta.shape[axis] <= MAX_CLASSES:
        return None
    if len(draft.users.get(x.name, ())) < 2 and not _of_whole_rows(draft, x, (axis - rank,)):
        return None
    made = _maker(draft, index)
    if made is not None and made.bare_op in _ORDER_KEEPING and isinstance(made.args[0], Ref):
        index = _viewed(node, draft, made.args[0], chosen.shape)
    hit = draft.emit(node, "hit", "eq.Tensor", index, _counted(node, draft, meta.shape, axis))
    return _at_target(node, draft, x, hit, (axis - rank,))


def _of_whole_rows(draft: Draft, value: Ref, dims: tuple[int, ...]) -> bool:
    """Whether ``value`` is computed from its row and what that was reduced to, as a softmax is."""
    made = _maker(draft, value)
    if made is None or not is_pointwise(made, draft.metas):
        return False
    row = _row_shape(made.meta.shape, dims)
    return any(draft.metas[name].shape == row and _maker(draft, Ref(name)) is not None for name in made.inputs())


def _picked_mean(
    node: Node, draft: Draft, loss: Ref, labels: Ref, how: tuple[int, int], weights: Ref | None = None
) -> Ref | None:
    """Reduce per-row losses; rows whose label is to be ignored count for nothing. ``how``: reduction, ignored label.

    A mean is over the rows' ``weights`` where there are some; the losses have them already.
    """
    reduction, ignored = how
    skipped = draft.emit(node, "skipped", "eq.Scalar", labels, ignored)
    kept = draft.emit(node, "kept_loss", "masked_fill.Scalar", loss, skipped, 0.0)
    if reduction == 0:
        return draft.emit(node, "loss", "reshape.default", kept, node.meta.shape)
    if reduction != 1:
        return reduced_loss(node, draft, kept, reduction)
    if weights is None:
        zero = draft.emit(node, "zero", "mul.Tensor", kept, 0.0)
        weights = draft.emit(node, "counted", "rsub.Scalar", zero, 1.0)
    counted = draft.emit(node, "counted", "masked_fill.Scalar", weights, skipped, 0.0)
    sums = [reduced_loss(node, draft, item, 2) for item in (kept, counted)]
    if None in sums:
        return None
    return draft.emit(node, "average", "div.Tensor", *sums)


def _at_target(node: Node, draft: Draft, values: Ref, hit: Ref, dims: tuple[int, ...]) -> Ref:
    """The value of each row's own class; ``dims``, the class dimension, stay as size 1."""
    shape, made = draft.metas[values.name].shape, _maker(draft, values)
    if made is not None and made.op == "aten.sub.Tensor" and len(made.args) == 2 and not made.kwargs:
        left, right = (draft.metas[item.name] if isinstance(item, Ref) else None for item in made.args)
        dtypes = {made.meta.dtype, left and left.dtype, right and right.dtype}
        if left and right and left.shape == shape and right.shape == _row_shape(shape, dims) and len(dtypes) == 1:
            return draft.emit(
                node, "picked", "sub.Tensor", _at_target(node, draft, made.args[0], hit, dims), made.args[1]
            )
    miss = draft.emit(node, "miss", "logical_not.default", hit)
    chosen = draft.emit(node, "chosen", "masked_fill.Scalar", values, miss, 0.0)
    return draft.emit(node, "picked", "sum.dim_IntList", chosen, dims, True)


def _row_shape(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if axis - len(shape) in dims else size for axis, size in enumerate(shape))


def _cross_entropy(node: Node, draft: Draft) -> Ref | None:
    x, target = node.args[:2]
    meta = draft.metas[x.name]
    if meta.dtype not in FLOATS or len(meta.shape) < 2 or meta.shape[1] < 2:
        return None
    weight = _of_classes(node, draft, argument(node, 2, "weight", None), meta.shape)
    dims = (1 - len(meta.shape),)
    if draft.metas[target.name].shape == meta.shape and draft.metas[target.name].dtype in FLOATS:
        centred, log_total = _log_parts(node, draft, _cast(node, draft, x, "float32"), dims)
        mean = _expected(node, draft, (centred, log_total), _cast(node, draft, target, "float32"), weight)
        return None if mean is None else _cast(node, draft, mean, meta.dtype)
    found = _class_hits(node, draft, x, target)
    if found is None:
        return None
    labels, hit = found
    centred, log_total = _log_parts(node, draft, _cast(node, draft, x, "float32"), dims)
    loss = draft.emit(node, "row_loss", "sub.Tensor", log_total, _at_target(node, draft, centred, hit, dims))
    own = None if weight is None else _weight_of_class(node, draft, weight, hit, dims)
    loss = loss if own is None else draft.emit(node, "weighed_loss", "mul.Tensor", loss, own)
    smoothing = float(argument(node, 5, "label_smoothing", 0.0))
    if smoothing:
        loss = _smoothed(node, draft, loss, (centred, log_total), weight, smoothing)
    how = (argument(node, 3, "reduction", 1), argument(node, 4, "ignore_index", -100))
    mean = _picked_mean(node, draft, loss, labels, how, own)
    return None if mean is None else _cast(node, draft, mean, meta.dtype)


def _log_parts(node: Node, draft: Draft, x: Ref, dims: tuple[int, ...]) -> tuple[Ref, Ref]:
    """What the logarithm of a softmax is the difference of: scores less the largest, the logarithm of their sum."""
    centred = draft.emit(node, "centred", "sub.Tensor", x, draft.emit(node, "row_max", "amax.default", x, dims, True))
    power = draft.emit(node, "exponential", "exp.default", centred)
    total = draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    return centred, draft.emit(node, "log_sum", "log.default", total)


def _smoothed(node: Node, draft: Draft, loss: Ref, parts: tuple[Ref, Ref], weight: Ref | None, smoothing: float) -> Ref:
    """``loss`` with a share of the mean over all classes."""
    centred, log_total = parts
    dims = (1 - len(draft.metas[centred.name].shape),)
    if weight is None:
        average = draft.emit(node, "row_mean", "mean.dim", centred, dims, True)
        even = draft.emit(node, "even", "sub.Tensor", log_total, average)
    else:
        apart = draft.emit(node, "class_loss", "sub.Tensor", log_total, centred)
        weighed = draft.emit(node, "weighed", "mul.Tensor", apart, weight)
        even = draft.emit(node, "even", "mean.dim", weighed, dims, True)
    spread = draft.emit(node, "spread", "mul.Tensor", even, smoothing)
    return draft.emit(
        node, "smoothed", "add.Tensor", draft.emit(node, "sharp", "mul.Tensor", loss, 1.0 - smoothing), spread
    )


def _expected(node: Node, draft: Draft, parts: tuple[Ref, Ref], target: Ref, weight: Ref | None) -> Ref | None:
    """Cross-entropy with probabilities as targets: the mean is over rows, whatever the weights."""
    centred, log_total = parts
    rank = len(draft.metas[centred.name].shape)
    smoothing = float(argument(node, 5, "label_smoothing", 0.0))
    loss = draft.emit(node, "class_loss", "sub.Tensor", log_total, centred)
    if weight is not None:
        loss = draft.emit(node, "weighed", "mul.Tensor", loss, weight)
    dims = (1 - rank,)
    expected = draft.emit(node, "expected", "mul.Tensor", loss, target)
    total = draft.emit(node, "row_loss", "sum.dim_IntList", expected, dims, True)
    if smoothing:
        even = draft.emit(node, "even", "mean.dim", loss, dims, True)
        sharp = draft.emit(node, "sharp", "mul.Tensor", total, 1.0 - smoothing)
        total = draft.emit(
            node, "smoothed", "add.Tensor", sharp, draft.emit(node, "spread", "mul.Tensor", even, smoothing)
        )
    reduction = argument(node, 3, "reduction", 1)
    if reduction == 0:
        return draft.emit(node, "loss", "reshape.default", total, node.meta.shape)
    return reduced_loss(node, draft, total, reduction)


def _of_classes(node: Node, draft: Draft, weight: Ref | None, shape: tuple[int, ...]) -> Ref | None:
    """Weights of the classes, to be broadcast over a tensor of ``shape``; in float32."""
    if weight is None:
        return None
    weight = _cast(node, draft, weight, "float32")
    rest = (1,) * (len(shape) - 2)
    return draft.emit(node, "class_weight", "reshape.default", weight, (shape[1], *rest)) if rest else weight


def _weight_of_class(node: Node, draft: Draft, weight: Ref, hit: Ref, dims: tuple[int, ...]) -> Ref:
    """The weight of each row's own class; the class dimension stays as size 1."""
    miss = draft.emit(node, "miss", "logical_not.default", hit)
    chosen = draft.emit(node, "chosen_weight", "masked_fill.Scalar", weight, miss, 0.0)
    return draft.emit(node, "own_weight", "sum.dim_IntList", chosen, dims, True)


def _cast(node: Node, draft: Draft, x: Ref, dtype: str) -> Ref:
    if draft.metas[x.name].dtype == dtype:
        return x
    return draft.emit(node, "to", "_to_copy.default", x, dtype=Symbol("dtype", dtype))


def _nll(node: Node, draft: Draft) -> Ref | None:
    x, target = node.args[:2]
    meta = draft.metas[x.name]
    if meta.dtype != "float32" or len(meta.shape) < 2:
        return None
    found = _class_hits(node, draft, x, target)
    if found is None:
        return None
    labels, hit = found
    dims = (1 - len(meta.shape),)
    loss = draft.emit(node, "row_loss", "neg.default", _at_target(node, draft, x, hit, dims))
    weight = _of_classes(node, draft, argument(node, 2, "weight", None), meta.shape)
    own = None if weight is None else _weight_of_class(node, draft, weight, hit, dims)
    loss = loss if own is None else draft.emit(node, "weighed_loss", "mul.Tensor", loss, own)
    how = (argument(node, 3, "reduction", 1), argument(node, 4, "ignore_index", -100))
    return _picked_mean(node, draft, loss, labels, how, own)


def _multi_margin(node: Node, draft: Draft) -> Ref | None:
    """The mean over the other classes of how far each comes within the margin of the own one, or of its square."""
    x, target = node.args[:2]
    meta, order = draft.metas[x.name], argument(node, 2, "p", 1)
    if meta.dtype != "float32" or len(meta.shape) != 2 or order not in (1, 2):
        return None
    found = _class_hits(node, draft, x, target)
    if found is None:
        return None
    _, hit = found
    apart = draft.emit(node, "apart", "sub.Tensor", x, _at_target(node, draft, x, hit, (-1,)))
    over = draft.emit(node, "over", "add.Scalar", apart, float(argument(node, 3, "margin", 1.0)))
    hinge = draft.emit(node, "hinge", "clamp_min.default", over, 0.0)
    hinge = hinge if order == 1 else draft.emit(node, "square", "pow.Tensor_Scalar", hinge, 2)
    weight = _of_classes(node, draft, argument(node, 4, "weight", None), meta.shape)
    if weight is not None:
        hinge = draft.emit(node, "weighed", "mul.Tensor", hinge, _weight_of_class(node, draft, weight, hit, (-1,)))
    others = draft.emit(node, "others", "masked_fill.Scalar", hinge, hit, 0.0)
    loss = draft.emit(node, "row_loss", "mean.dim", others, (-1,), True)
    reduction = argument(node, 5, "reduction", 1)
    if reduction == 0:
        return draft.emit(node, "loss", "reshape.default", loss, node.meta.shape)
    return reduced_loss(node, draft, loss, reduction)


def _one_hot(node: Node, draft: Draft) -> Ref | None:
    x, count = node.args[0], argument(node, 1, "num_classes", -1)
    meta = draft.metas[x.name]
    if meta.dtype != "int64" or type(count) is not int or count < 2 or not meta.shape:
        return None
    column = _viewed(node, draft, x, (*meta.shape, 1))
    hit = draft.emit(node, "hit", "eq.Tensor", column, _counted(node, draft, (*meta.shape, count), len(meta.shape)))
    return _cast(node, draft, hit, "int64")


def _scattered(node: Node, draft: Draft) -> Ref | None:
    """``x.scatter(dim, index, value)`` of one place a row: the value where the index is the place's number, else ``x``.

    What was zeros need not be read; so one-hot codes and masks are only written.
    """
    if len(node.args) != 4 or node.kwargs or type(node.args[1]) is not int or not isinstance(node.args[2], Ref):
        return None
    x, dim, index, value = node.args
    meta, chosen = draft.metas[x.name], draft.metas[index.name]
    axis = dim % max(1, len(meta.shape))
    one_a_row = chosen.shape == (*meta.shape[:axis], 1, *meta.shape[axis + 1 :])
    if not meta.shape or meta.shape[axis] < 2 or not one_a_row or chosen.dtype != "int64" or meta.dtype not in FLOATS:
        return None
    if isinstance(value, Ref) and draft.metas[value.name] != replace(draft.metas[value.name], shape=chosen.shape):
        return None
    hit = draft.emit(node, "hit", "eq.Tensor", index, _counted(node, draft, meta.shape, axis))
    base = _maker(draft, x)
    zeros = base is not None and base.bare_op in {"zeros", "zeros_like", "new_zeros"}
    if isinstance(value, Ref):
        if draft.metas[value.name].dtype != meta.dtype:
            return None
        miss = draft.emit(node, "miss", "logical_not.default", hit)
        return draft.emit(node, "scattered", "where.self", miss, 0.0 if zeros else x, value)
    if not zeros or not math.isfinite(value):
        return draft.emit(node, "scattered", "masked_fill.Scalar", x, hit, value)
    code = _cast(node, draft, hit, meta.dtype)
    return code if value == 1 else draft.emit(node, "scattered", "mul.Tensor", code, value)


CLASS_RULES: Mapping[str, Rule] = {
    "scatter": _scattered,
    "cross_entropy_loss": _cross_entropy,
    "nll_loss_nd": _nll,
    "nll_loss": _nll,
    "multi_margin_loss": _multi_margin,
    "one_hot": _one_hot,
    "gather": _gathered,
}
"""Rules by operator."""
