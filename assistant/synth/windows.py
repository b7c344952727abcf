"""Pooling and depthwise convolution read as one form: a window that slides over the last one to three dimensions.

Left out: depthwise convolutions with several results per channel, pooling with indices as a result, fractional pooling,
and adaptive pooling, whose windows differ in size (:mod:`drk.assistant.synth.resamples`).
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
    ceil: bool = False
    counts_padding: bool = True
    divisor: int | None = None
    """What sums are divided by in the place of the window's size."""
    weight: str | None = None
    """Of a depthwise convolution, which adds up products; else what is in the window is averaged, or its largest."""
    bias: str | None = None

    @property
    def rank(self) -> int:
        """Number of pooled dimensions."""
        return len(self.sizes)


def window_of(node: Node, metas: Mapping[str, TensorMeta]) -> Window | None:
    """Read ``max_pool``, ``avg_pool`` and depthwise ``conv`` of one to three dimensions, or return None."""
    if node.op in _CONVOLUTIONS:
        return _depthwise(node, metas)
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
    divisor = None if largest else node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
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
        divisor=divisor,
    )


_CONVOLUTIONS = {f"aten.conv{rank}d.default": rank for rank in (1, 2, 3)}


def _depthwise(node: Node, metas: Mapping[str, TensorMeta]) -> Window | None:
    rank = _CONVOLUTIONS[node.op]
    defaults = (None, 1, 0, 1, 1)
    rest = (*node.args[2:], *defaults[len(node.args) - 2 :])
    bias, stride, padding, dilation, groups = rest
    found = [metas.get(item.name) if isinstance(item, Ref) else None for item in node.args[:2]]
    source, weight = found
    if source is None or weight is None or node.kwargs or len(node.metas) != 1 or source.dtype not in FLOATS:
        return None
    if len(source.shape) != rank + 2 or groups < 2 or weight.shape[:2] != (groups, 1) or source.shape[1] != groups:
        return None
    return Window(
        node,
        node.args[0].name,
        largest=False,
        sizes=weight.shape[2:],
        strides=_each(stride, rank),
        paddings=_each(padding, rank),
        dilations=_each(dilation, rank),
        weight=node.args[1].name,
        bias=bias.name if isinstance(bias, Ref) else None,
    )


def _each(value: Any, rank: int) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) else (value,)
    return items * rank if len(items) == 1 else items
