"""Regions of operators that a kernel computes without neighbours: whole tensors in, whole tensors out."""

from __future__ import annotations

from collections.abc import Iterable

from drk.assistant.synth.domain import Operand, unaligned
from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.regions import Facts, Region
from drk.gym.graph import Node


def whole_tensors(names: Iterable[str], facts: Facts) -> tuple[Operand, ...]:
    """Return values as operands that are aligned to nothing, each once."""
    return tuple(unaligned(name, facts.metas[name], fixed=name in facts.fixed) for name in dict.fromkeys(names))


def lone_region(
    kind: str, nodes: list[Node], sources: Iterable[str], facts: Facts, shape: tuple[int, ...], *, columns: int = 1
) -> Region:
    """Return the region of ``nodes``, which read ``sources`` and make row-major results, over ``shape``."""
    made = tuple(unaligned(node.name, contiguous_meta(node.meta.shape, node.meta.dtype)) for node in nodes)
    return Region(kind, tuple(nodes), shape, columns, whole_tensors(sources, facts), made)
