"""Pooling operators read as one form: a window that slides over the last one to three dimensions.

Left out: pooling with indices as a result, adaptive pooling to more than one element (its windows differ in size),
fractional and power-average pooling, and ``divisor_override``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Node, Ref, TensorMeta

_POOLS = {f"{kind}_pool{rank}d": rank for kind in ("max", "avg") for rank in (1, 2, 3)}


@dataclass(frozen=True)
class Window:
    """One pooling operator; tuples have one entry per pooled dimension, outermost first."""

    node: Node
    source: str
    largest: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]
    ceil: bool
    counts_padding: bool

    @property
    def rank(self) -> int:
        """Number of pooled dimensions."""
        return len(self.sizes)


def window_of(node: Node, metas: Mapping[str, TensorMeta]) -> Window | None:
    """Read ``max_pool`` and ``avg_pool`` of one to three dimensions, or return None."""
    rank = _POOLS.get(node.bare_op)
    if rank is None or not node.op.startswith("aten.") or len(node.metas) != 1 or node.metas[0] is None:
        return None
    source = node.args[0]
    meta = metas.get(source.name) if isinstance(source, Ref) else None
    if meta is None or meta.dtype not in FLOATS or len(meta.shape) != rank + 2:
        return None
    largest = node.bare_op.startswith("max")
    names = ("stride", "padding", *(("dilation", "ceil_mode") if largest else ("ceil_mode", "count_include_pad")))
    defaults = ((), 0, *((1, False) if largest else (False, True)))
    found = {
        name: node.args[index] if len(node.args) > index else node.kwargs.get(name, default)
        for index, (name, default) in enumerate(zip(names, defaults, strict=True), start=2)
    }
    if not largest and (node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")) is not None:
        return None
    sizes = _each(node.args[1], rank)
    return Window(
        node,
        source.name,
        largest,
        sizes,
        _each(found["stride"], rank) if found["stride"] != () else sizes,
        _each(found["padding"], rank),
        _each(found.get("dilation", 1), rank),
        found["ceil_mode"] is True,
        found.get("count_include_pad", True) is True,
    )


def _each(value: Any, rank: int) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else (value,)
    return items * rank if len(items) == 1 else items
