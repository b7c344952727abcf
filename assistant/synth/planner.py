"""The fusion planner: which nodes of a graph become one kernel.

Every fusible node starts alone; along the graph's edges two regions are merged whenever the union is again a region
that a kernel can compute and no path leaves it and comes back. What no region takes stays a torch operator.

Left out: costs. Merging is greedy in graph order; which rules pay is for the search to measure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from drk.assistant.synth.attention_region import find_attention
from drk.assistant.synth.bags import bags_of
from drk.assistant.synth.banded_region import build_banded_region
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.gather_region import build_gather_region
from drk.assistant.synth.gathers import gather_of
from drk.assistant.synth.grid_sampling import build_grid_region, grid_sample_of
from drk.assistant.synth.ordered_sums import build_ordered_region, is_segment_sum
from drk.assistant.synth.ordering import build_order_region
from drk.assistant.synth.orders import order_of
from drk.assistant.synth.patches import build_patch_region, patches_of
from drk.assistant.synth.pixel_region import build_pixel_region, pixel_product
from drk.assistant.synth.pooling_region import build_pooling_region
from drk.assistant.synth.ragged import build_bag_region
from drk.assistant.synth.regions import Facts, Region, Rules, build_region, facts_of, product_of, reduced_dims
from drk.assistant.synth.resamples import resample_of
from drk.assistant.synth.resampling_region import build_resampling_region
from drk.assistant.synth.row_joins import joined_of
from drk.assistant.synth.running_places import build_places_region, places_of
from drk.assistant.synth.scan_region import build_scan_region, is_flip, is_scan
from drk.assistant.synth.scatter_region import build_scatter_region
from drk.assistant.synth.scatters import scatter_of
from drk.assistant.synth.windows import window_of
from drk.gym.graph import Graph, Node, TensorMeta


def build(nodes: list[Node], facts: Facts, rules: Rules) -> Region | None:
    """Return the region of ``nodes`` (in graph order), or None when no kernel can compute them together."""
    if facts.special is not None and not any(node.name in facts.special for node in nodes):
        return build_region(nodes, facts, rules)
    return _of_its_kind(nodes, facts, rules)


def _of_its_kind(nodes: list[Node], facts: Facts, rules: Rules) -> Region | None:
    """The region of ``nodes``, whose kind one of them may decide."""
    if any(window_of(node, facts.metas) is not None for node in nodes):
        return build_pooling_region(nodes, facts)
    if any(resample_of(node, facts.metas) is not None for node in nodes):
        return build_resampling_region(nodes, facts)
    if rules.pixels and any(pixel_product(node, facts.metas) is not None for node in nodes):
        return build_pixel_region(nodes, facts)
    if any(node.name in facts.bands for node in nodes):
        return build_banded_region(nodes, facts, rules)
    if any(is_scan(node, facts.metas) for node in nodes):
        return build_scan_region(nodes, facts)
    for read, build_alone in _ALONE:
        if any(read(node, facts.metas) is not None for node in nodes):
            return build_alone(nodes, facts)
    if any(scatter_of(node, facts.metas) is not None for node in nodes):
        ordered = not rules.atomics and any(is_segment_sum(scatter_of(node, facts.metas)) for node in nodes)
        return build_ordered_region(nodes, facts) if ordered else build_scatter_region(nodes, facts, rules)
    if any(read(node, facts.metas) is not None for read in (gather_of, joined_of) for node in nodes):
        return build_gather_region(nodes, facts)
    return build_region(nodes, facts, rules)


_Read = Callable[[Node, Mapping[str, TensorMeta]], object]
_Build = Callable[[list[Node], Facts], Region | None]
_ALONE: Sequence[tuple[_Read, _Build]] = (
    (order_of, build_order_region),
    (bags_of, build_bag_region),
    (places_of, build_places_region),
    (patches_of, build_patch_region),
    (grid_sample_of, build_grid_region),
)
"""Operators that kernels compute without neighbours: how they are read, and their regions."""
_OTHERS: Sequence[_Read] = (gather_of, joined_of, scatter_of, *(read for read, _ in _ALONE))


@dataclass
class _Planner:
    graph: Graph
    facts: Facts
    rules: Rules
    group: dict[str, int] = field(default_factory=dict)
    members: dict[int, list[Node]] = field(default_factory=dict)
    refused: set[tuple[int, int, int, int]] = field(default_factory=set)
    """Pairs of groups, each with its size (which only grows), that no kernel can compute together."""
    following: dict[int, set[int]] = field(default_factory=dict)
    preceding: dict[int, set[int]] = field(default_factory=dict)

    def run(self) -> list[Region]:
        nodes = {node.name: node for node in self.graph.nodes}
        for index, node in enumerate(self.graph.nodes):
            self.group[node.name] = index
            self.members[index] = [node]
        cores = find_attention(self.graph, self.facts, self.rules.excluded) if self.rules.attention else []
        taken = frozenset(name for core in cores for name in core.names)
        fusible = {node.name for node in self.graph.nodes if node.name not in taken and self._fusible(node)}
        self._take_flips(fusible)
        self._connect()
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes:
                for source in node.inputs() if node.name in fusible else ():
                    if source in fusible and source in nodes:
                        changed |= self._merge(self.group[source], self.group[node.name])
        self._merge_siblings(fusible)
        groups = [group for group in self.members.values() if all(node.name in fusible for node in group)]
        regions = [build(group, self.facts, self.rules) for group in groups]
        return [*cores, *(region for region in regions if region is not None)]

    def _take_flips(self, fusible: set[str]) -> None:
        """Put a scan together with the two flips around it, which no region holds otherwise."""
        by_name = {node.name: node for node in self.graph.nodes}
        for scan in self.graph.nodes:
            if scan.name not in fusible or not is_scan(scan, self.facts.metas):
                continue
            flips = [by_name.get(name) for name in (*scan.inputs(), *self.facts.users[scan.name])]
            union = [node for node in (*flips, scan) if node is not None and (node is scan or is_flip(node))]
            union.sort(key=lambda node: self.facts.order[node.name])
            if len(union) == 3 and build_scan_region(union, self.facts) is not None:
                own = self.group[scan.name]
                for node in union:
                    self.members.pop(self.group[node.name])
                    self.group[node.name] = own
                self.members[own] = union
                fusible |= {node.name for node in union}

    def _merge_siblings(self, fusible: set[str]) -> None:
        """Merge regions without products that read the same tensor, so that it is read once."""
        products = {node.name for node in self.graph.nodes if self._is_product(node)}
        for name in self.facts.order:
            users = [user for user in self.facts.users[name] if user in fusible and name not in self.facts.fixed]
            for first, second in pairwise(users):
                left, right = self.group[first], self.group[second]
                if not any(node.name in products for node in (*self.members[left], *self.members[right])):
                    self._merge(left, right)

    def _fusible(self, node: Node) -> bool:
        if node.name in self.rules.excluded | self.facts.sized or any(
            name not in self.facts.metas for name in node.inputs()
        ):
            return False
        if product_of(node, self.facts.metas) is not None:
            return self.rules.matmul
        if pixel_product(node, self.facts.metas) is not None and self.rules.pixels:
            return True
        if reduced_dims(node, self.facts.metas) is not None:
            return self.rules.row
        windowed = self._windowed(node)
        if windowed is not None:
            return windowed
        if node.name in self.facts.bands:
            return self.rules.matmul
        if is_scan(node, self.facts.metas):
            return self.rules.row
        if any(read(node, self.facts.metas) is not None for read in _OTHERS):
            return self.rules.gather
        if node.bare_op == "contiguous" and set(node.inputs()) <= self.facts.fixed:
            return False  # a parameter is kept in that layout
        return (self.rules.pointwise or self.rules.row or self.rules.matmul) and is_pointwise(node, self.facts.metas)

    def _windowed(self, node: Node) -> bool | None:
        """Whether the rules let a pool, a depthwise convolution or an interpolation be fused; None for others."""
        window = window_of(node, self.facts.metas)
        if window is not None:
            return self.rules.pool if window.weight is None else self.rules.depthwise
        return self.rules.pool if resample_of(node, self.facts.metas) is not None else None

    def _is_product(self, node: Node) -> bool:
        if product_of(node, self.facts.metas) is not None:
            return True
        return self.rules.pixels and pixel_product(node, self.facts.metas) is not None

    def _connect(self) -> None:
        """Note which groups read what others make."""
        self.following = {group: set() for group in self.members}
        self.preceding = {group: set() for group in self.members}
        for node in self.graph.nodes:
            for user in self.facts.users[node.name]:
                if user != "output" and self.group[user] != self.group[node.name]:
                    self.following[self.group[node.name]].add(self.group[user])
                    self.preceding[self.group[user]].add(self.group[node.name])

    def _merge(self, left: int, right: int) -> bool:
        pair = (left, len(self.members[left]), right, len(self.members[right]))
        if left == right or pair in self.refused or self._returns(left, right):
            return False
        union = sorted(self.members[left] + self.members[right], key=lambda node: self.facts.order[node.name])
        if build(union, self.facts, self.rules) is None:
            self.refused.add(pair)
            return False
        self.members[left] = union
        for node in self.members.pop(right):
            self.group[node.name] = left
        for ways, back in ((self.following, self.preceding), (self.preceding, self.following)):
            for other in ways.pop(right):
                back[other].discard(right)
                if other != left:
                    ways[left].add(other)
                    back[other].add(left)
        return True

    def _returns(self, left: int, right: int) -> bool:
        """Whether a path leaves the union of two groups and comes back."""
        union = {left, right}
        pending = list((self.following[left] | self.following[right]) - union)
        seen: set[int] = set()
        while pending:
            group = pending.pop()
            if group in seen:
                continue
            seen.add(group)
            if self.following[group] & union:
                return True
            pending.extend(self.following[group])
        return False


def plan(graph: Graph, rules: Rules) -> list[Region]:
    """Return the regions of ``graph`` under ``rules``, in no particular order; other nodes stay torch operators."""
    facts = facts_of(graph)
    special = frozenset(node.name for node in graph.nodes if _is_special(node, facts))
    return _Planner(graph, replace(facts, special=special), rules).run()


def _is_special(node: Node, facts: Facts) -> bool:
    """Whether a region with ``node`` is none of :func:`build_region`'s."""
    reads: Sequence[_Read] = (window_of, resample_of, pixel_product, *_OTHERS)
    known = node.name in facts.bands or is_scan(node, facts.metas)
    return known or any(read(node, facts.metas) is not None for read in reads)
