"""Losses written out as pointwise operators and reductions, so that each becomes one pass over its inputs.

Formulas are those of the PyTorch documentation. The sum over all elements is one reduction over the whole tensor;
where rows are reduced first (cosine, triplet) a second small one follows. Losses of class indices are in
:mod:`drk.assistant.synth.class_rules`.

Left out: pairs that broadcast, and losses whose checks depend on values (Gaussian likelihoods), which are not captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule, argument, cosine, distance
from drk.assistant.synth.row_totals import total
from drk.gym.graph import Node, Ref


def reduced_loss(node: Node, draft: Draft, loss: Ref, reduction: int) -> Ref | None:
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
        return reduced_loss(node, draft, build(node, draft, *pair), argument(node, at, "reduction", 1))

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


def _weighed(node: Node, draft: Draft, loss: Ref) -> Ref | None:
    """``loss`` times the weights of elements, if there are some; None where they are of another type or larger."""
    weight = argument(node, 2, "weight", None)
    if weight is None:
        return loss
    result = draft.emit(node, "weighed", "mul.Tensor", loss, weight)
    same = draft.metas[weight.name].dtype == draft.metas[loss.name].dtype
    return result if same and draft.metas[result.name].shape == draft.metas[loss.name].shape else None


def _binary(node: Node, draft: Draft) -> Ref | None:
    pair = _pair(node, draft)
    if pair is None:
        return None
    x, target = pair
    logs = [draft.emit(node, "log_x", "log.default", x)]
    logs.append(draft.emit(node, "log_rest", "log1p.default", draft.emit(node, "negated", "neg.default", x)))
    first, second = (draft.emit(node, "bounded", "clamp_min.default", item, -100.0) for item in logs)
    rest = draft.emit(node, "rest", "sub.Scalar", target, 1.0)
    left = draft.emit(node, "absent", "mul.Tensor", rest, second)
    loss = draft.emit(node, "entropy", "sub.Tensor", left, draft.emit(node, "present", "mul.Tensor", target, first))
    weighed = _weighed(node, draft, loss)
    return None if weighed is None else reduced_loss(node, draft, weighed, argument(node, 3, "reduction", 1))


def _binary_with_logits(node: Node, draft: Draft) -> Ref | None:
    pair = _pair(node, draft)
    positive = argument(node, 3, "pos_weight", None)
    if pair is None:
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
    weighed = _weighed(node, draft, draft.emit(node, "entropy", "sub.Tensor", absent, log_gate))
    return None if weighed is None else reduced_loss(node, draft, weighed, argument(node, 4, "reduction", 1))


def _poisson(node: Node, draft: Draft) -> Ref | None:
    pair = _pair(node, draft)
    if pair is None or not draft.metas[pair[0].name].shape:
        return None
    x, target = pair
    if argument(node, 2, "log_input", True):
        rate, log_rate = draft.emit(node, "rate", "exp.default", x), x
    else:
        shifted = draft.emit(node, "bounded", "add.Scalar", x, float(argument(node, 4, "eps", 1e-8)))
        rate, log_rate = x, draft.emit(node, "log_rate", "log.default", shifted)
    loss = draft.emit(
        node, "likelihood", "sub.Tensor", rate, draft.emit(node, "expected", "mul.Tensor", target, log_rate)
    )
    if argument(node, 3, "full", False):
        logs = draft.emit(node, "log_target", "log.default", target)
        entropy = draft.emit(
            node, "surplus", "sub.Tensor", draft.emit(node, "entropy", "mul.Tensor", target, logs), target
        )
        half = draft.emit(node, "half_log", "mul.Tensor", logs, 0.5)
        root = draft.emit(node, "root", "add.Scalar", half, 0.5 * math.log(2 * math.pi))
        stirling = draft.emit(node, "stirling", "add.Tensor", entropy, root)
        few = draft.emit(node, "few", "le.Scalar", target, 1.0)
        kept = draft.emit(node, "factorial", "masked_fill.Scalar", stirling, few, 0.0)
        loss = draft.emit(node, "full_loss", "add.Tensor", loss, kept)
    return reduced_loss(node, draft, loss, argument(node, 5, "reduction", 1))


# --- Pairs and triples ---------------------------------------------------------------------------------------


def _margin_ranking(node: Node, draft: Draft) -> Ref | None:
    first, second, target = node.args[:3]
    if len({draft.metas[item.name] for item in (first, second, target)}) != 1 or not draft.metas[first.name].shape:
        return None
    apart = draft.emit(node, "apart", "sub.Tensor", second, first)
    signed = draft.emit(node, "signed", "mul.Tensor", target, apart)
    over = draft.emit(node, "over", "add.Scalar", signed, argument(node, 3, "margin", 0.0))
    return reduced_loss(
        node, draft, draft.emit(node, "hinge", "clamp_min.default", over, 0.0), argument(node, 4, "reduction", 1)
    )


def _triplet(node: Node, draft: Draft) -> Ref | None:
    anchor, positive, negative = node.args[:3]
    order, eps = argument(node, 4, "p", 2.0), argument(node, 5, "eps", 1e-6)
    same = len({draft.metas[item.name].shape for item in (anchor, positive, negative)}) == 1
    if not same or len(draft.metas[anchor.name].shape) != 2:
        return None
    near = distance(node, draft, (anchor, positive), order, eps)
    far = distance(node, draft, (anchor, negative), order, eps)
    if near is None or far is None:
        return None
    if argument(node, 6, "swap", False):
        other = distance(node, draft, (positive, negative), order, eps)
        assert other is not None  # of the shape of those before
        far = draft.emit(node, "nearer", "minimum.default", far, other)
    apart = draft.emit(node, "apart", "sub.Tensor", near, far)
    over = draft.emit(node, "over", "add.Scalar", apart, float(argument(node, 3, "margin", 1.0)))
    return reduced_loss(
        node, draft, draft.emit(node, "hinge", "clamp_min.default", over, 0.0), argument(node, 7, "reduction", 1)
    )


def _cosine_embedding(node: Node, draft: Draft) -> Ref | None:
    first, second, target = node.args[:3]
    metas = [draft.metas[item.name] for item in (first, second, target)]
    rows = metas[0].shape[:-1]
    if metas[0].shape != metas[1].shape or len(rows) != 1 or metas[2].shape != rows:
        return None
    if {meta.dtype for meta in metas[:2]} != {"float32"} or metas[2].dtype not in {"float32", "int64"}:
        return None
    similarity = cosine(node, draft, first, second)
    if similarity is None:
        return None
    unlike = draft.emit(node, "distance", "rsub.Scalar", similarity, 1.0)
    over = draft.emit(node, "over", "sub.Scalar", similarity, float(argument(node, 3, "margin", 0.0)))
    like = draft.emit(node, "hinge", "clamp_min.default", over, 0.0)
    parts = []
    for loss, sign in ((unlike, 1), (like, -1)):
        other = draft.emit(node, "other", "ne.Scalar", target, sign)
        parts.append(draft.emit(node, "part", "masked_fill.Scalar", loss, other, 0.0))
    return reduced_loss(
        node, draft, draft.emit(node, "row_loss", "add.Tensor", *parts), argument(node, 4, "reduction", 1)
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
    "margin_ranking_loss": _margin_ranking,
    "triplet_margin_loss": _triplet,
    "cosine_embedding_loss": _cosine_embedding,
    "poisson_nll_loss": _poisson,
}
"""Rules by operator."""
