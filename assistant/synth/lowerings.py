"""The Triton text of each ATen pointwise operator, by name.

A lowering takes the node and a function that gives an argument's source, and returns an expression. What needs more
than a line is a device function (:mod:`drk.assistant.synth.device_math` and what it lists).
Which operators of which types are lowered at all says :mod:`drk.assistant.synth.expression`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drk.gym.graph import Node, Ref

FLOATS = frozenset({"float32", "float16", "bfloat16"})
LARGEST = {"float32": 3.4028234663852886e38, "float16": 65504.0, "bfloat16": 3.3895313892515355e38}
"""The largest finite number of each type."""
_POWERS = frozenset({1, 2, 3, 4, 0.5, -0.5, -1})

Text = Callable[[Any], str]
"""Turns an argument (Ref or scalar) into an expression of the operator's compute type."""


def _unary(template: str) -> Callable[[Node, Text], str]:
    return lambda node, text: template.format(text(node.args[0]))


def _binary(symbol: str) -> Callable[[Node, Text], str]:
    return lambda node, text: f"{text(node.args[0])} {symbol} {text(node.args[1])}"


def _argument(node: Node, index: int, name: str, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def _scaled(node: Node, text: Text) -> str:
    alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
    other = text(node.args[1])
    return other if alpha == 1 else f"{other} * {text(alpha)}"


def _add(node: Node, text: Text) -> str:
    return f"{text(node.args[0])} + {_scaled(node, text)}"


def _sub(node: Node, text: Text) -> str:
    return f"{text(node.args[0])} - {_scaled(node, text)}"


def _rsub(node: Node, text: Text) -> str:
    return f"{_scaled(node, text)} - {text(node.args[0])}"


def _div(node: Node, text: Text) -> str:
    top, bottom = text(node.args[0]), text(node.args[1])
    rounding = node.kwargs.get("rounding_mode")
    if rounding is not None:
        return f"floor_divided({top}, {bottom})" if rounding == "floor" else f"truncated(tl.div_rn({top}, {bottom}))"
    if isinstance(node.args[1], int | float) and math.frexp(node.args[1])[0] == 0.5:
        return f"{top} * {text(1.0 / node.args[1])}"
    return f"tl.div_rn({top}, {bottom})"


def _pow(node: Node, text: Text) -> str:
    base, exponent = text(node.args[0]), node.args[1]
    if general_power(node):
        return f"power({base}, {text(exponent)})"
    simple: dict[float, str] = {
        1: base,
        2: f"{base} * {base}",
        3: f"{base} * {base} * {base}",
        4: f"({base} * {base}) * ({base} * {base})",
        0.5: f"tl.sqrt_rn({base})",
        -0.5: f"tl.rsqrt({base})",
        -1: f"tl.div_rn(1.0, {base})",
    }
    return simple[exponent]


def general_power(node: Node) -> bool:
    """Whether ``node`` is a power that is no product, root or quotient: its exponent is a tensor or any number."""
    return node.bare_op == "pow" and (isinstance(node.args[1], Ref) or node.args[1] not in _POWERS)


def _clamp(node: Node, text: Text) -> str:
    low = _argument(node, 1, "min", None)
    high = _argument(node, 2, "max", None)
    result = text(node.args[0])
    for name, bound in (("min", low), ("max", high)):
        if isinstance(bound, Ref):  # a bound that is NaN makes the result NaN
            side = "maximum" if name == "min" else "minimum"
            result = f"tl.{side}({result}, {text(bound)}, propagate_nan=tl.PropagateNan.ALL)"
        elif bound is not None:
            result = f"clamp_{name}({result}, {text(bound)})"
    return result


def _clamp_max(node: Node, text: Text) -> str:
    return _clamp(replace(node, args=(node.args[0], None, node.args[1])), text)


def _gelu(node: Node, text: Text) -> str:
    name = "gelu_tanh" if _argument(node, 1, "approximate", "none") == "tanh" else "gelu"
    return f"{name}({text(node.args[0])})"


def _elu(node: Node, text: Text) -> str:
    scalars = [_argument(node, i, name, 1.0) for i, name in ((1, "alpha"), (2, "scale"), (3, "input_scale"))]
    return f"elu({text(node.args[0])}, {', '.join(text(float(item)) for item in scalars)})"


def _with_scalars(name: str, *defaults: tuple[str, float]) -> Callable[[Node, Text], str]:
    def build(node: Node, text: Text) -> str:
        values = [_argument(node, index + 1, key, value) for index, (key, value) in enumerate(defaults)]
        return f"{name}({', '.join([text(node.args[0]), *(text(float(value)) for value in values)])})"

    return build


def _celu(node: Node, text: Text) -> str:
    alpha = float(_argument(node, 1, "alpha", 1.0))
    return f"elu({text(node.args[0])}, {text(alpha)}, 1.0, {text(1.0 / alpha)})"


def _rrelu(node: Node, text: Text) -> str:
    low, high = (
        float(_argument(node, i, name, value)) for i, name, value in ((1, "lower", 1 / 8), (2, "upper", 1 / 3))
    )
    return f"leaky_relu({text(node.args[0])}, {text((low + high) / 2)})"


def _round(node: Node, text: Text) -> str:
    scale = 10.0 ** int(_argument(node, 1, "decimals", 0))
    x = text(node.args[0])
    return f"rounded({x})" if scale == 1 else f"tl.div_rn(rounded({x} * {text(scale)}), {text(scale)})"


def _logit(node: Node, text: Text) -> str:
    eps, x = _argument(node, 1, "eps", None), text(node.args[0])
    return f"logit({x})" if eps is None else f"logit(hardtanh({x}, {text(float(eps))}, {text(1.0 - eps)}))"


def _nan_to_num(node: Node, text: Text) -> str:
    largest = LARGEST[node.meta.dtype]
    given = [_argument(node, i, name, None) for i, name in ((1, "nan"), (2, "posinf"), (3, "neginf"))]
    values = [
        own if value is None else float(value) for value, own in zip(given, (0.0, largest, -largest), strict=True)
    ]
    return f"replaced({text(node.args[0])}, {', '.join(text(value) for value in values)})"


def _two(name: str) -> Callable[[Node, Text], str]:
    return lambda node, text: f"{name}({text(node.args[0])}, {text(node.args[1])})"


def _add_scaled(combined: str) -> Callable[[Node, Text], str]:
    """Write addcmul and addcdiv: ``combined`` joins the second and third operand."""

    def build(node: Node, text: Text) -> str:
        value = node.kwargs.get("value", 1)
        term = combined.format(text(node.args[1]), text(node.args[2]))
        return f"{text(node.args[0])} + {term if value == 1 else f'{text(value)} * {term}'}"

    return build


def _mod(kind: str) -> Callable[[Node, Text], str]:
    def build(node: Node, text: Text) -> str:
        names = {"mod": ("floor_mod", "whole_mod"), "divided": ("floor_divided", "whole_divided")}[kind]
        return _two(names[0 if node.meta.dtype in FLOATS else 1])(node, text)

    return build


def _where(node: Node, text: Text) -> str:
    return f"tl.where({text(node.args[0])}, {text(node.args[1])}, {text(node.args[2])})"


def _masked_fill(node: Node, text: Text) -> str:
    return f"tl.where({text(node.args[1])}, {text(node.args[2])}, {text(node.args[0])})"


def _extreme(name: str) -> Callable[[Node, Text], str]:
    def build(node: Node, text: Text) -> str:
        nan = ", propagate_nan=tl.PropagateNan.ALL" if node.meta.dtype in FLOATS else ""
        return f"tl.{name}({text(node.args[0])}, {text(node.args[1])}{nan})"

    return build


LOWERINGS: Mapping[str, Callable[[Node, Text], str]] = {
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _binary("*"), "div": _div, "pow": _pow, "neg": _unary("-{}"),
    "abs": _unary("tl.abs({})"), "exp": _unary("exp({})"), "exp2": _unary("tl.exp2({})"), "log": _unary("tl.log({})"),
    "expm1": _unary("expm1({})"), "log1p": _unary("log1p({})"), "log2": _unary("tl.log2({})"),
    "sqrt": _unary("tl.sqrt_rn({})"), "rsqrt": _unary("tl.rsqrt({})"), "reciprocal": _unary("tl.div_rn(1.0, {})"),
    "square": lambda node, text: f"{text(node.args[0])} * {text(node.args[0])}",
    "sin": _unary("tl.sin({})"), "cos": _unary("tl.cos({})"), "erf": _unary("tl.erf({})"), "tanh": _unary("tanh({})"),
    "floor": _unary("tl.floor({})"), "ceil": _unary("tl.ceil({})"), "sign": _unary("sign({})"),
    "sigmoid": _unary("sigmoid({})"), "log_sigmoid": _unary("log_sigmoid({})"), "silu": _unary("silu({})"),
    "relu": _unary("relu({})"), "relu6": _unary("hardtanh({}, 0.0, 6.0)"), "gelu": _gelu, "mish": _unary("mish({})"),
    "hardsigmoid": _unary("hardsigmoid({})"),
    "hardswish": lambda node, text: f"{text(node.args[0])} * hardsigmoid({text(node.args[0])})",
    "hardtanh": _with_scalars("hardtanh", ("min_val", -1.0), ("max_val", 1.0)),
    "leaky_relu": _with_scalars("leaky_relu", ("negative_slope", 0.01)), "elu": _elu,
    "softplus": _with_scalars("softplus", ("beta", 1.0), ("threshold", 20.0)),
    "softshrink": _with_scalars("softshrink", ("lambd", 0.5)),
    "softsign": lambda node, text: f"tl.div_rn({text(node.args[0])}, 1.0 + tl.abs({text(node.args[0])}))",
    "selu": _unary("elu({}, 1.6732632423543772, 1.0507009873554805, 1.0)"),
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": _clamp_max,
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"), "addcmul": _add_scaled("{} * {}"),
    "where": _where, "masked_fill": _masked_fill,
    "lerp": lambda n, t: f"interpolated({t(n.args[0])}, {t(n.args[1])}, {t(n.args[2])})",
    "eq": _binary("=="), "ne": _binary("!="), "lt": _binary("<"), "le": _binary("<="), "gt": _binary(">"),
    "ge": _binary(">="), "logical_and": _binary("&"), "logical_or": _binary("|"), "logical_not": _unary("{} == 0"),
    "bitwise_and": _binary("&"), "bitwise_or": _binary("|"), "bitwise_not": _unary("~{}"),
    "bitwise_xor": _binary("^"), "bitwise_left_shift": _binary("<<"), "bitwise_right_shift": _binary(">>"),
    "logical_xor": _binary("!="), "hardshrink": _with_scalars("hardshrink", ("lambd", 0.5)),
    "threshold": _with_scalars("threshold", ("threshold", 0.0), ("value", 0.0)), "celu": _celu, "rrelu": _rrelu,
    "round": _round, "trunc": _unary("truncated({})"), "frac": _unary("fraction({})"),
    "sinc": _unary("sinc({})"), "nan_to_num": _nan_to_num, "logit": _logit, "heaviside": _two("heaviside"),
    "asin": _unary("asin({})"), "acos": _unary("acos({})"), "atan": _unary("atan({})"), "sinh": _unary("sinh({})"),
    "cosh": _unary("cosh({})"), "asinh": _unary("asinh({})"), "acosh": _unary("acosh({})"),
    "atanh": _unary("atanh({})"), "tan": _unary("tan({})"),
    "log10": _unary("tl.log({}) * 0.4342944819032518"), "erfc": _unary("erfc({})"), "erfinv": _unary("erfinv({})"),
    "lgamma": _unary("log_gamma({})"), "digamma": _unary("digamma({})"),
    "special_ndtr": _unary("0.5 * erfc({} * -0.7071067811865476)"), "special_entr": _unary("entropy_term({})"),
    "deg2rad": _unary("{} * 0.017453292519943295"), "rad2deg": _unary("{} * 57.29577951308232"),
    "isnan": _unary("is_nan({})"), "isinf": _unary('tl.abs({}) == float("inf")'),
    "isfinite": _unary('tl.abs({}) < float("inf")'), "isposinf": _unary('{} == float("inf")'),
    "isneginf": _unary('{} == float("-inf")'), "signbit": _unary("has_sign({})"),
    "atan2": _two("atan2"), "hypot": _two("hypotenuse"),
    "copysign": _two("with_sign"), "logaddexp": _two("log_add_exp"), "logaddexp2": _two("log2_add_exp2"),
    "xlogy": _two("xlogy"), "special_xlog1py": _two("xlog1py"), "fmax": _two("larger_number"),
    "fmin": _two("smaller_number"),
    "fmod": _two("float_mod"), "remainder": _mod("mod"), "floor_divide": _mod("divided"),
    "addcdiv": _add_scaled("tl.div_rn({}, {})"),
    "to": _unary("{}"), "_to_copy": _unary("{}"), "clone": _unary("{}"),
    "contiguous": _unary("{}"), "expand_as": _unary("{}"), "prelu": lambda n, t: (
        f"leaky_relu({t(n.args[0])}, {t(n.args[1])})"
    ),
}  # fmt: skip
