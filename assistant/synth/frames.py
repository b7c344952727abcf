"""Frames: in which order a region walks its dimensions.

Reduced dimensions come last whichever they are in the tensors, so that a reduction over channels is a row reduction;
pointwise regions walk channels last where most of their tensors have them innermost in memory. Tensors are aligned to
the frame by :mod:`drk.assistant.synth.domain`.

Left out: frames other than these two for tensors that are permuted in further ways; they are read by strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drk.assistant.synth.domain import Operand, align, memory_order
from drk.gym.graph import Node, TensorMeta

MAX_COLUMNS = 32_768
"""Longest row that one program of a row kernel holds in registers; longer ones are taken in pieces."""
MAX_TRANSPOSED = 1024
"""Longest row whose elements lie apart in memory: several such rows must fit in registers."""


@dataclass(frozen=True)
class Frame:
    """The order in which a region walks its dimensions: ``order`` of the ``logical`` shape; the last are columns."""

    logical: tuple[int, ...]
    order: tuple[int, ...]
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The region's shape."""
        return tuple(self.logical[dim] for dim in self.order)

    def place(self, name: str, meta: TensorMeta, *, dropped: bool = False, fixed: bool = False) -> Operand | None:
        """Align a tensor to the region; ``dropped`` ones lack the columns."""
        if dropped:
            edge = len(self.order) - self.columns
            kept = sorted(self.order[:edge])
            shape = (*(self.logical[dim] for dim in kept), *self.shape[edge:])
            operand = align(name, meta, shape, dropped=self.columns, fixed=fixed)
            order = (*(kept.index(dim) for dim in self.order[:edge]), *range(edge, len(self.order)))
            return operand if operand is None or order == tuple(range(len(order))) else operand.framed(order)
        operand = align(name, meta, self.logical, fixed=fixed)
        return operand if operand is None or self.order == tuple(range(len(self.order))) else operand.framed(self.order)


def choose_frame(
    nodes: Sequence[Node],
    reductions: Sequence[tuple[Node, tuple[tuple[int, ...], bool]]],
    metas: Mapping[str, TensorMeta],
    users: Mapping[str, tuple[str, ...]],
) -> Frame | None:
    """How a region without products walks its dimensions, or None when its parts disagree.

    ``reductions`` holds the reducing nodes, each with its dimensions and whether it keeps them.
    """
    if reductions:
        frames = {(metas[node.args[0].name].shape, dims) for node, (dims, _) in reductions}
        shape, dims = frames.pop()
        if frames or not 2 <= math.prod(shape[dim] for dim in dims) < 2**31:
            return None
        dims = _as_in_memory(shape, dims, nodes, metas)
        kept = tuple(dim for dim in range(len(shape)) if dim not in dims)
        if 1 in kept and walk(shape, nodes, metas, users)[-1] == 1:
            kept = (*(dim for dim in kept if dim != 1), 1)  # rows lie next to each other along channels
        return Frame(shape, (*kept, *dims), len(dims))
    shape = broadcast([node.meta.shape for node in nodes])
    return Frame(shape, walk(shape, nodes, metas, users), 0) if shape else None


def _as_in_memory(
    shape: tuple[int, ...], dims: tuple[int, ...], nodes: Sequence[Node], metas: Mapping[str, TensorMeta]
) -> tuple[int, ...]:
    """``dims`` from the outermost in the memory of the first full tensor that the region reads."""
    inside = {node.name for node in nodes}
    read = (name for node in nodes for name in node.inputs() if name not in inside)
    strides = next((metas[name].strides for name in read if metas[name].shape == shape), None)
    if strides is None or any(node.bare_op in {"argmax", "argmin"} for node in nodes):
        return dims
    return tuple(sorted(dims, key=lambda dim: (-strides[dim], dim)))


def walk(
    shape: tuple[int, ...], nodes: Sequence[Node], metas: Mapping[str, TensorMeta], users: Mapping[str, tuple[str, ...]]
) -> tuple[int, ...]:
    """Channels last where more of the full tensors have them innermost in memory, else as they come."""
    rank = len(shape)
    inside = {node.name for node in nodes}
    names = {name for node in nodes for name in node.inputs() if name not in inside}
    names |= {node.name for node in nodes if any(user not in inside for user in users[node.name])}
    full = [metas[name] for name in names if metas[name].shape == shape]
    last = sum(1 if is_channels_last(meta) else -1 for meta in full)
    return (0, *range(2, rank), 1) if last > 0 else tuple(range(rank))


def is_channels_last(meta: TensorMeta) -> bool:
    """Whether a tensor lies in memory as ``torch.channels_last`` and ``channels_last_3d`` have it."""
    order = memory_order(meta)
    return order is not None and not meta.contiguous


def broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that all ``shapes`` broadcast to (they are taken to be compatible)."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes, key=lambda size: (size != 1, size)) for sizes in zip(*padded, strict=True))


def transposed(operand: Operand, columns: int) -> bool:
    """Whether neighbouring columns lie apart in memory, so that only tiles with many rows read whole sectors."""
    edge = len(operand.varies) - columns
    axes = [
        axis
        for axis, moves in zip(operand.axes[edge:], operand.varies[edge:], strict=True)
        if moves and axis is not None
    ]
    return bool(axes) and all(operand.meta.strides[axis] != 1 for axis in axes)
