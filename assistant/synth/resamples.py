"""Interpolation and adaptive pooling read as one form: a result comes from a few places along each resampled dimension.

Where those places are is told by the sizes, at run time: linear interpolation reads two neighbours, cubic four, nearest
one, adaptive pooling a window whose ends are fractions of the size. Ratios and rounding are PyTorch's
(``aten/src/ATen/native/UpSample.h``, ``AdaptivePooling.h``), in float32 as there.

Left out: antialiasing, pooling with indices as a result, gradients, and nearest neighbours by whole factors, which are
a change of indices (:mod:`drk.assistant.synth.index_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Node, Ref, TensorMeta

_LINEAR = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3}
_CUBIC = {"upsample_bicubic2d": 2}
_NEAREST = {f"upsample_nearest{rank}d": rank for rank in (1, 2, 3)}
_EXACT = {f"_upsample_nearest_exact{rank}d": rank for rank in (1, 2, 3)}
_AVERAGE = {f"adaptive_avg_pool{rank}d": rank for rank in (1, 2, 3)}
_LARGEST = {f"aten.adaptive_max_pool{rank}d.values": rank for rank in (1, 2, 3)}


@dataclass(frozen=True)
class Resample:
    """One operator; tuples have one entry per resampled dimension, outermost first.

    ``kind`` is linear, cubic, nearest, exact (nearest to the element's middle), average or largest.
    """

    node: Node
    source: str
    kind: str
    results: tuple[int | None, ...]
    """Sizes that the graph states; None where they are the source's times ``scales``."""
    scales: tuple[float | None, ...]
    corners: bool = False
    """Corner elements are aligned, not edges."""

    @property
    def rank(self) -> int:
        """Number of resampled dimensions."""
        return len(self.results)

    @property
    def pools(self) -> bool:
        """Whether windows are pooled."""
        return self.kind in {"average", "largest"}


def resample_of(node: Node, metas: Mapping[str, TensorMeta]) -> Resample | None:
    """Read interpolation and adaptive pooling of one to three dimensions of images, or return None."""
    if not node.op.startswith("aten.") or len(node.metas) != 1 or node.metas[0] is None or not node.args:
        return None
    source = node.args[0]
    meta = metas.get(source.name) if isinstance(source, Ref) else None
    if meta is None or meta.dtype not in FLOATS or node.kwargs or node.meta.numel == 0 or meta.numel == 0:
        return None
    pooled = _LARGEST.get(node.op) or _AVERAGE.get(node.bare_op)
    if pooled is not None:
        kind = "largest" if node.op in _LARGEST else "average"
        sizes = node.meta.shape[-pooled:]
        whole = len(meta.shape) == pooled + 2
        return Resample(node, source.name, kind, sizes, (None,) * pooled) if whole else None
    for kind, table in (("linear", _LINEAR), ("cubic", _CUBIC), ("nearest", _NEAREST), ("exact", _EXACT)):
        if node.bare_op in table and node.op.endswith(".vec") and len(meta.shape) == table[node.bare_op] + 2:
            return _interpolation(node, source.name, kind, table[node.bare_op])
    return None


def _interpolation(node: Node, source: str, kind: str, rank: int) -> Resample | None:
    flags = 1 if kind in {"linear", "cubic"} else 0
    rest = (*node.args[1:], *(None,) * 3)
    sizes, scales = rest[0], rest[1 + flags]
    corners = bool(flags) and rest[1] is True
    results = _each(sizes, rank)
    factors = _each(scales, rank)
    if any(size is None and factor is None for size, factor in zip(results, factors, strict=True)):
        return None
    if kind == "nearest" and all(factor is not None and factor == int(factor) for factor in factors):
        return None
    return Resample(node, source, kind, results, factors, corners)


def _each(value: Any, rank: int) -> tuple[Any, ...]:
    return (None,) * rank if value is None else tuple(value)
