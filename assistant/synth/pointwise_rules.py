"""Elementwise operators under other names, and what is elementwise once it is written out.

PyTorch has several names for one operator (``subtract``, ``true_divide``, ``special_expit``, ``__and__``), and a
captured graph keeps the one that was called. Rules have the form that :mod:`drk.assistant.synth.decompositions`
describes: they put the usual name in its place, so that everything that looks for it finds it.

Left out: results that a cast makes (``float_power``, whose type is float64).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref, Symbol

_NAMES: Mapping[str, str] = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg", "absolute": "abs",
    "clip": "clamp", "fix": "trunc", "sgn": "sign", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "special_expit": "sigmoid", "special_exp2": "exp2",
    "special_expm1": "expm1", "special_log1p": "log1p", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_logit": "logit", "special_round": "round", "special_sinc": "sinc",
    "special_xlogy": "xlogy", "special_gammaln": "lgamma", "special_psi": "digamma", "special_digamma": "digamma",
    "arctan2": "atan2", "arctan": "atan", "arcsin": "asin", "arccos": "acos",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "__and__": "bitwise_and", "__or__": "bitwise_or",
    "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
}  # fmt: skip
"""Other names of operators and the usual ones."""


def _usual_name(node: Node, draft: Draft) -> Ref | None:
    overload = node.op.split(".")[-1]
    usual = replace(node, op=f"aten.{_NAMES[node.bare_op]}.{overload}")
    return draft.append(usual, _NAMES[node.bare_op]) if is_pointwise(usual, draft.metas) else None


def _cast(node: Node, draft: Draft) -> Ref | None:
    """``x.type_as(y)`` is a cast, whatever else ``y`` is."""
    cast = replace(
        node, op="aten._to_copy.default", args=node.args[:1], kwargs={"dtype": Symbol("dtype", node.meta.dtype)}
    )
    return draft.append(cast, "cast") if is_pointwise(cast, draft.metas) else None


def _is_close(node: Node, draft: Draft) -> Ref | None:
    """Equal, or finitely far apart and no farther than ``atol + rtol * |other|``; NaN is close to nothing."""
    x, other = node.args[:2]
    metas = [draft.metas.get(item.name) for item in (x, other) if isinstance(item, Ref)]
    if len(metas) != 2 or any(meta is None or meta.dtype != "float32" for meta in metas):
        return None
    rtol, atol, nan = (
        argument(node, i, key, d) for i, key, d in ((2, "rtol", 1e-5), (3, "atol", 1e-8), (4, "equal_nan", False))
    )
    if nan is not False:
        return None
    equal = draft.emit(node, "equal", "eq.Tensor", x, other)
    apart = draft.emit(node, "apart", "abs.default", draft.emit(node, "difference", "sub.Tensor", x, other))
    size = draft.emit(node, "size", "abs.default", other)
    allowed = draft.emit(node, "allowed", "add.Scalar", draft.emit(node, "share", "mul.Scalar", size, rtol), atol)
    near = draft.emit(node, "near", "le.Tensor", apart, allowed)
    finite = draft.emit(node, "finite", "lt.Scalar", apart, math.inf)
    return draft.emit(
        node, "close", "bitwise_or.Tensor", equal, draft.emit(node, "both", "bitwise_and.Tensor", near, finite)
    )


def _difference(node: Node, draft: Draft) -> Ref | None:
    """Neighbours along a dimension, less one another."""
    x, meta = node.args[0], draft.metas.get(node.args[0].name)
    times, dim = argument(node, 1, "n", 1), argument(node, 2, "dim", -1)
    plain = times == 1 and not any(node.args[3:]) and not {"prepend", "append"} & set(node.kwargs)
    if meta is None or not plain or meta.dtype not in FLOATS:
        return None
    dim %= len(meta.shape)
    part = replace(meta, shape=node.meta.shape)
    ends = ((1, 2**63 - 1), (0, -1))
    after, before = (
        draft.append(
            replace(node, op="aten.slice.Tensor", args=(x, dim, *pair), kwargs={}, metas=(part,)), "neighbours"
        )
        for pair in ends
    )
    made = replace(node, op="aten.sub.Tensor", args=(after, before), kwargs={})
    return draft.append(made, "difference")


def _positive(node: Node, _: Draft) -> Ref | None:
    return node.args[0] if isinstance(node.args[0], Ref) else None


POINTWISE_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_NAMES, _usual_name),
    "positive": _positive,
    "type_as": _cast,
    "isclose": _is_close,
    "diff": _difference,
}
"""Rules by operator."""
