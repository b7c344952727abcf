"""Reverse mode: from a segment of a forward graph to the graph of its gradients.

The segment's nodes are walked backwards; each hands its gradient to its operands by the rules of
:mod:`drk.assistant.synth.backward_rules`. The result is an ordinary graph whose inputs are what the forward pass saves
and the gradients of the segment's outputs, so that planner and writers treat it as any other.

Sums over a parameter's rows stand in regions of their own: elementwise values that they and other regions need are
computed in both rather than written to memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.backward_products import product_rule, view_rule
from drk.assistant.synth.backward_reductions import REDUCTION_RULES, softmax_rule
from drk.assistant.synth.backward_rules import POINTWISE_RULES
from drk.assistant.synth.backward_tape import SHARE, Rule, Tape
from drk.assistant.synth.domain import memory_order
from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.regions import product_of, reduced_dims
from drk.gym.graph import Graph, Node, Pack, Placeholder, Ref, TensorMeta


def rule_of(node: Node, metas: Mapping[str, TensorMeta]) -> Rule | None:
    """How ``node`` hands its gradient on, or None where that is left to torch."""
    if len(node.metas) != 1 or node.metas[0] is None or node.metas[0].dtype not in FLOATS:
        return None
    found = product_rule(node, metas) or view_rule(node)
    if found is not None:
        return found
    if reduced_dims(node, metas) is not None:
        return REDUCTION_RULES.get(node.bare_op)
    if not is_pointwise(node, metas) or _bounded_by_tensor(node) or node.kwargs.get("rounding_mode"):
        return None
    return POINTWISE_RULES.get(node.bare_op)


def _bounded_by_tensor(node: Node) -> bool:
    """Whether a clamp's bounds, what a masked fill puts in, or a power's exponent, are tensors (or base or exponent 0).

    PyTorch's gradient of ``x**0`` is 0 everywhere, which the formula of other exponents does not give at 0.
    """
    if node.bare_op == "pow":
        return isinstance(node.args[1], Ref) or not isinstance(node.args[0], Ref) or node.args[1] == 0
    bounds = (*node.args[1:], *node.kwargs.values()) if node.bare_op.startswith("clamp") else node.args[2:]
    checked = node.bare_op.startswith("clamp") or node.bare_op == "masked_fill"
    return checked and any(isinstance(item, Ref) for item in bounds)


@dataclass(frozen=True)
class Segment:
    """Part of a graph that becomes one ``torch.autograd.Function``.

    ``needing`` are the names, inputs included, that gradients flow to; ``fixed`` those that stand for parameters.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    needing: frozenset[str]
    fixed: frozenset[str]


@dataclass(frozen=True)
class Reverse:
    """The backward graph of a segment. ``saved`` are the forward values it reads, ``cotangents`` the placeholders of
    the outputs' gradients, ``gradients`` one value for each of the segment's inputs (None where none is needed)."""

    graph: Graph
    saved: tuple[str, ...]
    cotangents: tuple[str, ...]
    gradients: tuple[str | None, ...]


def differentiate(
    segment: Segment, metas: Mapping[str, TensorMeta], names: Mapping[str, str], *, exact_maxima: bool
) -> Reverse:
    """Return the gradients of ``segment``'s inputs as a graph.

    Args:
        segment: what to differentiate; every node that gradients flow through has a rule.
        metas: of all forward values.
        names: readable names of forward values.
        exact_maxima: maxima that a softmax subtracts may be used otherwise too: let gradients flow through them.
    """
    forward = {node.name: node for node in segment.nodes}
    given = frozenset([*segment.inputs, *segment.outputs, *_factors(segment, metas)])
    tops = () if exact_maxima else (n for n in forward if n.startswith("row_max") and forward[n].bare_op == "amax")
    cotangents = {name: _cotangent(names[name], metas) for name in segment.outputs if name in segment.needing}
    known = {**metas, **{d: _dense(metas[name]) for name, d in cotangents.items()}}
    tape = Tape(forward, known, {**names, **{d: d for d in cotangents.values()}}, given, frozenset(tops))
    sums = {name: tape.value(Ref(cotangent)) for name, cotangent in cotangents.items()}
    for node in reversed(segment.nodes):
        gradient = sums.get(node.name)
        if gradient is None or node.name not in segment.needing:
            continue
        rule = softmax_rule(node, forward) or rule_of(node, metas)
        if rule is None:
            continue
        tape.hint = "part"
        for operand, part in rule(tape, node, gradient):
            if not isinstance(operand, Ref) or operand.name not in segment.needing:
                continue
            repeats = is_pointwise(node, metas)
            own = tape.summed(part, node.meta.shape, metas[operand.name].shape) if repeats else part
            before, own = sums.get(operand.name), tape.widen(own)
            sums[operand.name] = own if before is None else tape.emit("add.Tensor", before, own)
    return _closed(segment, tape, sums, tuple(cotangents.values()))


def _cotangent(name: str, taken: Mapping[str, TensorMeta]) -> str:
    wish = f"d_{name}"
    while wish in taken:
        wish += "_"
    return wish


def _factors(segment: Segment, metas: Mapping[str, TensorMeta]) -> list[str]:
    """What products read that another factor's gradient needs: it is saved."""
    products = [item for item in (product_of(node, metas) for node in segment.nodes) if item is not None]
    pairs = [pair for item in products for pair in ((item.left, item.right), (item.right, item.left))]
    return [kept for kept, other in pairs if other in segment.needing]


def _dense(meta: TensorMeta) -> TensorMeta:
    """Metadata of an output's gradient: in the output's layout where that has no gaps, else row-major."""
    return meta if memory_order(meta) is not None else contiguous_meta(meta.shape, meta.dtype)


def _closed(segment: Segment, tape: Tape, sums: Mapping[str, Ref], cotangents: tuple[str, ...]) -> Reverse:
    """Round the inputs' gradients to their dtypes, drop what nobody reads, name gradients after their values."""
    gradients: list[Ref | None] = []
    for name in segment.inputs:
        if name not in segment.needing or name not in sums:
            gradients.append(None)
            continue
        meta = tape.metas[name]
        gradients.append(tape.narrow(tape.full(sums[name], meta.shape), meta.dtype))
    wanted = [item.name for item in gradients if item is not None]
    nodes = _live(tape.draft.nodes, wanted)
    final = {name: item for name, item in zip(segment.inputs, gradients, strict=True) if item is not None}
    table = _gradient_names(nodes, (final, sums), tape)
    nodes = [_renamed(node, table) for node in nodes]
    results = tuple(None if item is None else table.get(item.name, item.name) for item in gradients)
    nodes = _shared(nodes, tape.metas)
    made = {node.name for node in nodes}
    read = dict.fromkeys(name for node in nodes for name in node.inputs())
    read |= dict.fromkeys(name for name in results if name is not None)
    saved = tuple(name for name in read if name not in made and name not in cotangents)
    placeholders = [
        Placeholder(name, "parameter" if name in segment.fixed else "input", tape.names[name], tape.metas[name])
        for name in (*saved, *cotangents)
    ]
    output = Pack("tuple", tuple(None if name is None else Ref(name) for name in results))
    graph = Graph("backward", True, (), (), tuple(placeholders), tuple(nodes), output)
    return Reverse(graph, saved, cotangents, results)


def _shared(nodes: Sequence[Node], metas: Mapping[str, TensorMeta]) -> list[Node]:
    """Divisions by sizes name a tensor that has them and is read anyway; without one the number stays."""
    made = {node.name for node in nodes}
    read = [name for node in nodes for name in node.inputs() if name not in made]
    found = []
    for node in nodes:
        if node.op != f"aten.{SHARE}":
            found.append(node)
            continue
        value, count, dims, shape = node.args
        tensor = next((name for name in read if metas[name].shape == shape), None)
        if tensor is None:
            found.append(replace(node, op="aten.div.Tensor", args=(value, count)))
        else:
            found.append(replace(node, args=(value, Ref(tensor), dims)))
    return found


def _live(nodes: Sequence[Node], wanted: Sequence[str]) -> list[Node]:
    needed, kept = set(wanted), []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed |= set(node.inputs())
    return kept[::-1]


def _gradient_names(nodes: Sequence[Node], found: Sequence[Mapping[str, Ref]], tape: Tape) -> dict[str, str]:
    """``d_<value>`` for every gradient that is a node of its own, ``d_<value>_wide`` for what is rounded to it."""
    made = {node.name for node in nodes} - set(tape.forward)
    taken = {*tape.metas, *tape.draft.taken}
    table: dict[str, str] = {}
    for value, gradient in (pair for mapping in found for pair in mapping.items()):
        wish = f"d_{tape.names[value]}"
        wish = f"{wish}_wide" if wish in taken else wish
        if gradient.name in made and gradient.name not in table and wish not in taken:
            table[gradient.name] = wish
            taken.add(wish)
    return table


def _renamed(node: Node, table: Mapping[str, str]) -> Node:
    def rename(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(table.get(value.name, value.name))
        return tuple(rename(item) for item in value) if isinstance(value, tuple) else value

    kwargs = {key: rename(value) for key, value in node.kwargs.items()}
    return replace(node, name=table.get(node.name, node.name), args=rename(node.args), kwargs=kwargs)
