"""ATen pointwise operators as Triton expressions.

Floating point is computed in float32 whatever the tensors' dtype (float16 and bfloat16 are widened at the load and
rounded once at the store, so a fused chain rounds less often than eager PyTorch); integers and booleans keep their
type. Division is IEEE (``tl.div_rn``), powers with small integer exponents are products, other powers (tensors as
exponents too) and activations are the device functions of :mod:`drk.assistant.synth.device_math`.

Left out: float64 and complex values, random operators, Bessel functions; such nodes stay torch operators in
the emitted module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drk.assistant.synth import lowerings
from drk.assistant.synth.domain import memory_order
from drk.assistant.synth.lowerings import LOWERINGS, general_power
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

FLOATS = lowerings.FLOATS
INTEGERS = frozenset({"int64", "int32", "int16", "int8", "uint8"})
FUSIBLE_DTYPES = FLOATS | INTEGERS | {"bool"}

_CASTS = frozenset({"to", "_to_copy", "clone", "contiguous"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_PREDICATES = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit"})
_OF_BITS = frozenset({"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"})
_OF_INTEGERS = _OF_BITS | frozenset(
    {
        *("add", "sub", "rsub", "mul", "neg", "abs", "remainder", "floor_divide"),
        *("bitwise_left_shift", "bitwise_right_shift"),
    }
)
_EXPENSIVE = frozenset(
    {
        *("exp", "expm1", "log1p", "tanh", "sigmoid", "silu", "gelu", "erf", "mish", "softplus", "elu", "selu", "celu"),
        *("sin", "cos", "tan", "sinc", "log", "logit", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh"),
        *("atanh", "erfc", "erfinv", "special_ndtr", "special_entr", "special_xlog1py", "hypot", "logaddexp"),
        *("logaddexp2", "xlogy"),
    }
)
_VERY_EXPENSIVE = frozenset({"lgamma", "digamma", "fmod", "remainder", "floor_divide", "atan2"})


def is_pointwise(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` is an elementwise operator that kernels can compute exactly as torch defines it."""
    if (
        not node.op.startswith("aten.")
        or node.bare_op not in LOWERINGS
        or len(node.metas) != 1
        or node.metas[0] is None
    ):
        return False
    operands = [metas.get(name) for name in node.inputs()]
    dtypes = {node.metas[0].dtype, *(meta.dtype for meta in operands if meta is not None)}
    if not operands or None in operands or not dtypes <= FUSIBLE_DTYPES:
        return False
    return _supported(node, node.metas[0], dtypes)


def _supported(node: Node, meta: TensorMeta, dtypes: set[str]) -> bool:
    name, floating = node.bare_op, meta.dtype in FLOATS
    if name in _CONDITIONS:
        return _CONDITIONS[name](node, meta, dtypes)
    if name in _COMPARISONS or name.startswith("logical") or (name in _OF_BITS and dtypes <= {"bool"}):
        return True
    if name in _PREDICATES:
        return dtypes <= {"bool", *FLOATS}
    if name in _OF_BITS or not floating:
        return name in _OF_INTEGERS and dtypes <= INTEGERS and _whole(node, dtypes)
    return True


def _power(node: Node, meta: TensorMeta, _: set[str]) -> bool:
    return meta.dtype in FLOATS and all(type(item) in (int, float) or isinstance(item, Ref) for item in node.args[:2])


def _limits(node: Node, _: TensorMeta, dtypes: set[str]) -> bool:
    """Whether floats are bounded, or wide integers by numbers that are integers too."""
    bounds = (*node.args[1:], *node.kwargs.values())
    whole = dtypes <= {"int64", "int32"} and all(item is None or type(item) is int for item in bounds)
    return dtypes <= FLOATS or whole


_CONDITIONS: Mapping[str, Callable[[Node, TensorMeta, set[str]], bool]] = {
    "pow": _power,
    "div": lambda node, meta, _: meta.dtype in FLOATS and len(node.args) == 2,
    "clone": lambda *_: False,
    "prelu": lambda *_: False,
    "contiguous": lambda _node, meta, _: memory_order(meta) is not None,
    "expand_as": lambda _node, meta, _: meta.dtype in FLOATS and meta.contiguous,  # written out, as no captured one is
    **dict.fromkeys(("to", "_to_copy"), lambda _node, meta, dtypes: meta.dtype in FLOATS or not dtypes & FLOATS),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _limits),
    **dict.fromkeys(("where", "masked_fill"), lambda *_: True),
    **dict.fromkeys(("maximum", "minimum"), lambda _node, _meta, dtypes: dtypes <= FLOATS or len(dtypes) == 1),
    "rrelu": lambda node, meta, _: meta.dtype in FLOATS and (len(node.args) < 4 or node.args[3] is False),
}
"""What operators are bound to beyond the rule for the others: floats throughout, or integers of one type."""


def _whole(node: Node, dtypes: set[str]) -> bool:
    """Whether integers keep their own type: for what Triton computes in the operands' type."""
    plain = len(dtypes) == 1 and all(type(item) in (int, Ref) for item in node.args)
    return plain or node.bare_op in {"add", "sub", "mul", "neg", "abs"}


def compute_kind(node: Node, metas: Mapping[str, TensorMeta]) -> str:
    """The type in which a node's operands are taken: ``float``, ``int`` or ``bool``."""
    if node.bare_op in _PREDICATES:
        return "float"
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
    return LOWERINGS[node.bare_op](node, argument)


def scalar_flops(nodes: Sequence[Node]) -> int:
    """A rough count of arithmetic instructions for one element of a chain."""
    return sum(_flops(node) for node in nodes if not isinstance(node, Symbol))


def _flops(node: Node) -> int:
    return 64 if general_power(node) or node.bare_op in _VERY_EXPENSIVE else 12 if node.bare_op in _EXPENSIVE else 1
