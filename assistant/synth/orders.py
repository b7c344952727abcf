"""``topk`` and ``sort`` along rows: which elements are the largest or smallest, in order, and where they stand.

Operators with two results are written as one operator for each, values and indices; those of the same rows become one
kernel (:mod:`drk.assistant.synth.ordering`). Rules have the form that :mod:`drk.assistant.synth.decompositions`
describes.

Left out: rows that do not fit into registers, many largest ones of long rows, other dimensions than the last, integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref, TensorMeta

LONGEST_SORTED = 2048
"""Longest row that is sorted: it lies in a program's registers."""
LONGEST_PICKED = 16_384
"""Longest row of which some are picked."""
MOST_PICKED = 16
"""Most elements that are picked one after the other; more are taken from a sorted row."""
_OPERATORS = frozenset({"topk", "sort"})
_RESULTS = ("values", "indices")


@dataclass(frozen=True)
class Order:
    """The first ``count`` (all: None) of each row of ``source`` in order, as values or as their ``places``."""

    node: Node
    source: str
    count: int | None
    largest: bool
    places: bool


def order_of(node: Node, metas: Mapping[str, TensorMeta]) -> Order | None:
    """Read one result of ``topk`` or ``sort``, or return None."""
    name, _, result = node.op.removeprefix("aten.").partition(".")
    if name not in _OPERATORS or result not in _RESULTS or len(node.metas) != 1 or node.metas[0] is None:
        return None
    source, count, largest = node.args
    meta = metas.get(source.name)
    if meta is None or not meta.numel or not node.meta.numel:
        return None
    return Order(node, source.name, count if name == "topk" else None, largest, result == "indices")


def fits(meta: TensorMeta, dim: int, count: int | None) -> bool:
    """Whether a kernel can order rows of a tensor."""
    rank = len(meta.shape)
    if not rank or dim % rank != rank - 1 or meta.dtype not in FLOATS or meta.shape[-1] < 2:
        return False
    few = count is not None and count <= MOST_PICKED and meta.shape[-1] <= LONGEST_PICKED
    return few or meta.shape[-1] <= LONGEST_SORTED


def _results(node: Node, draft: Draft, op: str, count: int | None, largest: bool) -> dict[int, str]:
    """Emit an operator for each result that is read; their names."""
    x, found = node.args[0], dict[int, str]()
    for place, name in enumerate(_RESULTS):
        meta = node.metas[place] if len(node.metas) > place else None
        if meta is None:
            continue
        own = replace(node, op=f"aten.{op}.{name}", args=(x, count, largest), kwargs={}, metas=(meta,))
        found[place] = draft.append(own, f"{'sorted' if op == 'sort' else 'top'}_{name}").name
    return found


def _topk(node: Node, draft: Draft) -> Ref | None:
    x, count = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("k")
    dim, largest = argument(node, 2, "dim", -1), argument(node, 3, "largest", True)
    if type(count) is int and count > 0 and type(dim) is int and fits(draft.metas[x.name], dim, count):
        names = _results(node, draft, "topk", count, largest is True)
        draft.renamed |= {f"{node.name}[{place}]": name for place, name in names.items()}
    return None


def _direction(node: Node) -> tuple[object, bool]:
    """Dimension and whether the largest come first, of ``sort(x, dim, descending)`` and what takes ``stable`` too."""
    rest = node.args[2:] if node.op.split(".")[-1] == "stable" else node.args[1:]
    dim = rest[0] if rest else node.kwargs.get("dim", -1)
    return dim, (rest[1] if len(rest) > 1 else node.kwargs.get("descending", False)) is True


def _sort(node: Node, draft: Draft) -> Ref | None:
    dim, descending = _direction(node)
    if type(dim) is int and fits(draft.metas[node.args[0].name], dim, None):
        names = _results(node, draft, "sort", None, descending)
        draft.renamed |= {f"{node.name}[{place}]": name for place, name in names.items()}
    return None


def _argsort(node: Node, draft: Draft) -> Ref | None:
    x, (dim, descending) = node.args[0], _direction(node)
    if type(dim) is not int or not fits(draft.metas[x.name], dim, None):
        return None
    own = replace(node, op="aten.sort.indices", args=(x, None, descending), kwargs={}, metas=(node.meta,))
    return draft.append(own, "sorted_indices")


ORDER_RULES: Mapping[str, Rule] = {"topk": _topk, "sort": _sort, "argsort": _argsort}
"""Rules by operator."""
