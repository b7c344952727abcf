"""How a depthwise convolution is cut into programs: which way lanes run, how many rows of results a lane computes.

Lanes run along what is innermost in the memory of the tensor that is read: positions of one channel in row-major
tensors, channels in channels-last ones. A lane computes several results that stand below one another, so that each
element is loaded once for all of them and not once for each tap; the taps that are then in use at a time must fit in
registers, and so must the sums.

Sizes here are those at capture; they choose constants, the kernel is right at any others. Left out: sharing along the
innermost dimension, whose neighbours other lanes hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region
from drk.assistant.synth.windows import Window
from drk.gym.graph import TensorMeta

UNROLLED = 128
"""Largest window that is unrolled."""
MAX_STATEMENTS = 512
"""Most products that a lane's results may unroll to."""
REGISTERS = 80
"""So many of a lane's registers may hold taps and sums of one channel."""
WIDE_REGISTERS = 56
"""So many where a lane has several channels: their elements need registers too."""
LANES = 132 * 1024
"""At least so many lanes keep a device busy."""
SECTOR_BYTES = 32


@dataclass(frozen=True)
class Form:
    """The cut of one convolution.

    ``walked`` is the dimension along which a lane has ``rows`` results, None with one result. They are ``spacing``
    apart in the result and ``step`` steps of the window's dilation apart in what is read. ``by_channel`` lanes run
    along channels and have ``width`` of them each. A tile has ``side`` positions (of one channel each), or as many
    channels with ``by_channel``, and what ``num_warps`` warps leave along the other side.
    """

    window: Window
    rank: int
    by_channel: bool
    walked: int | None
    rows: int = 1
    spacing: int = 1
    step: int = 1
    width: int = 1
    side: int = 32
    num_warps: int = 4

    @property
    def dims(self) -> range:
        """The dimensions over which the window slides."""
        return range(self.rank - self.window.rank, self.rank)

    @property
    def taps(self) -> int:
        """Number of elements in the window."""
        return math.prod(self.window.sizes)

    @property
    def unrolled(self) -> bool:
        """Whether all loops over the window are unrolled."""
        return self.taps <= UNROLLED

    @property
    def before(self) -> list[int]:
        """Window dimensions whose loops stand around that over the walked one."""
        return [dim for dim in self.dims if self.walked is not None and dim < self.walked]

    @property
    def after(self) -> list[int]:
        """Window dimensions whose loops stand within that over the walked one: all where none is."""
        return [dim for dim in self.dims if self.walked is None or dim > self.walked]

    def size(self, dim: int) -> int:
        """Taps along a dimension."""
        return self.window.sizes[dim - self.dims[0]]

    def stride(self, dim: int) -> int:
        """Distance of neighbouring windows."""
        return self.window.strides[dim - self.dims[0]]

    def padding(self, dim: int) -> int:
        """Zeros at each side."""
        return self.window.paddings[dim - self.dims[0]]

    def dilation(self, dim: int) -> int:
        """Distance of neighbouring taps."""
        return self.window.dilations[dim - self.dims[0]]


def choose_form(region: Region, window: Window, block: Block) -> Form:
    """Return the cut that suits the captured sizes; ``block`` tells variants apart."""
    rank, shape = len(region.shape), window.node.meta.shape
    whole = next(operand.meta for operand in region.pooled if all(operand.varies))
    by_channel = _channels_innermost(whole)
    turned = by_channel != region.outputs[0].channels_last
    usual = block.elements <= 1024
    most = 4 if (by_channel and window.sizes[-1] <= 5) == usual else 8
    rows = _rows(Form(window, rank, by_channel, rank - 2), shape, most) if window.rank > 1 else 1
    walked = rank - 2 if rows > 1 else None
    place = 0 if walked is None else walked - rank + window.rank
    dilated = window.dilations[place] > 1
    form = Form(
        window,
        rank,
        by_channel,
        walked,
        rows,
        spacing=window.dilations[place] if walked is not None else 1,
        step=1 if dilated or walked is None else window.strides[place],
    )
    width = _width(form, math.prod(shape)) if by_channel else 1
    warps = 8 if turned or (by_channel and window.sizes[-1] > 3) else max(4, block.elements // block.per_warp)
    side = 32
    if turned and not by_channel:
        side = 32 * warps * _itemsize(whole) // SECTOR_BYTES
    return Form(window, rank, by_channel, walked, rows, form.spacing, form.step, width, min(32, side), warps)


def _channels_innermost(meta: TensorMeta) -> bool:
    return meta.strides[1] == 1 and meta.shape[1] > 1 and meta.strides[-1] != 1


def _itemsize(meta: TensorMeta) -> int:
    return 4 if meta.dtype == "float32" else 2


def _rows(form: Form, shape: tuple[int, ...], most: int) -> int:
    """How many results a lane has along the last dimension but one, where windows overlap there."""
    dim = form.rank - 2
    size, stride, dilation = form.size(dim), form.stride(dim), form.dilation(dim)
    if size <= stride or (stride > 1 and dilation > 1) or not form.unrolled:
        return 1
    for rows in (8, 4, 2):
        span = rows * dilation
        wasted = -(-shape[dim] // span) * span > 1.2 * shape[dim]
        used = _taps_in_use(form, rows, stride) + rows
        few = math.prod(shape) // rows < LANES
        if rows <= most and not (wasted or few or used > REGISTERS or rows * form.taps > MAX_STATEMENTS):
            return rows
    return 1


def _taps_in_use(form: Form, rows: int, step: int) -> int:
    """How many taps are in registers at a time, with ``rows`` results a lane."""
    return min(form.size(form.rank - 2), (rows - 1) * step + 1) * form.size(form.rank - 1)


def _width(form: Form, results: int) -> int:
    """Channels a lane: as many as one load can take, while taps and sums fit in registers."""
    used = 1 if form.walked is None else _taps_in_use(form, form.rows, form.step)
    for width in (4, 2):
        if (used + form.rows) * width <= WIDE_REGISTERS and results // (form.rows * width) >= LANES:
            return width
    return 1
