"""Regions that read through views: elementwise operators before and behind index changes become one kernel.

After the planner: from each elementwise region (and each view that moves data) the views that it reads are followed
back; they join it where nothing else reads them, and so do the elementwise regions behind them. A convolution's bias in
front of a pixel shuffle or a chunk is then added where the shuffled or cut tensor is used, and the shuffle itself is
arithmetic on the load's address.

Regions without a view that moves data or another region behind one stay as they are: a strided read needs no map.
Left out: views that something else reads too, and regions with reductions, products or windows (their inputs' views
stay torch operators).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drk.assistant.synth.cat_maps import is_join, padding
from drk.assistant.synth.domain import Operand, memory_order
from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.expression import is_pointwise, scalar_flops
from drk.assistant.synth.index_maps import NoMap
from drk.assistant.synth.index_rules import is_view, moves_data
from drk.assistant.synth.mapped_sizes import Sizes, sizes_of
from drk.assistant.synth.mapped_trace import Trace, trace
from drk.assistant.synth.regions import MAX_OPERANDS, Facts, Region, Rules, build_region, facts_of, leading_names
from drk.gym.graph import Graph, Node, TensorMeta

MAX_TRIED = 16
"""Most views that are tried one by one where a kernel cannot read through all."""
MAX_FLOPS = 48
"""Most arithmetic instructions that are repeated for each place at which a value is wanted."""


def with_views(graph: Graph, regions: Sequence[Region], excluded: frozenset[str] = frozenset()) -> list[Region]:
    """Return ``regions`` with elementwise ones joined through views; nodes in ``excluded`` stay as they are."""
    return _Joiner(graph, facts_of(graph), list(regions), excluded).run()


_LAYING = {"clone", "contiguous", "reshape", "flatten", "_unsafe_view"}
"""Operators that only lay a tensor out, by a copy where it does not lie so."""


@dataclass
class _Joiner:
    graph: Graph
    facts: Facts
    regions: list[Region]
    excluded: frozenset[str]
    by_name: dict[str, Node] = field(default_factory=dict)
    owners: dict[str, Region] = field(default_factory=dict)
    views: set[str] = field(default_factory=set)

    def run(self) -> list[Region]:
        self.by_name = {node.name: node for node in self.graph.nodes}
        self.regions = [part for region in self.regions for part in self._apart(region)]
        self.owners = {name: region for region in self.regions for name in region.names}
        self.views = {node.name for node in self.graph.nodes if self._free(node)}
        for node in reversed(self.graph.nodes):
            owner = self.owners.get(node.name)
            if owner is not None and _plain(owner) and owner.nodes[-1].name == node.name:
                self._grow(list(owner.nodes), [owner])
            elif owner is None and self._moves(node) and node.name not in self.facts.fixed:
                self._grow([node], [])
        for node in () if self.regions else reversed(self.graph.nodes):
            if node.name not in self.owners and self._moves(node) and node.name not in self.facts.fixed:
                self._copy(node)
        return self.regions

    def _apart(self, region: Region) -> list[Region]:
        """What joins alone read, and was put together for its inputs' sake, as a region for each result."""
        outputs = [operand.value for operand in region.outputs]
        readers = [self.by_name.get(name) for value in outputs for name in self.facts.users[value]]
        joins = all(item is not None and is_join(item) for item in readers)
        if len(outputs) < 2 or not _plain(region) or not joins:
            return [region]
        parts = [
            [node for node in region.nodes if node.name in leading_names(region.nodes, value)] for value in outputs
        ]
        if sum(map(len, parts)) != len(region.nodes):
            return [region]
        found = [build_region(part, self.facts, Rules()) for part in parts]
        return [item for item in found if item is not None] if None not in found else [region]

    def _copy(self, node: Node) -> None:
        """A kernel for what only moves elements."""
        region = self._built([node, *self._fitting([node])])
        if region is not None:
            self.regions.append(region)
            self.owners |= dict.fromkeys(region.names, region)

    def _free(self, node: Node) -> bool:
        owned = node.name in self.owners or node.name in self.excluded | self.facts.sized
        kept = node.name in self.facts.fixed and node.bare_op == "contiguous"  # a parameter is held in that layout
        return not owned and not kept and (is_view(node) or is_join(node))

    def _moves(self, node: Node) -> bool:
        return node.name in self.views and moves_data(node, self.facts.metas)

    def _grow(self, nodes: list[Node], taken: list[Region]) -> None:
        """Take in what lies behind views, as far as a kernel can be written, and replace the regions if any was."""
        found: tuple[Region, list[Region]] | None = None
        while True:
            views = self._fitting(nodes)
            makers = self._makers([*nodes, *views], taken)
            whole = [*nodes, *views]
            moving = any(self._moves(node) for node in whole)
            if views and (taken if moving else len(taken) > 1):
                region = self._built(whole)
                if region is not None:
                    found = region, list(taken)
            extended = next((maker for maker in makers if self._built([*whole, *maker.nodes]) is not None), None)
            if extended is None:
                break
            nodes, taken = [*whole, *extended.nodes], [*taken, extended]
            if len(taken) > 1 or moving:
                region = self._built(nodes)
                found = found if region is None else (region, list(taken))
        if found is None and not taken and self._slowly_moved(nodes[0]):
            self._copy(nodes[0])
        elif found is not None:
            joined, gone = found
            self.regions = [item for item in self.regions if not any(item is other for other in gone)] + [joined]
            self.owners |= dict.fromkeys(joined.names, joined)

    def _slowly_moved(self, node: Node) -> bool:
        """Whether PyTorch takes several passes or narrow reads for what ``node`` alone moves."""
        if node.bare_op in _LAYING and self._follows_attention(node):
            return False
        if any(self._moves(view) for view in self._fitting([node])):
            return True
        if node.bare_op in _LAYING or is_join(node):
            order = memory_order(node.meta)
            sources = [self.facts.metas[name] for name in node.inputs() if name in self.facts.metas]
            if padding(node) is None:
                narrow = [meta.numel for meta in sources if not _innermost_alike(meta, node.meta, order)]
                return sum(narrow) * 4 > node.meta.numel
        return True

    def _follows_attention(self, node: Node) -> bool:
        """Whether attention, whose result lies with heads beside features, is what ``node`` lays so: that is free."""
        sources = [name for name in node.inputs() if name in self.by_name]
        while sources and all(name in self.views for name in sources):
            sources = [name for view in sources for name in self.by_name[view].inputs() if name in self.by_name]
        owners = [self.owners.get(name) for name in sources]
        return bool(sources) and all(
            self.by_name[name].bare_op == "scaled_dot_product_attention" if owner is None else owner.kind == "attention"
            for name, owner in zip(sources, owners, strict=True)
        )

    def _fitting(self, nodes: list[Node]) -> list[Node]:
        """Views behind ``nodes`` that a kernel with them can read through: all, or the nearest that can."""
        views = self._views_behind(nodes)
        if not views or self._built([*nodes, *views]) is not None:
            return views
        kept: list[Node] = []
        for view in sorted(views, key=lambda item: -self.facts.order[item.name])[:MAX_TRIED]:
            inside = {node.name for node in (*nodes, *kept)}
            if set(self.facts.users[view.name]) <= inside and self._built([*nodes, *kept, view]) is not None:
                kept.append(view)
        return kept

    def _views_behind(self, nodes: list[Node]) -> list[Node]:
        """Views that ``nodes`` read, directly or through views, and nothing else does."""
        inside = {node.name for node in nodes}
        found: dict[str, Node] = {}
        pending = [name for node in nodes for name in node.inputs()]
        while pending:
            name = pending.pop()
            if name in self.views and name not in found and name not in inside:
                found[name] = self.by_name[name]
                pending += self.by_name[name].inputs()
        while True:
            kept = {*inside, *found}
            shared = [name for name in found if not set(self.facts.users[name]) <= kept]
            if not shared:
                return list(found.values())
            for name in shared:
                del found[name]

    def _makers(self, nodes: list[Node], taken: list[Region]) -> list[Region]:
        """Elementwise regions all of whose results ``nodes`` alone read."""
        inside = {node.name for node in nodes}
        read = {name for node in nodes for name in node.inputs()} - inside
        found: list[Region] = []
        for name in sorted(read, key=lambda item: self.facts.order[item]):
            region = self.owners.get(name)
            if region is None or any(region is item for item in (*taken, *found)) or not _plain(region):
                continue
            readers = {user for item in region.outputs for user in self.facts.users[item.value]} - region.names
            if readers <= inside and scalar_flops(region.nodes) <= MAX_FLOPS:
                found.append(region)
        return found

    def _built(self, nodes: list[Node]) -> Region | None:
        return build_mapped_region(nodes, self.facts, self.by_name)


def _innermost_alike(meta: TensorMeta, result: TensorMeta, order: tuple[int, ...] | None) -> bool:
    """Whether the dimension that is innermost in ``result``'s memory is so in a tensor of the same rank."""
    if order is None or len(meta.shape) != len(result.shape):
        return meta.contiguous
    return meta.shape[order[-1]] == 1 or meta.strides[order[-1]] == 1


def _plain(region: Region) -> bool:
    return region.kind == "pointwise" and not region.gathers and not region.positions


def build_mapped_region(nodes: Sequence[Node], facts: Facts, by_name: Mapping[str, Node]) -> Region | None:
    """Return the region of ``nodes``, elementwise operators and views, or None where no kernel can be written."""
    nodes = sorted(nodes, key=lambda node: facts.order[node.name])
    inside = {node.name for node in nodes}
    last = [node for node in nodes if not set(facts.users[node.name]) <= inside]
    if not last or len({node.meta.shape for node in last if len(node.metas) == 1}) != 1:
        return None
    computing = [node for node in nodes if not is_view(node) and not is_join(node)]
    if not all(is_pointwise(node, facts.metas) for node in computing):
        return None
    if any(len(node.metas) != 1 or node.meta.numel == 0 or not node.meta.shape for node in last):
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    found, sizes = traced(nodes, [node.name for node in last], facts.metas, by_name, facts.fixed, scalars)
    if found is None or sizes is None:
        return None
    inputs = dict.fromkeys(name for name, _ in found.loads)
    if not inputs or len(found.loads) + len(last) > MAX_OPERANDS:
        return None
    return Region(
        "mapped",
        tuple(nodes),
        last[0].meta.shape,
        0,
        tuple(_operand(name, facts.metas[name], fixed=name in facts.fixed) for name in inputs),
        tuple(_operand(node.name, _stored(node.meta)) for node in last),
        scalars=scalars,
        cuts=tuple(by_name[node.args[0].name] for node in nodes if node.op == "getitem"),
    )


def traced(
    nodes: Sequence[Node],
    outputs: Sequence[str],
    metas: Mapping[str, TensorMeta],
    by_name: Mapping[str, Node],
    fixed: frozenset[str],
    scalars: Mapping[str, float],
) -> tuple[Trace | None, Sizes | None]:
    """What a region's nodes read and compute, and what the sizes of its index parts are at run time; or Nones."""
    try:
        found = trace(outputs, nodes, by_name, metas, fixed, scalars)
    except NoMap:
        return None, None
    return (None, None) if found is None else (found, sizes_of(found, metas, fixed))


def _stored(meta: TensorMeta) -> TensorMeta:
    return meta if memory_order(meta) is not None else contiguous_meta(meta.shape, meta.dtype)


def _operand(name: str, meta: TensorMeta, *, fixed: bool = False) -> Operand:
    rank = len(meta.shape)
    return Operand(name, meta, (True,) * rank, tuple(range(-rank, 0)), False, fixed, memory_order(meta))
