"""Attention spelled out: a batched product, pointwise operators on the scores, a softmax over them, a second product.

Found after the rewrites, where the softmax is a maximum, an exponential, a sum and a division (in float32 and cast back
where the module has it so: kernels compute in float32 in any case). Scale, bias, masks and
ALiBi slopes are whatever pointwise operators stand between product and softmax; their operands broadcast to the scores.
Nothing else may read the scores or the probabilities: they are never written.

Keys that a mask hides at the end are skipped (:mod:`drk.assistant.synth.hidden_keys`). Left out: dropout in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from drk.assistant.synth.decompositions import LEAST_TOTAL, lowest_shift
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.frames import Frame
from drk.assistant.synth.hidden_keys import Attention, hides_future, seen_where
from drk.assistant.synth.regions import Facts, Product, Region, product_of, reduced_dims, region_inputs
from drk.gym.graph import Graph, Node, Ref

MAX_HEAD = 256
"""Longest head (inner dimension of either product) that stays in registers."""


def find_attention(graph: Graph, facts: Facts, excluded: Set[str] = frozenset()) -> list[Region]:
    """Return the attention regions of ``graph``, none of which holds a node of ``excluded``."""
    by_name = {node.name: node for node in graph.nodes}
    found = []
    for node in graph.nodes:
        region = _match(node, by_name, facts)
        if region is not None and not region.names & excluded:
            found.append(region)
    return found


def _match(node: Node, by_name: Mapping[str, Node], facts: Facts) -> Region | None:
    """The region whose second product is ``node``."""
    value = product_of(node, facts.metas)
    if value is None or not value.batched or value.left not in by_name:
        return None
    narrowed = _narrowing(by_name[value.left], by_name, facts)
    softmax = _softmax_before(by_name[value.left] if narrowed is None else narrowed, by_name, facts)
    if softmax is None:
        return None
    *steps, scores = softmax
    steps += [] if narrowed is None else [by_name[value.left]]
    inside = {node.name, *(step.name for step in steps)}
    chain = _chain(scores, by_name, facts, inside)
    if chain is None:
        return None
    first = product_of(chain[0], facts.metas)
    assert first is not None
    nodes = sorted([*chain, *steps, node], key=lambda item: facts.order[item.name])
    return _region(nodes, chain, (first, value), scores, by_name, facts)


def _narrowing(node: Node, by_name: Mapping[str, Node], facts: Facts) -> Node | None:
    """What ``node`` casts to a narrow type, if it is such a cast: a softmax in float32 gets the values' type again."""
    source = by_name.get(node.args[0].name) if node.args and isinstance(node.args[0], Ref) else None
    if node.bare_op not in {"to", "_to_copy"} or source is None or facts.users[source.name] != (node.name,):
        return None
    wide = source.meta.dtype == "float32" and source.meta.shape == node.meta.shape
    return source if wide and node.meta.dtype in {"float16", "bfloat16"} and len(facts.users[node.name]) == 1 else None


def _softmax_before(node: Node, by_name: Mapping[str, Node], facts: Facts) -> tuple[Node, ...] | None:
    """(division, exponential, sum, centred, maximum, scores) of a softmax over the last dimension, or None.

    Where it is a safe one, which bounds maximum and sum from below, the bounds stand before the scores.
    """
    if node.bare_op != "div" or len(node.args) != 2 or not all(isinstance(arg, Ref) for arg in node.args):
        return None
    power, divisor = (by_name.get(arg.name) for arg in node.args)
    total = _bounded(divisor, LEAST_TOTAL, by_name)
    if power is None or divisor is None or total is None or power.bare_op != "exp":
        return None
    centred = by_name.get(power.args[0].name)
    if centred is None or centred.bare_op != "sub" or not all(isinstance(arg, Ref) for arg in centred.args):
        return None
    scores, shift = (by_name.get(arg.name) for arg in centred.args)
    top = _bounded(shift, lowest_shift(node.meta.dtype), by_name)
    if scores is None or shift is None or top is None or (shift is top) != (divisor is total):
        return None
    if not _reduces(total, "sum", power.name, facts) or not _reduces(top, "amax", scores.name, facts):
        return None
    readers = {power.name: {node.name, total.name}, divisor.name: {node.name}, centred.name: {power.name}}
    readers |= {shift.name: {centred.name}, scores.name: {centred.name, top.name}}
    if divisor is not total:
        readers |= {total.name: {divisor.name}, top.name: {shift.name}}
    if any(set(facts.users[name]) != users for name, users in readers.items()) or len(facts.users[node.name]) != 1:
        return None
    bounds = () if divisor is total else (divisor, shift)
    return node, power, total, centred, top, *bounds, scores


def _bounded(node: Node | None, least: float, by_name: Mapping[str, Node]) -> Node | None:
    """What ``node`` bounds by ``least`` from below, or ``node`` itself."""
    if node is None or node.bare_op != "clamp_min" or node.args[1:] != (least,):
        return node
    return by_name.get(node.args[0].name)


def _reduces(node: Node, op: str, source: str, facts: Facts) -> bool:
    reduced = reduced_dims(node, facts.metas)
    last = len(facts.metas[source].shape) - 1
    return node.bare_op == op and reduced == ((last,), True) and node.args[0] == Ref(source)


def _chain(scores: Node, by_name: Mapping[str, Node], facts: Facts, inside: set[str]) -> list[Node] | None:
    """The product and the pointwise operators that lead from it to ``scores``, in order, or None."""
    if product_of(scores, facts.metas) is not None:
        product = product_of(scores, facts.metas)
        return [scores] if product is not None and product.batched and product.bias is None else None
    if not is_pointwise(scores, facts.metas):
        return None
    for name in scores.inputs():
        source = by_name.get(name)
        if source is None or source.meta.shape != scores.meta.shape or len(facts.users[name]) != 1:
            continue
        chain = _chain(source, by_name, facts, inside)
        if chain is not None:
            return [*chain, scores]
    return None


def _region(
    nodes: list[Node],
    chain: list[Node],
    products: tuple[Product, Product],
    scores: Node,
    by_name: Mapping[str, Node],
    facts: Facts,
) -> Region | None:
    shape = scores.meta.shape
    head, width = facts.metas[products[0].left].shape[-1], facts.metas[products[1].right].shape[-1]
    if max(head, width) > MAX_HEAD or min(head, width) < 8 or shape[-1] < 2:
        return None
    if len(products[1].node.meta.shape) != len(shape) or products[1].node.meta.shape[:-1] != shape[:-1]:
        return None
    frame = Frame(shape, tuple(range(len(shape))), 1)
    inside = {node.name for node in nodes}
    inputs = region_inputs(chain[1:], inside, frame, frozenset(), facts, [])
    factors = {products[0].left, products[0].right, products[1].right}
    if inputs is None or len(factors) < 3 or factors & {operand.value for operand in inputs}:
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    causal = shape[-1] == shape[-2] and hides_future(chain, by_name)
    safe = any(node.bare_op == "clamp_min" for node in nodes if node not in chain)
    columnwise = {operand.value for operand in inputs if operand.varies[-1]}
    return Region(
        "attention",
        tuple(nodes),
        shape,
        1,
        inputs,
        (),
        products=products,
        scalars=scalars,
        attention=Attention(scores.name, causal, safe, seen_where=seen_where(chain, by_name, columnwise)),
    )
