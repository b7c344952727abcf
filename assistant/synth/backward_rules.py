"""Derivatives: for each operator, what its result's gradient gives to its operands.

A rule emits ordinary ATen operators on a tape (:mod:`drk.assistant.synth.backward_tape`), which the planner then fuses
as it fuses a forward graph. Formulas and what happens at kinks are those of PyTorch's ``derivatives.yaml``: relu passes
nothing at 0, clamps pass the gradient at their bounds, equal operands of a maximum share it.

Left out: products of rows, cumulative operators, indexing, convolutions, random operators; such nodes stay torch
operators, whose gradients torch knows. Second derivatives are left out altogether.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from drk.assistant.synth.backward_tape import Gradients, Rule, Tape
from drk.assistant.synth.reduction_rules import argument
from drk.gym.graph import Node, Ref

Slope = Callable[[Tape, Node, Ref, Ref], Ref]
"""Gradient of a unary operator's operand from (tape, node, what it reads, gradient)."""


def _of_operand(slope: Slope) -> Rule:
    """A rule whose slope reads the operand."""
    return lambda tape, node, gradient: [(node.args[0], slope(tape, node, tape.value(node.args[0]), gradient))]


def _of_result(slope: Slope) -> Rule:
    """A rule whose slope reads the result."""
    return lambda tape, node, gradient: [(node.args[0], slope(tape, node, tape.value(Ref(node.name)), gradient))]


def _times(tape: Tape, left: Any, right: Any) -> Ref:
    return tape.emit("mul.Tensor", left, right)


def _rest(tape: Tape, value: Ref) -> Ref:
    """1 - value."""
    return tape.emit("rsub.Scalar", value, 1.0)


def _either(tape: Tape, left: Ref, right: Ref) -> Ref:
    return tape.emit("logical_or.default", left, right)


# --- One operand ---------------------------------------------------------------------------------------------


def _pass(_tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], gradient)]


def _silu(tape: Tape, _node: Node, x: Ref, gradient: Ref) -> Ref:
    gate = tape.emit("sigmoid.default", x)
    return _times(tape, gradient, _times(tape, gate, tape.emit("add.Tensor", _times(tape, x, _rest(tape, gate)), 1.0)))


def _gelu(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
    if argument(node, 1, "approximate", "none") == "tanh":
        return _gelu_tanh(tape, x, gradient)
    cdf = tape.emit("erf.default", _times(tape, x, math.sqrt(0.5)))
    cdf = _times(tape, tape.emit("add.Tensor", cdf, 1.0), 0.5)
    bell = tape.emit("exp.default", _times(tape, _times(tape, x, x), -0.5))
    density = _times(tape, bell, 1.0 / math.sqrt(2.0 * math.pi))
    return _times(tape, gradient, tape.emit("add.Tensor", cdf, _times(tape, x, density)))


def _gelu_tanh(tape: Tape, x: Ref, gradient: Ref) -> Ref:
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    square = _times(tape, x, x)
    inner = _times(tape, _times(tape, x, tape.emit("add.Tensor", _times(tape, square, cubic), 1.0)), scale)
    bent = tape.emit("tanh.default", inner)
    slope = _times(tape, tape.emit("add.Tensor", _times(tape, square, 3.0 * cubic), 1.0), scale)
    curve = _times(tape, _times(tape, x, _rest(tape, _times(tape, bent, bent))), slope)
    both = tape.emit("add.Tensor", tape.emit("add.Tensor", bent, 1.0), curve)
    return _times(tape, gradient, _times(tape, both, 0.5))


def _mish(tape: Tape, _node: Node, x: Ref, gradient: Ref) -> Ref:
    bent = tape.emit("tanh.default", tape.emit("softplus.default", x))
    slope = _times(tape, _times(tape, x, tape.emit("sigmoid.default", x)), _rest(tape, _times(tape, bent, bent)))
    return _times(tape, gradient, tape.emit("add.Tensor", bent, slope))


def _outside(low: str, high: str, bounds: Callable[[Node], tuple[Any, Any]], scale: float = 1.0) -> Rule:
    """The gradient, 0 where the operand lies beyond a bound; ``low`` and ``high`` compare it with each."""

    def slope(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
        least, most = bounds(node)
        tests = [tape.emit(f"{low}.Scalar", x, least)] if least is not None else []
        tests += [tape.emit(f"{high}.Scalar", x, most)] if most is not None else []
        scaled = gradient if scale == 1.0 else _times(tape, gradient, scale)
        return tape.zeroed(scaled, tests[0] if len(tests) == 1 else _either(tape, *tests))

    return _of_operand(slope)


def _hardswish(tape: Tape, _node: Node, x: Ref, gradient: Ref) -> Ref:
    flat = _either(tape, tape.emit("le.Scalar", x, -3.0), tape.emit("ge.Scalar", x, 3.0))
    ramp = tape.zeroed(_times(tape, x, 1.0 / 6.0), flat)
    return _times(tape, gradient, tape.emit("add.Tensor", tape.emit("hardsigmoid.default", x), ramp))


def _leaky_relu(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
    damped = _times(tape, gradient, float(argument(node, 1, "negative_slope", 0.01)))
    return tape.emit("where.self", tape.emit("gt.Scalar", x, 0.0), gradient, damped)


def _elu(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
    if node.bare_op == "selu":
        alpha, scale, steep = 1.6732632423543772, 1.0507009873554805, 1.0
    else:
        named = enumerate(("alpha", "scale", "input_scale"), start=1)
        alpha, scale, steep = (float(argument(node, index, name, 1.0)) for index, name in named)
    power = tape.emit("exp.default", x if steep == 1.0 else _times(tape, x, steep))
    below = _times(tape, gradient, _times(tape, power, alpha * scale * steep))
    above = gradient if scale == 1.0 else _times(tape, gradient, scale)
    return tape.emit("where.self", tape.emit("gt.Scalar", x, 0.0), above, below)


def _softplus(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
    beta, threshold = float(argument(node, 1, "beta", 1.0)), float(argument(node, 2, "threshold", 20.0))
    scaled = x if beta == 1.0 else _times(tape, x, beta)
    bent = _times(tape, gradient, tape.emit("sigmoid.default", scaled))
    return tape.emit("where.self", tape.emit("gt.Scalar", scaled, threshold), gradient, bent)


def _softshrink(tape: Tape, node: Node, x: Ref, gradient: Ref) -> Ref:
    size = tape.emit("abs.default", x)
    return tape.zeroed(gradient, tape.emit("le.Scalar", size, float(argument(node, 1, "lambd", 0.5))))


def _softsign(tape: Tape, _node: Node, x: Ref, gradient: Ref) -> Ref:
    size = tape.emit("add.Tensor", tape.emit("abs.default", x), 1.0)
    return tape.emit("div.Tensor", gradient, _times(tape, size, size))


def _power(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    x, exponent = node.args[:2]
    if exponent == 1:
        return [(x, gradient)]
    if exponent in {0.5, -0.5, -1}:
        result = tape.value(Ref(node.name))
        if exponent == 0.5:
            return [(x, tape.emit("div.Tensor", _times(tape, gradient, 0.5), result))]
        order = 2 if exponent == -1 else 3
        slope = tape.emit("pow.Tensor_Scalar", result, order)
        return [(x, _times(tape, _times(tape, gradient, float(exponent)), slope))]
    base = tape.value(x)
    slope = base if exponent == 2 else tape.emit("pow.Tensor_Scalar", base, exponent - 1)
    return [(x, _times(tape, gradient, _times(tape, slope, float(exponent))))]


def _sigmoid(tape: Tape, _node: Node, y: Ref, gradient: Ref) -> Ref:
    return _times(tape, gradient, _times(tape, y, _rest(tape, y)))


def _tanh(tape: Tape, _node: Node, y: Ref, gradient: Ref) -> Ref:
    return _times(tape, gradient, _rest(tape, _times(tape, y, y)))


def _erf(tape: Tape, _node: Node, x: Ref, gradient: Ref) -> Ref:
    bell = tape.emit("exp.default", tape.emit("neg.default", _times(tape, x, x)))
    return _times(tape, gradient, _times(tape, bell, 2.0 / math.sqrt(math.pi)))


def _rsqrt(tape: Tape, _node: Node, y: Ref, gradient: Ref) -> Ref:
    return _times(tape, _times(tape, gradient, -0.5), tape.emit("pow.Tensor_Scalar", y, 3))


# --- Several operands ----------------------------------------------------------------------------------------


def _alpha(node: Node) -> float:
    return float(argument(node, 2, "alpha", 1))


def _scaled(tape: Tape, value: Ref, factor: float) -> Ref:
    if factor == -1:
        return tape.emit("neg.default", value)
    return value if factor == 1 else _times(tape, value, factor)


def _add(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], gradient), (node.args[1], _scaled(tape, gradient, _alpha(node)))]


def _sub(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], gradient), (node.args[1], _scaled(tape, gradient, -_alpha(node)))]


def _rsub(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], _scaled(tape, gradient, -_alpha(node))), (node.args[1], gradient)]


def _mul(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    left, right = node.args[:2]
    pairs = ((left, right), (right, left))
    # Losses count their elements as ``0 * loss + 1``: no gradient flows there.
    return [
        (to, _times(tape, gradient, tape.value(other))) for to, other in pairs if isinstance(to, Ref) and other != 0
    ]


def _div(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    top, bottom = node.args[:2]
    share = tape.emit("div.Tensor", gradient, tape.value(bottom))
    found = [(top, share)]
    if isinstance(bottom, Ref):
        found.append((bottom, tape.emit("neg.default", _times(tape, share, tape.value(Ref(node.name))))))
    return found


def _extreme(greater: str) -> Rule:
    def rule(tape: Tape, node: Node, gradient: Ref) -> Gradients:
        left, right = (tape.value(arg) for arg in node.args[:2])
        same, half = tape.emit("eq.Tensor", left, right), _times(tape, gradient, 0.5)
        found = []
        for arg, first, second in ((node.args[0], left, right), (node.args[1], right, left)):
            lost = tape.emit("logical_not.default", tape.emit(f"{greater}.Tensor", first, second))
            found.append((arg, tape.emit("where.self", same, half, tape.zeroed(gradient, lost))))
        return found

    return rule


def _where(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    condition = tape.value(node.args[0])
    other = tape.emit("logical_not.default", condition)
    return [(node.args[1], tape.zeroed(gradient, other)), (node.args[2], tape.zeroed(gradient, condition))]


def _masked_fill(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], tape.zeroed(gradient, tape.value(node.args[1])))]


def _addcmul(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    base, left, right = node.args[:3]
    part = _scaled(tape, gradient, node.kwargs.get("value", 1))
    return [
        (base, gradient),
        (left, _times(tape, part, tape.value(right))),
        (right, _times(tape, part, tape.value(left))),
    ]


def _lerp(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    start, end, weight = node.args[:3]
    share = _times(tape, gradient, tape.value(weight))
    found = [(start, tape.emit("sub.Tensor", gradient, share)), (end, share)]
    if isinstance(weight, Ref):
        apart = tape.emit("sub.Tensor", tape.value(end), tape.value(start))
        found.append((weight, _times(tape, gradient, apart)))
    return found


POINTWISE_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("to", "_to_copy", "contiguous", "clone"), _pass),
    "neg": lambda t, n, g: [(n.args[0], t.emit("neg.default", g))],
    "abs": _of_operand(lambda t, _, x, g: _times(t, g, t.emit("sign.default", x))),
    "exp": _of_result(lambda t, _, y, g: _times(t, g, y)),
    "exp2": _of_result(lambda t, _, y, g: _times(t, g, _times(t, y, math.log(2.0)))),
    "log": _of_operand(lambda t, _, x, g: t.emit("div.Tensor", g, x)),
    "expm1": _of_result(lambda t, _, y, g: _times(t, g, t.emit("add.Tensor", y, 1.0))),
    "log1p": _of_operand(lambda t, _, x, g: t.emit("div.Tensor", g, t.emit("add.Tensor", x, 1.0))),
    "log2": _of_operand(lambda t, _, x, g: t.emit("div.Tensor", g, _times(t, x, math.log(2.0)))),
    "sqrt": _of_result(lambda t, _, y, g: t.emit("div.Tensor", _times(t, g, 0.5), y)),
    "rsqrt": _of_result(_rsqrt),
    "reciprocal": _of_result(lambda t, _, y, g: t.emit("neg.default", _times(t, g, _times(t, y, y)))),
    "square": _of_operand(lambda t, _, x, g: _times(t, g, _times(t, x, 2.0))),
    "sin": _of_operand(lambda t, _, x, g: _times(t, g, t.emit("cos.default", x))),
    "cos": _of_operand(lambda t, _, x, g: t.emit("neg.default", _times(t, g, t.emit("sin.default", x)))),
    "erf": _of_operand(_erf),
    "tanh": _of_result(_tanh),
    "sigmoid": _of_result(_sigmoid),
    "log_sigmoid": _of_operand(lambda t, _, x, g: _times(t, g, t.emit("sigmoid.default", t.emit("neg.default", x)))),
    "silu": _of_operand(_silu),
    "relu": _of_result(lambda t, _, y, g: t.zeroed(g, t.emit("le.Scalar", y, 0.0))),
    "relu6": _outside("le", "ge", lambda _: (0.0, 6.0)),
    "gelu": _of_operand(_gelu),
    "mish": _of_operand(_mish),
    "hardsigmoid": _outside("le", "ge", lambda _: (-3.0, 3.0), 1.0 / 6.0),
    "hardswish": _of_operand(_hardswish),
    "hardtanh": _outside("le", "ge", lambda n: (argument(n, 1, "min_val", -1.0), argument(n, 2, "max_val", 1.0))),
    "leaky_relu": _of_operand(_leaky_relu),
    "elu": _of_operand(_elu),
    "selu": _of_operand(_elu),
    "softplus": _of_operand(_softplus),
    "softshrink": _of_operand(_softshrink),
    "softsign": _of_operand(_softsign),
    "clamp": _outside("lt", "gt", lambda n: (argument(n, 1, "min", None), argument(n, 2, "max", None))),
    "clamp_min": _outside("lt", "gt", lambda n: (n.args[1], None)),
    "clamp_max": _outside("lt", "gt", lambda n: (None, n.args[1])),
    "pow": _power,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "maximum": _extreme("gt"),
    "minimum": _extreme("lt"),
    "addcmul": _addcmul,
    "where": _where,
    "masked_fill": _masked_fill,
    "lerp": _lerp,
}
"""Rules of elementwise operators."""
