"""Plans a backward graph: sums over rows, which parameters' gradients are, join the kernel that has their rows at hand.

The planner's regions hold reductions over one set of dimensions only. A gradient of a bias or of a norm's weight sums
over the other dimensions, the rows. Such sums are set aside while the rest is planned; each then joins the region that
makes or reads what it sums (kind ``sums``, :mod:`drk.assistant.synth.backward_sums`), or becomes a region of its own.

Sums over other sets of dimensions (a group norm's weight) get kernels of their own, which compute again what they read
rather than have it written. Left out: joining a matrix product; sums of what is in memory anyway are torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from drk.assistant.synth.domain import Operand
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.planner import build, plan
from drk.assistant.synth.regions import REDUCTIONS, Facts, Region, Rules, facts_of, product_of, reduced_dims
from drk.gym.graph import Graph, Node, Ref, references

MAX_SUM_COLUMNS = 8192
"""Longest row of a row kernel that also sums over rows: sums live in registers beside the row."""
LEAST_ROWS = 2
OWN = "_again_"
"""In the names of values that are computed once more for a sum."""


def plan_backward(graph: Graph, rules: Rules) -> list[Region]:
    """Return the regions of a backward graph under ``rules``, in no particular order."""
    facts = facts_of(graph)
    sums = [node for node in graph.nodes if rules.row and _sums_rows(node, facts) and node.name not in rules.excluded]
    aside = frozenset(node.name for node in sums)
    own = frozenset(node.name for node in graph.nodes if OWN in node.name or _scattered(node, facts))
    excluded = rules.excluded | aside | own
    regions = [item for item in plan(graph, replace(rules, matmul=False, excluded=excluded)) if item.outputs]
    if rules.matmul:
        products = frozenset(node.name for node in graph.nodes if product_of(node, facts.metas) is not None)
        regions = [_without_prologue(item, facts, rules, products) for item in regions if item.kind in {"row", "split"}]
        taken = frozenset(name for item in regions for name in item.names)
        rest = replace(rules, row=False, excluded=excluded | taken)
        regions += [item for item in plan(graph, rest) if item.outputs]
    others = frozenset(node.name for node in graph.nodes) - (own - aside)
    regions += [item for item in plan(graph, replace(rules, matmul=False, excluded=others)) if item.outputs]
    for node in sums:
        index = next((i for i, region in enumerate(regions) if _takes(region, node, facts)), None)
        if index is not None:
            regions[index] = _joined(regions[index], node, facts)
    return [item for item in regions if len(item.nodes) > 1 or not own & item.names]


def with_own_sums(graph: Graph) -> Graph:
    """Let sums over scattered dimensions, the first among them, read elementwise values computed for them alone."""
    facts, made = facts_of(graph), {node.name: node for node in graph.nodes}
    in_memory = _in_memory(graph, facts)
    clones: dict[tuple[str, tuple[int, ...]], Node] = {}
    nodes: list[Node] = []

    def own(name: str, dims: tuple[int, ...]) -> str:
        node = made.get(name)
        if node is None or name in in_memory or not is_pointwise(node, facts.metas):
            return name
        if (name, dims) not in clones:
            args = tuple(Ref(own(arg.name, dims)) if isinstance(arg, Ref) else arg for arg in node.args)
            clones[name, dims] = replace(node, name=f"{name}{OWN}{len(clones)}", args=args)
            nodes.append(clones[name, dims])
        return clones[name, dims].name

    for node in graph.nodes:
        dims = _scattered(node, facts) or _too_wide(node, graph, facts)
        nodes.append(replace(node, args=(Ref(own(node.args[0].name, dims)), *node.args[1:])) if dims else node)
    needed = {*references(graph.output)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.name in needed:
            kept.append(node)
            needed |= set(node.inputs())
    return replace(graph, nodes=tuple(reversed(kept)))


def _scattered(node: Node, facts: Facts) -> tuple[int, ...]:
    """The dimensions of a sum over some that are not just the leading ones, the first among them; else none."""
    found = reduced_dims(node, facts.metas) if node.bare_op == "sum" else None
    if found is None or 0 not in found[0] or _sums_rows(node, facts):
        return ()
    return found[0] if len(found[0]) < len(facts.metas[node.args[0].name].shape) else ()


def _too_wide(node: Node, graph: Graph, facts: Facts) -> tuple[int, ...]:
    """The dimensions of a sum over rows that are too long for the row kernel that has them, or none."""
    if not _sums_rows(node, facts) or math.prod(node.meta.shape) <= MAX_SUM_COLUMNS:
        return ()
    shape = facts.metas[node.args[0].name].shape
    sources = [item.args[0].name for item in graph.nodes if reduced_dims(item, facts.metas) and item is not node]
    rows = any(facts.metas[name].shape == shape for name in sources if name not in facts.fixed)
    return tuple(range(len(shape) - len(node.meta.shape))) if rows else ()


def _in_memory(graph: Graph, facts: Facts) -> frozenset[str]:
    """Values that are written in any case: results, and what products and torch operators read."""
    read = {name for name, users in facts.users.items() if "output" in users}
    for node in graph.nodes:
        if not is_pointwise(node, facts.metas) and reduced_dims(node, facts.metas) is None:
            read |= set(node.inputs())
    return frozenset(read)


def _without_prologue(region: Region, facts: Facts, rules: Rules, products: frozenset[str]) -> Region:
    """Leave what first reads a matrix product's result, and is all that does, to the product's epilogue."""
    nodes = list(region.nodes)
    for node in region.nodes:
        inside = {item.name for item in nodes}
        alone = [name for name in node.inputs() if name in products and facts.users[name] == (node.name,)]
        if not alone or inside & set(node.inputs()) or not is_pointwise(node, facts.metas):
            continue
        rest = [item for item in nodes if item is not node]
        if build(rest, facts, rules) is not None:
            nodes = rest
    smaller = build(nodes, facts, rules) if len(nodes) < len(region.nodes) else None
    return region if smaller is None else smaller


def holds_rows(region: Region) -> bool:
    """Whether a region reduces rows, so that a program holds whole ones."""
    sums = row_sums(region) if region.kind == "sums" else []
    return any(node.bare_op in REDUCTIONS and node not in sums for node in region.nodes)


def row_sums(region: Region) -> list[Node]:
    """The nodes of a ``sums`` region that sum over its rows."""
    edge = len(region.shape) - region.columns
    return [
        node
        for node in region.nodes
        if node.bare_op == "sum" and _dims(node, len(region.shape)) == tuple(range(edge)) and edge
    ]


def _dims(node: Node, rank: int) -> tuple[int, ...]:
    dims = node.args[1]
    return tuple(sorted(dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,))))


def _sums_rows(node: Node, facts: Facts) -> bool:
    """Whether a node sums over all leading dimensions of several rows, and drops them."""
    found = reduced_dims(node, facts.metas) if node.bare_op == "sum" else None
    if found is None or found[1] or not isinstance(node.args[0], Ref):
        return False
    shape = facts.metas[node.args[0].name].shape
    edge = len(found[0])
    columns = math.prod(shape[edge:])
    return found[0] == tuple(range(edge)) and edge < len(shape) and math.prod(shape[:edge]) >= LEAST_ROWS < columns


def _takes(region: Region, node: Node, facts: Facts) -> bool:
    """Whether ``region`` walks what ``node`` sums, in rows that are the node's columns."""
    source, rank = node.args[0].name, len(region.shape)
    columns = len(node.meta.shape)
    if region.kind not in {"row", "pointwise", "sums"} or facts.metas[source].shape != region.shape:
        return False
    operands = {item.value: item for item in (*region.inputs, *region.outputs)}
    if (source not in region.names and source not in operands) or _depends(region, node.name, facts):
        return False
    if region.columns not in {0, columns} or not any(_in_order(item, rank) for item in operands.values()):
        return False
    if any(item.strided or not _in_order(item, rank) for item in operands.values() if all(item.varies)):
        return False
    return not holds_rows(region) or math.prod(region.shape[-columns:]) <= MAX_SUM_COLUMNS


def _depends(region: Region, name: str, facts: Facts) -> bool:
    """Whether a region needs the value ``name``, at once or by what lies between."""
    pending, seen = [name], {name}
    while pending:
        readers = set(facts.users.get(pending.pop(), ())) - seen
        if readers & region.names:
            return True
        seen |= readers
        pending += readers
    return False


def _in_order(operand: Operand, rank: int) -> bool:
    return operand.axes == tuple(range(-rank, 0))


def _joined(region: Region, node: Node, facts: Facts) -> Region:
    """``region`` with a sum over its rows; what only such sums read is not written any more."""
    joined = replace(region, kind="sums", nodes=(*region.nodes, node), columns=len(node.meta.shape))
    summed = {item.name for item in row_sums(joined)}
    outputs = [item for item in region.outputs if not set(facts.users[item.value]) <= {*summed, *region.names}]
    return replace(joined, outputs=tuple(outputs))


def kernels_for(regions: Sequence[Region]) -> list[Region]:
    """The regions that are worth a kernel: all but single elementwise operators."""
    return [region for region in regions if region.kind != "pointwise" or len(region.nodes) > 1]
