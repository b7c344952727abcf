"""Regions of a matrix product whose factors or result go through ``tril`` and ``triu``.

The masks are taken out of the region's nodes and put into its product, so that everything else sees a plain product.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from drk.assistant.synth.bands import Band, within
from drk.assistant.synth.regions import Facts, Region, Rules, build_region, product_of
from drk.gym.graph import Node, Ref


def build_banded_region(nodes: list[Node], facts: Facts, rules: Rules) -> Region | None:
    """Return the region of ``nodes`` (in graph order) with one product and its masks, or None."""
    by_name = {node.name: node for node in nodes}
    masks = {node.name for node in nodes if node.name in facts.bands}
    products = [node for node in nodes if product_of(node, facts.metas) is not None]
    if len(products) != 1:
        return None
    node = products[0]
    product = product_of(node, facts.metas)
    assert product is not None
    before, beside = (_chain(name, by_name, facts) for name in (product.left, product.right))
    last = next(
        (name for name in reversed(by_name) if name in masks and _starts(name, by_name, facts) == node.name), ""
    )
    after = _chain(last, by_name, facts) if last else []
    if {*before, *beside, *after} != masks or not _private([*reversed(before), node.name, *reversed(after)], facts):
        return None
    if not _private([*reversed(beside), node.name], facts):
        return None
    flattened = len(facts.metas[product.left].shape) > 2 and not product.batched
    if product.bias or flattened:
        return None
    left = _starts(before[0], by_name, facts) if before else product.left
    right = _starts(beside[0], by_name, facts) if beside else product.right
    at = 1 if product.node.bare_op == "addmm" else 0
    args = (*node.args[:at], Ref(left), Ref(right), *node.args[at + 2 :])
    core = replace(node, args=args, name=last or node.name)
    kept = [core if item is node else item for item in nodes if item.name not in masks]
    region = build_region(kept, facts, rules)
    if region is None or len(region.products) != 1:
        return None
    left_band, right_band, result_band = (_joined(names, facts) for names in (before, beside, after))
    banded = replace(region.products[0], left_band=left_band, right_band=right_band, result_band=result_band)
    inside = dict.fromkeys((*before, *beside, *after))
    absorbed = (*(by_name[name] for name in inside), *([node] if last else []))
    return replace(region, products=(banded,), absorbed=absorbed)


def _chain(name: str, by_name: dict[str, Node], facts: Facts) -> list[str]:
    """Masks from ``name`` back to their source."""
    found = []
    while name in by_name and name in facts.bands:
        found.append(name)
        name = facts.bands[name].source
    return found


def _starts(name: str, by_name: dict[str, Node], facts: Facts) -> str:
    """What the masks that end in ``name`` are applied to."""
    return facts.bands[_chain(name, by_name, facts)[-1]].source


def _private(names: list[str], facts: Facts) -> bool:
    """Whether each value is read by the next one only."""
    return all(facts.users[first] == (second,) for first, second in pairwise(names))


def _joined(names: list[str], facts: Facts) -> Band | None:
    if not names:
        return None
    band = facts.bands[names[-1]]
    for name in reversed(names[:-1]):
        band = within(band, facts.bands[name])
    return band
