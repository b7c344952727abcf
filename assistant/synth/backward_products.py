"""Derivatives of matrix products and of views.

A product's gradients are products again, of operands in its own dtype; which of them a kernel computes is for the
planner's rules to say, the library takes the others. Leading dimensions of a matrix that meets a weight are folded into
one. A view's gradient is the view back.

Left out: batched products with broadcast factors, and views other than those listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from drk.assistant.synth.backward_tape import Gradients, Rule, Tape
from drk.assistant.synth.regions import Product, product_of
from drk.gym.graph import Node, Ref, TensorMeta


def product_rule(node: Node, metas: Mapping[str, TensorMeta]) -> Rule | None:
    """The rule of a matrix product, or None where ``node`` is none that is known here."""
    product = product_of(node, metas)
    if product is None:
        return None
    left, right = metas[product.left].shape, metas[product.right].shape
    if not product.batched:
        return lambda tape, _node, gradient: _weighted(tape, product, gradient)
    if product.transposed or left[:-2] != right[:-2]:
        return None
    return lambda tape, _node, gradient: _batched(tape, product, gradient)


def _turned(tape: Tape, value: Ref) -> Ref:
    """A matrix, or each of a batch, transposed."""
    shape = tape.shape(value)
    swapped = (*shape[:-2], shape[-1], shape[-2])
    dtype = tape.draft.metas[value.name].dtype
    if len(shape) == 2:
        return tape.node("t.default", (value,), swapped, dtype)
    return tape.node("transpose.int", (value, -1, -2), swapped, dtype)


def _flat(tape: Tape, value: Ref) -> Ref:
    """A matrix of all rows."""
    shape = tape.shape(value)
    if len(shape) == 2:
        return value
    flat = (math.prod(shape[:-1]), shape[-1])
    return tape.node("reshape.default", (value, flat), flat, tape.draft.metas[value.name].dtype)


def _product(tape: Tape, left: Ref, right: Ref) -> Ref:
    shape = (*tape.shape(left)[:-1], tape.shape(right)[-1])
    op = "mm.default" if len(shape) == 2 else "matmul.default"
    return tape.node(op, (left, right), shape, tape.draft.metas[left.name].dtype)


def _weighted(tape: Tape, product: Product, gradient: Ref) -> Gradients:
    """``left @ right`` with a matrix on the right, that may be stored transposed, and a bias."""
    shape, dtype = product.node.meta.shape, product.node.meta.dtype
    left, right = Ref(product.left), Ref(product.right)
    found: Gradients = []
    if product.bias:
        found.append((Ref(product.bias), tape.summed(gradient, shape, tape.metas[product.bias].shape)))
    whole = tape.narrow(tape.full(gradient, shape), dtype)
    weight = right if product.transposed else _turned(tape, right)
    found.append((left, _product(tape, whole, weight)))
    rows, others = _flat(tape, whole), _flat(tape, left)
    first, second = (rows, others) if product.transposed else (others, rows)
    return [*found, (right, _product(tape, _turned(tape, first), second))]


def _batched(tape: Tape, product: Product, gradient: Ref) -> Gradients:
    whole = tape.narrow(tape.full(gradient, product.node.meta.shape), product.node.meta.dtype)
    left, right = Ref(product.left), Ref(product.right)
    return [
        (left, _product(tape, whole, _turned(tape, right))),
        (right, _product(tape, _turned(tape, left), whole)),
    ]


# --- Views ---------------------------------------------------------------------------------------------------


def _reshaped(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    source = node.args[0]
    whole, shape = tape.full(gradient, node.meta.shape), tape.metas[source.name].shape
    return [(source, tape.spread(whole, shape) if _units_only(node.meta.shape, shape) else _viewed(tape, whole, shape))]


def _units_only(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return [size for size in before if size != 1] == [size for size in after if size != 1]


def _viewed(tape: Tape, value: Ref, shape: tuple[int, ...]) -> Ref:
    return tape.node("reshape.default", (value, shape), shape, tape.draft.metas[value.name].dtype)


def _reordered(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    source = node.args[0]
    whole, shape = tape.full(gradient, node.meta.shape), tape.metas[source.name].shape
    dtype = tape.draft.metas[whole.name].dtype
    if node.bare_op == "t":
        return [(source, tape.node("t.default", (whole,), shape, dtype))]
    if node.bare_op == "transpose":
        return [(source, tape.node("transpose.int", (whole, *node.args[1:]), shape, dtype))]
    order = [dim % len(shape) for dim in node.args[1]]
    back = tuple(order.index(dim) for dim in range(len(shape)))
    return [(source, tape.node("permute.default", (whole, back), shape, dtype))]


def _expanded(tape: Tape, node: Node, gradient: Ref) -> Gradients:
    source = node.args[0]
    return [(source, tape.summed(gradient, node.meta.shape, tape.metas[source.name].shape))]


VIEW_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze"), _reshaped),
    **dict.fromkeys(("transpose", "permute", "t"), _reordered),
    "expand": _expanded,
}
"""Rules of views."""


def view_rule(node: Node) -> Rule | None:
    """The rule of a view, or None."""
    named: Any = VIEW_RULES.get(node.bare_op)
    return named if node.op.startswith("aten.") and node.args and isinstance(node.args[0], Ref) else None
