"""What of a compilation many variants share: the rewritten graph and its regions, made once for rules and layout.

Planning walks the graph many times; variants that differ in tiles and blocks only have the same plan. :class:`Memo`
keeps plans and whole compilations of one graph, so that a later call of a proposer, which goes through the same
variants again, does not repeat the earlier ones' work. What it holds depends on the graph alone: with or without it the
same candidates come out.

Left out: several graphs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from drk.assistant.synth.algebra import thin_products
from drk.assistant.synth.assignments import without_assignments
from drk.assistant.synth.cat_order import flat_cats, pieces_for_each
from drk.assistant.synth.equal_parts import in_equal_parts
from drk.assistant.synth.grouped_heads import with_shared_heads
from drk.assistant.synth.layouts import channels_last as in_channels_last
from drk.assistant.synth.layouts import without_conv_bias
from drk.assistant.synth.mapped_region import with_views
from drk.assistant.synth.recompute import planned_with_recomputing
from drk.assistant.synth.regions import Region, Rules
from drk.assistant.synth.rewrites import rewrite
from drk.assistant.synth.row_images import rows_as_images
from drk.assistant.synth.view_order import views_first
from drk.assistant.synth.written_attention import with_written_attention
from drk.gym.graph import Graph

V = TypeVar("V")
C = TypeVar("C")


@dataclass(frozen=True)
class Plan:
    """A graph as it is written, its regions in no particular order, and whether algebra made products thin."""

    graph: Graph
    regions: tuple[Region, ...]
    thin: bool


def plan_graph(graph: Graph, rules: Rules, *, channels_last: bool = False) -> Plan:
    """Return ``graph`` rewritten and planned under ``rules``; convolutions in channels-last layout where asked for."""
    assigned = in_equal_parts(without_assignments(graph))
    thin = thin_products(with_written_attention(assigned) if rules.written_attention else assigned)
    images = rows_as_images(thin) if channels_last else thin
    rewritten = rewrite(without_conv_bias(images), by_channel=True, channels_last=channels_last)
    rewritten = with_shared_heads(rewritten)
    if rules.pointwise and rules.views:
        rewritten = pieces_for_each(flat_cats(rewritten))
    if channels_last:
        rewritten = in_channels_last(rewritten)
    if rules.row and rules.views:
        rewritten = views_first(rewritten)
    rewritten, regions = planned_with_recomputing(rewritten, rules)
    if rules.pointwise and rules.views:
        regions = with_views(rewritten, regions, rules.excluded)
    return Plan(rewritten, tuple(regions), len(thin.nodes) > len(assigned.nodes) and not rules.written_attention)


@dataclass
class Memo(Generic[V, C]):
    """Plans and compilations of one graph on a device with so many multiprocessors."""

    graph: Graph
    multiprocessors: int
    _plans: dict[tuple[Rules, bool], Plan] = field(default_factory=dict)
    _made: dict[V, C | None] = field(default_factory=dict)

    def plan(self, rules: Rules, *, channels_last: bool) -> Plan:
        """Return the graph's plan."""
        key = (rules, channels_last)
        if key not in self._plans:
            self._plans[key] = plan_graph(self.graph, rules, channels_last=channels_last)
        return self._plans[key]

    def compiled(self, variant: V, make: Callable[[V], C | None]) -> C | None:
        """Return what ``make`` made of ``variant``: a compilation, or null where there is none."""
        if variant not in self._made:
            self._made[variant] = make(variant)
        return self._made[variant]
