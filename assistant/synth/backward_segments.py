"""Cuts a graph that trains into segments, each of which becomes one ``torch.autograd.Function``.

Operators whose gradients are known here go into segments; those that gradients flow through and that are not known
(convolutions, attention, dropout, indexing) stay calls of torch between them, under torch's own autograd. A value's
level counts how many of these lie on its longest path through segments, and a segment holds one level's nodes, so that
no path leaves a segment and comes back.

Random operators keep their order, so that equal seeds draw equal numbers. Left out: operators with side effects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from drk.assistant.random_operators import draws
from drk.assistant.synth.backward_graph import Segment, rule_of
from drk.assistant.synth.backward_tape import VIEWS
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.regions import facts_of
from drk.gym.graph import Graph, Node

DETACHED = "aten.detach_copy.default"


def with_kept_detaches(graph: Graph) -> Graph:
    """``detach`` under a name that rewrites do not drop: gradients end there."""
    named = {"detach", "detach_"}
    nodes = (replace(node, op=DETACHED) if node.bare_op in named else node for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def needing(graph: Graph) -> frozenset[str]:
    """Names of the values that gradients may flow to: inputs, parameters, and what depends on them.

    Frozen parameters count too: they may be trained later, and a call tells by itself which gradients are wanted.
    """
    found = {
        item.name for item in graph.placeholders if item.meta.dtype in FLOATS and item.kind in {"input", "parameter"}
    }
    for node in graph.nodes:
        floating = any(meta is not None and meta.dtype in FLOATS for meta in node.metas)
        if floating and node.op != DETACHED and found & set(node.inputs()):
            found.add(node.name)
    return frozenset(found)


@dataclass
class _Levels:
    """Level of each value, and whether it exists before the level's segment runs."""

    graph: Graph
    needed: frozenset[str]
    level: dict[str, int] = field(default_factory=dict)
    outside: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for item in self.graph.placeholders:
            self.level[item.name] = 0
            self.outside.add(item.name)
        metas, drawn = self.graph.metas(), 0
        for node in self.graph.nodes:
            names = node.inputs()
            level = max((self.level[name] for name in names), default=0)
            ready = all(name in self.outside or self.level[name] < level for name in names)
            random = draws(node)
            known = len(node.metas) == 1 and node.metas[0] is not None and node.op != "getitem" and not random
            known = known and (node.name not in self.needed or rule_of(node, metas) is not None)
            if known and not (node.bare_op in VIEWS and names and ready):
                self.level[node.name] = level
                continue
            level = level if ready else level + 1
            if random:
                level = drawn = max(level, drawn)
            self.level[node.name] = level
            self.outside.add(node.name)
        self._delay()

    def _delay(self) -> None:
        """Compute what no gradient flows to where it is read, and outside of segments where none of theirs reads it."""
        users = self.graph.users()
        for node in reversed(self.graph.nodes):
            if node.name in self.needed or node.name in self.outside:
                continue
            readers = [name for name in users[node.name] if name != "output"]
            if readers and "output" not in users[node.name] and not self.outside & set(readers):
                self.level[node.name] = min(self.level[name] for name in readers)
        for node in reversed(self.graph.nodes):
            if node.name in self.needed or node.name in self.outside:
                continue
            inside = [n for n in users[node.name] if n != "output" and n not in self.outside]
            if not inside and all(name in self.outside for name in node.inputs()):
                self.outside.add(node.name)


def segments(graph: Graph) -> list[Segment | Node]:
    """Return segments and loose operators in an order in which every value exists before it is read."""
    needed = needing(graph)
    levels = _Levels(graph, needed)
    items: list[Segment | Node] = []
    fixed, users = facts_of(graph).fixed, graph.users()
    for level in range(max(levels.level.values(), default=0) + 1):
        here = [node for node in graph.nodes if levels.level[node.name] == level]
        items += [node for node in here if node.name in levels.outside]
        inside = [node for node in here if node.name not in levels.outside]
        if inside:
            items.append(_segment(inside, users, needed, fixed))
    return items


def _segment(
    nodes: list[Node], users: Mapping[str, tuple[str, ...]], needed: frozenset[str], fixed: frozenset[str]
) -> Segment:
    names = {node.name for node in nodes}
    inputs = dict.fromkeys(name for node in nodes for name in node.inputs() if name not in names)
    outputs = [node.name for node in nodes if any(user not in names for user in users[node.name])]
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs), needed, fixed)
