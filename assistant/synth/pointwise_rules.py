"""Elementwise operators under other names, and what is elementwise once it is written out.

PyTorch has several names for one operator (``subtract``, ``true_divide``, ``special_expit``, ``__and__``), and a
captured graph keeps the one that was called. Rules have the form that :mod:`drk.assistant.synth.decompositions`
describes: they put the usual name in its place, so that everything that looks for it finds it.

Left out: results that a cast makes (``float_power``, whose type is float64).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.reduction_rules import Rule
from drk.gym.graph import Node, Ref

_NAMES: Mapping[str, str] = {
    "subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div", "negative": "neg", "absolute": "abs",
    "clip": "clamp", "fix": "trunc", "sgn": "sign", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "not_equal": "ne", "special_expit": "sigmoid", "special_exp2": "exp2",
    "special_expm1": "expm1", "special_log1p": "log1p", "special_erf": "erf", "special_erfc": "erfc",
    "special_erfinv": "erfinv", "special_logit": "logit", "special_round": "round", "special_sinc": "sinc",
    "special_xlogy": "xlogy", "arctan2": "atan2", "arctan": "atan", "arcsin": "asin", "arccos": "acos",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "__and__": "bitwise_and", "__or__": "bitwise_or",
    "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift", "__rshift__": "bitwise_right_shift",
}  # fmt: skip
"""Other names of operators and the usual ones."""


def _usual_name(node: Node, draft: Draft) -> Ref | None:
    overload = node.op.split(".")[-1]
    usual = replace(node, op=f"aten.{_NAMES[node.bare_op]}.{overload}")
    return draft.append(usual, _NAMES[node.bare_op]) if is_pointwise(usual, draft.metas) else None


def _positive(node: Node, _: Draft) -> Ref | None:
    return node.args[0] if isinstance(node.args[0], Ref) else None


POINTWISE_RULES: Mapping[str, Rule] = {**dict.fromkeys(_NAMES, _usual_name), "positive": _positive}
"""Rules by operator."""
