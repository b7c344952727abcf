"""Cheap values that several kernels read are computed in each of them, not written by one and read by the others.

A value costs a write and one read for each kernel that wants it; computing it again costs reads of what it is made
from. Vectors that broadcast (a convolution's bias, a norm's weights) are free, tensors of full size count as they are,
unless the kernel reads them anyway. So a bias and an activation behind a convolution are computed again in both passes
of a norm, and a sum of two tensors is not.

Left out: values that a torch operator or the module's caller reads (they are in memory in any case), reductions and
products, and long chains of expensive operators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.expression import is_pointwise, scalar_flops
from drk.assistant.synth.planner import plan
from drk.assistant.synth.regions import Region, Rules
from drk.assistant.synth.rewrites import without_dead
from drk.gym.graph import Graph, Node, Pack, Ref, TensorMeta

MAX_FLOPS = 48
"""Most arithmetic instructions for an element that are done once more for each further kernel."""
ROUNDS = 4
_READERS = frozenset({"row", "split", "pointwise", "pool", "depthwise"})


@dataclass(frozen=True)
class _Chain:
    """A written value, the nodes that make it, the region that does, and those that read it."""

    value: str
    nodes: tuple[Node, ...]
    maker: Region
    readers: tuple[Region, ...]


def planned_with_recomputing(graph: Graph, rules: Rules) -> tuple[Graph, list[Region]]:
    """Return the graph with cheap values repeated for each kernel that reads them, and its regions."""
    regions = plan(graph, rules)
    for _ in range(ROUNDS):
        chains = _worthwhile(graph, regions)
        if not chains:
            break
        graph = _repeated(graph, chains)
        regions = plan(graph, rules)
    return graph, regions


def _worthwhile(graph: Graph, regions: Sequence[Region]) -> list[_Chain]:
    """Chains whose repetition saves traffic, none of which reads what another makes."""
    metas, users = graph.metas(), graph.users()
    owner = {name: region for region in regions for name in region.names}
    found: list[_Chain] = []
    touched: set[str] = set()
    for region in regions:
        for operand in region.outputs if region.kind in _READERS else ():
            chain = _chain(operand.value, region, owner, users, metas)
            if chain is None or touched & {node.name for node in chain.nodes} or not _saves(chain, metas):
                continue
            touched |= {node.name for node in chain.nodes}
            found.append(chain)
    return found


def _chain(
    value: str,
    maker: Region,
    owner: Mapping[str, Region],
    users: Mapping[str, tuple[str, ...]],
    metas: Mapping[str, TensorMeta],
) -> _Chain | None:
    """What makes ``value`` inside its region and who reads it, or None where it must be written anyway."""
    inside = {node.name: node for node in maker.nodes}
    needed, pending = set[str](), [value]
    while pending:
        name = pending.pop()
        if name in inside and name not in needed:
            needed.add(name)
            pending += inside[name].inputs()
    nodes = tuple(node for node in maker.nodes if node.name in needed)
    if not all(is_pointwise(node, metas) for node in nodes) or scalar_flops(nodes) > MAX_FLOPS:
        return None
    if any(node.bare_op == "contiguous" for node in nodes):
        return None
    outside = [owner.get(user) for user in users[value] if user not in inside]
    if not outside or any(region is None or region.kind not in _READERS for region in outside):
        return None
    readers: list[Region] = []
    for region in outside:
        if region is not None and not any(region is other for other in readers):
            readers.append(region)
    return _Chain(value, nodes, maker, tuple(readers))


def _saves(chain: _Chain, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether reads of the chain's inputs cost less than writing its value and reading that."""
    value = metas[chain.value]
    inside = {node.name for node in chain.nodes}
    inputs = {name for node in chain.nodes for name in node.inputs()} - inside
    alone = len(chain.maker.nodes) == len(chain.nodes) and len(chain.maker.outputs) == 1
    if alone and len(chain.readers) < 2:
        return False  # the planner had tried to put the two together
    written = value.size_bytes * (1 + len(chain.readers))
    if alone:
        written += sum(metas[name].size_bytes for name in inputs)
    repeated = 0
    for reader in chain.readers:
        read = {operand.value for operand in (*reader.inputs, *reader.pooled)}
        repeated += sum(metas[name].size_bytes for name in inputs - read)
    return repeated < written


def _repeated(graph: Graph, chains: Sequence[_Chain]) -> Graph:
    """The graph with a copy of each chain for each of its readers, just behind the original."""
    taken = set(graph.names())
    copies: dict[str, list[Node]] = {}
    tables: dict[str, dict[str, str]] = {}
    for chain in chains:
        for reader in chain.readers:
            table: dict[str, str] = {}
            for node in chain.nodes:
                table[node.name] = _fresh(node.name, taken)
                copy = replace(node, name=table[node.name], args=_renamed(node.args, table))
                copies.setdefault(chain.value, []).append(replace(copy, kwargs=_renamed_mapping(node.kwargs, table)))
            for node in reader.nodes:
                tables.setdefault(node.name, {})[chain.value] = table[chain.value]
    nodes: list[Node] = []
    for node in graph.nodes:
        table = tables.get(node.name, {})
        own = replace(node, args=_renamed(node.args, table), kwargs=_renamed_mapping(node.kwargs, table))
        nodes += [own, *copies.get(node.name, ())]
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _fresh(name: str, taken: set[str]) -> str:
    count = 1
    while f"{name}_again_{count}" in taken:
        count += 1
    taken.add(f"{name}_again_{count}")
    return f"{name}_again_{count}"


def _renamed(value: Any, table: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(table.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(_renamed(item, table) for item in value)
    return replace(value, items=_renamed(value.items, table)) if isinstance(value, Pack) else value


def _renamed_mapping(values: Mapping[str, Any], table: Mapping[str, str]) -> dict[str, Any]:
    return {key: _renamed(value, table) for key, value in values.items()}
