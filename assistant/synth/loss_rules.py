"""Losses written out as pointwise operators and reductions, so that each becomes one pass over its inputs.

Formulas are those of the PyTorch documentation. The sum over all elements is one reduction over the whole tensor;
where rows are reduced first (cross-entropy, cosine, triplet) a second small one follows. Class indices are compared
with an ``arange`` along the class dimension (in kernels the column's index), so that no gather is needed: the row is
read anyway. What is the same for a whole row is subtracted behind such a choice, so that it need not be known before.
Cross-entropy of half-precision logits is computed in float32 and rounded once.

Left out: class weights, elementwise weights and probabilities as cross-entropy targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.reduction_rules import Rule, argument, distance
from drk.assistant.synth.row_totals import total
from drk.gym.graph import Node, Ref, Symbol

MAX_CLASSES = 2**18
"""Rows longer than this are read twice anyway, and a gather is cheap beside that."""


def _total(node: Node, draft: Draft, loss: Ref, reduction: int) -> Ref | None:
    """Apply a loss's ``reduction``: 0 none, 1 mean, 2 sum."""
    if reduction == 0:
        return loss
    return total(node, draft, loss, "mean.dim" if reduction == 1 else "sum.dim_IntList")


def _pair(node: Node, draft: Draft) -> tuple[Ref, Ref] | None:
    """Two floating operands of the same shape and dtype."""
    left, right = node.args[:2]
    metas = [draft.metas.get(item.name) for item in (left, right)]
    if None in metas or any(m is None or m.dtype not in FLOATS or m.dtype != node.meta.dtype for m in metas):
        return None
    return (left, right) if draft.metas[left.name].shape == draft.metas[right.name].shape else None


def _elementwise(build: Callable[[Node, Draft, Ref, Ref], Ref], at: int = 2) -> Rule:
    """A loss of two tensors; ``at`` is the position of its ``reduction``."""

    def rule(node: Node, draft: Draft) -> Ref | None:
        pair = _pair(node, draft)
        if pair is None or not draft.metas[pair[0].name].shape:
            return None
        return _total(node, draft, build(node, draft, *pair), argument(node, at, "reduction", 1))

    return rule


def _squared(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    return draft.emit(node, "square", "pow.Tensor_Scalar", draft.emit(node, "difference", "sub.Tensor", x, target), 2)


def _distance(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    return draft.emit(node, "distance", "abs.default", draft.emit(node, "difference", "sub.Tensor", x, target))


def _smooth(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    apart, beta = _distance(node, draft, x, target), float(argument(node, 3, "beta", 1.0))
    if beta == 0.0:
        return apart
    square = draft.emit(node, "square", "mul.Tensor", apart, draft.emit(node, "half", "mul.Tensor", apart, 0.5 / beta))
    linear = draft.emit(node, "linear_part", "sub.Scalar", apart, 0.5 * beta)
    return draft.emit(node, "smooth", "where.self", draft.emit(node, "near", "lt.Scalar", apart, beta), square, linear)


def _huber(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    apart, delta = _distance(node, draft, x, target), float(argument(node, 3, "delta", 1.0))
    square = draft.emit(node, "square", "mul.Tensor", apart, draft.emit(node, "half", "mul.Tensor", apart, 0.5))
    linear = draft.emit(
        node, "linear_part", "mul.Tensor", draft.emit(node, "beyond", "sub.Scalar", apart, delta / 2), delta
    )
    return draft.emit(node, "huber", "where.self", draft.emit(node, "near", "le.Scalar", apart, delta), square, linear)


def _kl(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    """``target (log target - x)``, 0 where the target is; with ``log_target`` ``exp(target) (target - x)``."""
    if node.kwargs.get("log_target") is True:
        apart = draft.emit(node, "apart", "sub.Tensor", target, x)
        return draft.emit(
            node, "divergence", "mul.Tensor", draft.emit(node, "probability", "exp.default", target), apart
        )
    entropy = draft.emit(node, "entropy", "mul.Tensor", target, draft.emit(node, "log_target", "log.default", target))
    empty = draft.emit(node, "empty", "eq.Scalar", target, 0.0)
    entropy = draft.emit(node, "entropy", "masked_fill.Scalar", entropy, empty, 0.0)
    return draft.emit(node, "divergence", "sub.Tensor", entropy, draft.emit(node, "cross", "mul.Tensor", target, x))


def _soft_margin(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    product = draft.emit(node, "agreement", "neg.default", draft.emit(node, "product", "mul.Tensor", x, target))
    return draft.emit(node, "margin_loss", "log1p.default", draft.emit(node, "power", "exp.default", product))


def _hinge_embedding(node: Node, draft: Draft, x: Ref, target: Ref) -> Ref:
    margin = argument(node, 2, "margin", 1.0)
    short = draft.emit(node, "short", "clamp_min.default", draft.emit(node, "left_over", "rsub.Scalar", x, margin), 0.0)
    unlike = draft.emit(
        node, "unlike", "masked_fill.Scalar", short, draft.emit(node, "same", "eq.Scalar", target, 1.0), 0.0
    )
    other = draft.emit(node, "different", "eq.Scalar", target, -1.0)
    return draft.emit(
        node, "hinge", "add.Tensor", unlike, draft.emit(node, "like", "masked_fill.Scalar", x, other, 0.0)
    )


def _binary(node: Node, draft: Draft) -> Ref | None:
    pair = _pair(node, draft)
    if pair is None or argument(node, 2, "weight", None) is not None:
        return None
    x, target = pair
    logs = [draft.emit(node, "log_x", "log.default", x)]
    logs.append(draft.emit(node, "log_rest", "log1p.default", draft.emit(node, "negated", "neg.default", x)))
    first, second = (draft.emit(node, "bounded", "clamp_min.default", item, -100.0) for item in logs)
    rest = draft.emit(node, "rest", "sub.Scalar", target, 1.0)
    left = draft.emit(node, "absent", "mul.Tensor", rest, second)
    loss = draft.emit(node, "entropy", "sub.Tensor", left, draft.emit(node, "present", "mul.Tensor", target, first))
    return _total(node, draft, loss, argument(node, 3, "reduction", 1))


def _binary_with_logits(node: Node, draft: Draft) -> Ref | None:
    pair = _pair(node, draft)
    positive = argument(node, 3, "pos_weight", None)
    if pair is None or argument(node, 2, "weight", None) is not None:
        return None
    x, target = pair
    log_gate = draft.emit(node, "log_gate", "log_sigmoid.default", x)
    if positive is not None:
        extra = draft.emit(node, "extra", "sub.Scalar", positive, 1.0)
        scaled = draft.emit(node, "scaled", "mul.Tensor", extra, target)
        log_gate = draft.emit(
            node, "weighted", "mul.Tensor", draft.emit(node, "weight", "add.Scalar", scaled, 1.0), log_gate
        )
    absent = draft.emit(node, "absent", "mul.Tensor", draft.emit(node, "rest", "rsub.Scalar", target, 1.0), x)
    loss = draft.emit(node, "entropy", "sub.Tensor", absent, log_gate)
    return _total(node, draft, loss, argument(node, 4, "reduction", 1))


# --- Class indices -------------------------------------------------------------------------------------------


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

    Taken where it saves memory: the row's other reader need not store what it computes for the sake of the gather.
    """
    x, dim, index = node.args[:3]
    meta, chosen = draft.metas[x.name], draft.metas[index.name]
    if not isinstance(dim, int) or meta.dtype not in FLOATS or chosen.dtype != "int64" or not meta.shape:
        return None
    axis, rank = dim % len(meta.shape), len(meta.shape)
    one_a_row = chosen.shape == (*meta.shape[:axis], 1, *meta.shape[axis + 1 :])
    if not one_a_row or not 2 <= meta.shape[axis] <= MAX_CLASSES or len(draft.users.get(x.name, ())) < 2:
        return None
    made = _maker(draft, index)
    if made is not None and made.bare_op in _ORDER_KEEPING and isinstance(made.args[0], Ref):
        index = _viewed(node, draft, made.args[0], chosen.shape)
    hit = draft.emit(node, "hit", "eq.Tensor", index, _counted(node, draft, meta.shape, axis))
    return _at_target(node, draft, x, hit, (axis - rank,))


def _picked_mean(node: Node, draft: Draft, loss: Ref, labels: Ref, how: tuple[int, int]) -> Ref | None:
    """Reduce per-row losses; rows whose label is to be ignored count for nothing. ``how``: reduction, ignored label."""
    reduction, ignored = how
    skipped = draft.emit(node, "skipped", "eq.Scalar", labels, ignored)
    kept = draft.emit(node, "kept_loss", "masked_fill.Scalar", loss, skipped, 0.0)
    if reduction == 0:
        return draft.emit(node, "loss", "reshape.default", kept, node.meta.shape)
    if reduction != 1:
        return _total(node, draft, kept, reduction)
    ones = draft.emit(node, "counted", "rsub.Scalar", draft.emit(node, "zero", "mul.Tensor", kept, 0.0), 1.0)
    counted = draft.emit(node, "counted", "masked_fill.Scalar", ones, skipped, 0.0)
    sums = [_total(node, draft, item, 2) for item in (kept, counted)]
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
    reduction, ignored = argument(node, 3, "reduction", 1), argument(node, 4, "ignore_index", -100)
    smoothing = float(argument(node, 5, "label_smoothing", 0.0))
    meta = draft.metas[x.name]
    if argument(node, 2, "weight", None) is not None or meta.dtype not in FLOATS or len(meta.shape) < 2:
        return None
    found = _class_hits(node, draft, x, target)
    if found is None:
        return None
    labels, hit = found
    x = _cast(node, draft, x, "float32")
    dims = (1 - len(meta.shape),)
    centred = draft.emit(node, "centred", "sub.Tensor", x, draft.emit(node, "row_max", "amax.default", x, dims, True))
    power = draft.emit(node, "exponential", "exp.default", centred)
    log_total = draft.emit(
        node, "log_sum", "log.default", draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    )
    loss = draft.emit(node, "row_loss", "sub.Tensor", log_total, _at_target(node, draft, centred, hit, dims))
    if smoothing:
        average = draft.emit(node, "row_mean", "mean.dim", centred, dims, True)
        spread = draft.emit(
            node, "spread", "mul.Tensor", draft.emit(node, "even", "sub.Tensor", log_total, average), smoothing
        )
        loss = draft.emit(
            node, "smoothed", "add.Tensor", draft.emit(node, "sharp", "mul.Tensor", loss, 1.0 - smoothing), spread
        )
    mean = _picked_mean(node, draft, loss, labels, (reduction, ignored))
    return None if mean is None else _cast(node, draft, mean, meta.dtype)


def _cast(node: Node, draft: Draft, x: Ref, dtype: str) -> Ref:
    if draft.metas[x.name].dtype == dtype:
        return x
    return draft.emit(node, "to", "_to_copy.default", x, dtype=Symbol("dtype", dtype))


def _nll(node: Node, draft: Draft) -> Ref | None:
    x, target = node.args[:2]
    meta = draft.metas[x.name]
    if argument(node, 2, "weight", None) is not None or meta.dtype != "float32" or len(meta.shape) < 2:
        return None
    found = _class_hits(node, draft, x, target)
    if found is None:
        return None
    labels, hit = found
    picked = _at_target(node, draft, x, hit, (1 - len(meta.shape),))
    how = (argument(node, 3, "reduction", 1), argument(node, 4, "ignore_index", -100))
    return _picked_mean(node, draft, draft.emit(node, "row_loss", "neg.default", picked), labels, how)


# --- Pairs and triples ---------------------------------------------------------------------------------------


def _margin_ranking(node: Node, draft: Draft) -> Ref | None:
    first, second, target = node.args[:3]
    if len({draft.metas[item.name] for item in (first, second, target)}) != 1 or not draft.metas[first.name].shape:
        return None
    apart = draft.emit(node, "apart", "sub.Tensor", second, first)
    signed = draft.emit(node, "signed", "mul.Tensor", target, apart)
    over = draft.emit(node, "over", "add.Scalar", signed, argument(node, 3, "margin", 0.0))
    return _total(
        node, draft, draft.emit(node, "hinge", "clamp_min.default", over, 0.0), argument(node, 4, "reduction", 1)
    )


def _triplet(node: Node, draft: Draft) -> Ref | None:
    anchor, positive, negative = node.args[:3]
    order, eps = argument(node, 4, "p", 2.0), argument(node, 5, "eps", 1e-6)
    same = len({draft.metas[item.name].shape for item in (anchor, positive, negative)}) == 1
    if argument(node, 6, "swap", False) or not same or len(draft.metas[anchor.name].shape) != 2:
        return None
    near = distance(node, draft, (anchor, positive), order, eps)
    far = distance(node, draft, (anchor, negative), order, eps)
    if near is None or far is None:
        return None
    apart = draft.emit(node, "apart", "sub.Tensor", near, far)
    over = draft.emit(node, "over", "add.Scalar", apart, float(argument(node, 3, "margin", 1.0)))
    return _total(
        node, draft, draft.emit(node, "hinge", "clamp_min.default", over, 0.0), argument(node, 7, "reduction", 1)
    )


LOSS_RULES: Mapping[str, Rule] = {
    "mse_loss": _elementwise(_squared),
    "l1_loss": _elementwise(_distance),
    "smooth_l1_loss": _elementwise(_smooth),
    "huber_loss": _elementwise(_huber),
    "kl_div": _elementwise(_kl),
    "soft_margin_loss": _elementwise(_soft_margin),
    "hinge_embedding_loss": _elementwise(_hinge_embedding, 3),
    "binary_cross_entropy": _binary,
    "binary_cross_entropy_with_logits": _binary_with_logits,
    "cross_entropy_loss": _cross_entropy,
    "nll_loss_nd": _nll,
    "nll_loss": _nll,
    "gather": _gathered,
    "margin_ranking_loss": _margin_ranking,
    "triplet_margin_loss": _triplet,
}
"""Rules by operator."""
