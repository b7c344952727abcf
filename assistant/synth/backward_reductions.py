"""Derivatives of row reductions, and of softmax as a whole.

Reductions hand their gradient to every element of the row. Where an extreme occurs more than once its occurrences share
the gradient, as in PyTorch. The last step of a written-out softmax or log-softmax hands its gradient straight to the
operand: ``p (g - sum(g p))`` reads the result alone.

Left out: products of rows and cumulative operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drk.assistant.synth.backward_tape import Gradients, Rule, Tape
from drk.assistant.synth.reduction_rules import argument
from drk.assistant.synth.regions import reduced_dims
from drk.gym.graph import Node, Ref


def _times(tape: Tape, left: Ref, right: Ref | float) -> Ref:
    return tape.emit("mul.Tensor", left, right)


def _kept(tape: Tape, node: Node, gradient: Ref) -> tuple[Ref, tuple[int, ...]]:
    """The gradient with the reduced dimensions as size 1, and these dimensions."""
    found = reduced_dims(node, tape.metas)
    assert found is not None
    dims, keep = found
    source = tape.metas[node.args[0].name].shape
    if keep or not tape.shape(gradient):
        return gradient, dims
    kept = tuple(1 if axis in dims else size for axis, size in enumerate(source))
    given = tape.shape(gradient)
    if math.prod(given) == 1:
        return tape.spread(gradient, (1,) * len(source)), dims
    return tape.spread(gradient, kept if len(given) == len(source) - len(dims) else kept[-len(given) :]), dims


def _sum(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    return [(node.args[0], _kept(tape, node, gradient)[0])]


def _mean(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    kept, dims = _kept(tape, node, gradient)
    source = tape.metas[node.args[0].name].shape
    return [(node.args[0], tape.divided(kept, source, dims))]


def _variance(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    kept, dims = _kept(tape, node, gradient)
    x, source = node.args[0], tape.metas[node.args[0].name].shape
    count = math.prod(source[dim] for dim in dims)
    mean = next((tape.value(Ref(name)) for name, item in tape.forward.items() if _is_mean(tape, item, x, dims)), None)
    if mean is None:
        mean = tape.emit("mean.dim", tape.value(x), tuple(dim - len(source) for dim in dims), True)
    apart = tape.emit("sub.Tensor", tape.value(x), mean)
    correction = 0 if node.kwargs.get("correction", 1) == 0 else 1
    shared = tape.divided(kept, source, dims) if not correction else tape.emit("div.Tensor", kept, count - 1)
    return [(x, _times(tape, _times(tape, shared, 2.0), apart))]


def _is_mean(tape: Tape, node: Node, x: Ref, dims: tuple[int, ...]) -> bool:
    return node.bare_op == "mean" and node.args[0] == x and reduced_dims(node, tape.metas) == (dims, True)


def _row_extreme(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    if node.name in tape.cancelled:
        return []
    x, keep = tape.value(node.args[0]), reduced_dims(node, tape.metas)
    kept, dims = _kept(tape, node, gradient)
    top = tape.value(Ref(node.name))
    if keep is not None and not keep[1]:
        shape = tape.shape(x)
        top = tape.spread(top, tuple(1 if axis in dims else size for axis, size in enumerate(shape)))
    hit = tape.emit("eq.Tensor", x, top)
    axes = tuple(dim - len(tape.shape(x)) for dim in dims)
    count = tape.emit("sum.dim_IntList", tape.narrow(hit, "float32"), axes, True)
    share = tape.emit("div.Tensor", kept, count)
    return [(node.args[0], tape.zeroed(share, tape.emit("logical_not.default", hit)))]


REDUCTION_RULES: Mapping[str, Rule] = {
    "sum": _sum,
    "mean": _mean,
    "var": _variance,
    "amax": _row_extreme,
    "amin": _row_extreme,
}
"""Rules of reductions."""


# --- Softmax ------------------------------------------------------------------------------------------------------


def softmax_rule(node: Node, forward: Mapping[str, Node]) -> Rule | None:
    """The rule of the last step of a written-out softmax or log-softmax, straight to its operand; else None."""
    last, total = (forward.get(arg.name) if isinstance(arg, Ref) else None for arg in (*node.args, None, None)[:2])
    if node.bare_op == "sub" and total is not None and total.bare_op == "log" and argument(node, 2, "alpha", 1) == 1:
        centred, total = last, forward.get(total.args[0].name)
        power = forward.get(total.args[0].name) if total is not None and total.bare_op == "sum" else None
        log = True
    elif node.bare_op == "div" and total is not None and total.bare_op == "sum":
        power, log = last, False
        centred = forward.get(power.args[0].name) if power is not None and power.bare_op == "exp" else None
    else:
        return None
    if total is None or power is None or centred is None or centred.bare_op != "sub":
        return None
    top = forward.get(centred.args[1].name) if isinstance(centred.args[1], Ref) else None
    whole = power.bare_op == "exp" and power.args[0] == Ref(centred.name) and total.args[0] == Ref(power.name)
    shifted = (
        top is not None
        and top.bare_op == "amax"
        and top.args[0] == centred.args[0]
        and argument(centred, 2, "alpha", 1) == 1
    )
    if not whole or not shifted or top is None or top.args[1:] != total.args[1:] or top.args[2:] != (True,):
        return None
    return lambda tape, node, gradient: _softmax(tape, node, gradient, (centred.args[0], total.args[1]), log=log)


def _softmax(tape: Tape, node: Node, gradient: Ref, source: tuple[Ref, tuple[int, ...]], *, log: bool) -> Gradients:
    x, dims = source
    whole, result = tape.full(gradient, node.meta.shape), tape.value(Ref(node.name))
    if log:
        share = _times(tape, tape.emit("exp.default", result), tape.emit("sum.dim_IntList", whole, dims, True))
        return [(x, tape.emit("sub.Tensor", whole, share))]
    along = tape.emit("sum.dim_IntList", _times(tape, whole, result), dims, True)
    return [(x, _times(tape, result, tape.emit("sub.Tensor", whole, along)))]
