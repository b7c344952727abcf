"""Derivatives of row reductions, and of softmax as a whole.

Reductions hand their gradient to every element of the row. Where an extreme occurs more than once its occurrences share
the gradient, as in PyTorch. The last step of a written-out softmax or log-softmax hands its gradient straight to the
operand: ``p (g - sum(g p))`` reads the result alone.

Left out: products of rows and cumulative operators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drk.assistant.synth.backward_tape import Gradients, Rule, Tape
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
    if node.bare_op not in {"div", "sub"} or _scaled(node):
        return None
    log = node.bare_op == "sub"
    total = _maker(node.args[1], forward, "log" if log else "sum")
    total = _maker(total.args[0], forward, "sum") if log and total is not None else total
    power = _maker(total.args[0], forward, "exp") if total is not None else None
    centred = _maker(power.args[0], forward, "sub") if power is not None else None
    if total is None or power is None or centred is None or node.args[0] != Ref((centred if log else power).name):
        return None
    top = _maker(centred.args[1], forward, "amax")
    if top is None or _scaled(centred) or top.args != (centred.args[0], *total.args[1:]) or top.args[2:] != (True,):
        return None
    return lambda tape, node, gradient: _softmax(tape, node, gradient, (centred.args[0], total.args[1]), log=log)


def _maker(value: Any, forward: Mapping[str, Node], op: str) -> Node | None:
    """The node that computes ``value``, where it is an ``op``."""
    made = forward.get(value.name) if isinstance(value, Ref) else None
    return made if made is not None and made.bare_op == op else None


def _scaled(node: Node) -> bool:
    """Whether a difference multiplies what it subtracts, or a quotient rounds."""
    return bool(node.kwargs) or len(node.args) > 2


def _softmax(tape: Tape, node: Node, gradient: Ref, source: tuple[Ref, tuple[int, ...]], *, log: bool) -> Gradients:
    x, dims = source
    whole, result = tape.full(gradient, node.meta.shape), tape.value(Ref(node.name))
    if log:
        share = _times(tape, tape.emit("exp.default", result), tape.emit("sum.dim_IntList", whole, dims, True))
        return [(x, tape.emit("sub.Tensor", whole, share))]
    along = tape.emit("sum.dim_IntList", _times(tape, whole, result), dims, True)
    return [(x, _times(tape, result, tape.emit("sub.Tensor", whole, along)))]
