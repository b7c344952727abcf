"""ATen pointwise operators as Triton expressions.

Floating point is computed in float32 whatever the tensors' dtype (float16 and bfloat16 are widened at the load and
rounded once at the store, so a fused chain rounds less often than eager PyTorch); integers and booleans keep their
type. Division is IEEE (``tl.div_rn``), powers with small integer exponents are products, other powers (tensors as
exponents too) and activations are the device functions of :mod:`drk.assistant.synth.device_math`.

Left out: float64 and complex values, random operators, and integer division's Python semantics; such nodes stay torch
operators in the emitted module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drk.assistant.synth.domain import memory_order
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

FLOATS = frozenset({"float32", "float16", "bfloat16"})
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
FUSIBLE_DTYPES = FLOATS | INTEGERS | {"bool"}

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
    if node.bare_op != "pow":
        return False
    exponent = node.args[1]
    return isinstance(exponent, Ref) or exponent not in _POWERS


def _clamp(node: Node, text: Text) -> str:
    low = _argument(node, 1, "min", None)
    high = _argument(node, 2, "max", None)
    result = text(node.args[0])
    result = result if low is None else f"clamp_min({result}, {text(low)})"
    return result if high is None else f"clamp_max({result}, {text(high)})"


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


def _where(node: Node, text: Text) -> str:
    return f"tl.where({text(node.args[0])}, {text(node.args[1])}, {text(node.args[2])})"


def _masked_fill(node: Node, text: Text) -> str:
    return f"tl.where({text(node.args[1])}, {text(node.args[2])}, {text(node.args[0])})"


def _addcmul(node: Node, text: Text) -> str:
    value = node.kwargs.get("value", 1)
    product = f"{text(node.args[1])} * {text(node.args[2])}"
    return f"{text(node.args[0])} + {product if value == 1 else f'{text(value)} * ({product})'}"


def _extreme(name: str) -> Callable[[Node, Text], str]:
    def build(node: Node, text: Text) -> str:
        return f"tl.{name}({text(node.args[0])}, {text(node.args[1])}, propagate_nan=tl.PropagateNan.ALL)"

    return build


_TABLE: Mapping[str, Callable[[Node, Text], str]] = {
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
    "clamp": _clamp, "clamp_min": _clamp, "clamp_max": lambda n, t: f"clamp_max({t(n.args[0])}, {t(n.args[1])})",
    "maximum": _extreme("maximum"), "minimum": _extreme("minimum"), "addcmul": _addcmul,
    "where": _where, "masked_fill": _masked_fill, "lerp": lambda n, t: (
        f"{t(n.args[0])} + {t(n.args[2])} * ({t(n.args[1])} - {t(n.args[0])})"
    ),
    "eq": _binary("=="), "ne": _binary("!="), "lt": _binary("<"), "le": _binary("<="), "gt": _binary(">"),
    "ge": _binary(">="), "logical_and": _binary("&"), "logical_or": _binary("|"), "logical_not": _unary("{} == 0"),
    "bitwise_and": _binary("&"), "bitwise_or": _binary("|"), "bitwise_not": _unary("~{}"),
    "to": _unary("{}"), "_to_copy": _unary("{}"), "clone": _unary("{}"),
    "contiguous": _unary("{}"), "expand_as": _unary("{}"), "prelu": lambda n, t: (
        f"leaky_relu({t(n.args[0])}, {t(n.args[1])})"
    ),
}  # fmt: skip
_CASTS = frozenset({"to", "_to_copy", "clone", "contiguous"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_POWERS = frozenset({1, 2, 3, 4, 0.5, -0.5, -1})
_EXPENSIVE = frozenset("exp expm1 log1p tanh sigmoid silu gelu erf mish softplus elu sin cos log pow".split())  # noqa: SIM905


def is_pointwise(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` is an elementwise operator that kernels can compute exactly as torch defines it."""
    if not node.op.startswith("aten.") or node.bare_op not in _TABLE or len(node.metas) != 1 or node.metas[0] is None:
        return False
    operands = [metas.get(name) for name in node.inputs()]
    dtypes = {node.metas[0].dtype, *(meta.dtype for meta in operands if meta is not None)}
    if not operands or None in operands or not dtypes <= FUSIBLE_DTYPES:
        return False
    return _supported(node, node.metas[0], dtypes)


def _supported(node: Node, meta: TensorMeta, dtypes: set[str]) -> bool:
    name, floating = node.bare_op, meta.dtype in FLOATS
    if name == "pow":
        return floating and all(type(item) in (int, float) or isinstance(item, Ref) for item in node.args[:2])
    if name == "div":
        return floating and node.kwargs.get("rounding_mode") is None and len(node.args) == 2
    if name in {"clone", "prelu"}:
        return False
    if name == "contiguous":
        return memory_order(meta) is not None
    if name == "expand_as":
        return floating and meta.contiguous  # written out, as no captured one is
    if name in {"to", "_to_copy"}:
        return not (dtypes & FLOATS and not floating)
    if name in {"maximum", "minimum", "clamp", "clamp_min", "clamp_max"}:
        return dtypes <= FLOATS or (name.startswith("clamp") and _whole_bounds(node, dtypes))
    if name.startswith(("bitwise", "logical")):
        return dtypes <= {"bool"}
    if name in _COMPARISONS or name in {"where", "masked_fill"}:
        return True
    integer_ok = name in {"add", "sub", "mul", "neg", "abs", "where"} and dtypes <= INTEGERS
    return floating or integer_ok


def _whole_bounds(node: Node, dtypes: set[str]) -> bool:
    """Whether wide integers are kept between numbers that are integers too."""
    bounds = (*node.args[1:], *node.kwargs.values())
    return dtypes <= {"int64", "int32"} and all(item is None or type(item) is int for item in bounds)


def compute_kind(node: Node, metas: Mapping[str, TensorMeta]) -> str:
    """The type in which a node's operands are taken: ``float``, ``int`` or ``bool``."""
    if node.bare_op in _COMPARISONS:
        operands = [metas[name].dtype for name in node.inputs()]
        scalars = [arg for arg in node.args if type(arg) is float]
        return "float" if scalars or any(dtype in FLOATS for dtype in operands) else "int"
    return kind_of(node.meta.dtype)


def kind_of(dtype: str) -> str:
    """``float``, ``int`` or ``bool`` for a fusible dtype name."""
    return "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"


def scalar_text(value: float | bool, kind: str) -> str:
    """A Python scalar as Triton source of the given kind."""
    if kind == "bool":
        return str(bool(value))
    if kind == "int":
        return repr(int(value))
    number = float(value)
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def expression(node: Node, text: Callable[[Any, str], str], metas: Mapping[str, TensorMeta]) -> str:
    """Return the Triton expression of ``node``.

    ``text(argument, kind)`` gives the source of one argument in the compute kind; operands that are no single token
    must come parenthesised.
    """
    kind = compute_kind(node, metas)
    conditions = {"where": 0, "masked_fill": 1}
    condition = node.args[conditions[node.bare_op]] if node.bare_op in conditions else None

    def argument(value: Any) -> str:
        return text(value, "bool" if value is condition and isinstance(value, Ref) else kind)

    if node.bare_op in _CASTS:
        source = text(node.args[0], kind)
        resized = kind == "int" and metas[node.args[0].name].dtype != node.meta.dtype
        return f"{source}.to(tl.{node.meta.dtype})" if resized else source
    return _TABLE[node.bare_op](node, argument)


def scalar_flops(nodes: Sequence[Node]) -> int:
    """A rough count of arithmetic instructions for one element of a chain."""
    return sum(_flops(node) for node in nodes if not isinstance(node, Symbol))


def _flops(node: Node) -> int:
    return 64 if general_power(node) else 12 if node.bare_op in _EXPENSIVE else 1
