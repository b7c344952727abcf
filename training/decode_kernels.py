"""What a decoding step does beside matrix products: four Triton kernels a layer, where torch launches some thirty.

One program a row or head; sums are float32, results have the weights' type. Attention reads as many places of the cache
as a row has, so that a long answer costs its neighbours nothing. Each of its lanes keeps a softmax of its own, over its
share of the places, and the lanes are put together at the end: nothing is exchanged between them before.

Honest limits: heads and widths fit one tile each (a width of some 16 thousand); products with the query are sums and
not ``tl.dot``, which is right for one query a head and would be slow for many.
"""

# ruff: noqa: ANN001, ANN201, PLR0913, PLR0917
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Kernels have no annotations but ``constexpr``: Triton evaluates them.

from __future__ import annotations

import subprocess

import torch
import triton
import triton.language as tl
from torch import Tensor

from drk.training.decode_model import Place

KERNEL_FAULTS = (RuntimeError, OSError, subprocess.SubprocessError, triton.TritonError)
"""What launching a kernel raises where it cannot be compiled, loaded or run."""
LANES = 64
"""Places of the cache that a program reads at a time."""
GATE_BLOCK = 1024


@triton.jit
def add_norm_kernel(
    x,
    delta,
    weight,
    total,
    out,
    width,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a row of ``delta`` to one of ``x``, and write the sum and its norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(x + row * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        value += tl.load(delta + row * width + columns, mask=inside, other=0.0)
        tl.store(total + row * width + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    factor = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, (wide * scale).to(value.dtype) * factor, mask=inside)


@triton.jit
def turned_head(source, weight, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr):
    """Return both halves of a head, normed where wanted, and rotated by one row of cosines and sines."""
    half = tl.arange(0, HALF)
    inside = half < SIZE // 2
    left = tl.load(source + half, mask=inside, other=0.0)
    right = tl.load(source + SIZE // 2 + half, mask=inside, other=0.0)
    if NORM:
        low, high = left.to(tl.float32), right.to(tl.float32)
        scale = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / SIZE + eps)
        left = (low * scale).to(left.dtype) * tl.load(weight + half, mask=inside, other=0.0)
        right = (high * scale).to(right.dtype) * tl.load(weight + SIZE // 2 + half, mask=inside, other=0.0)
    c = tl.load(cos + half, mask=inside, other=0.0)  # the second half repeats the first
    s = tl.load(sin + half, mask=inside, other=0.0)
    return left * c - right * s, right * c + left * s


@triton.jit
def rotate_kernel(
    heads,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    q_out,
    keys,
    values,
    context,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Write one head of one row: a query to ``q_out``, a key or value to its place in the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row)
    cos += position * SIZE
    sin += position * SIZE
    source = heads + (row * (HEADS + 2 * KEY_HEADS) + head) * SIZE
    half = tl.arange(0, HALF)
    inside = half < SIZE // 2
    if head < HEADS:
        left, right = turned_head(source, q_norm, cos, sin, eps, SIZE, NORM, HALF)
        target = q_out + (row * HEADS + head) * SIZE
    elif head < HEADS + KEY_HEADS:
        left, right = turned_head(source, k_norm, cos, sin, eps, SIZE, NORM, HALF)
        target = keys + ((row * KEY_HEADS + head - HEADS) * context + position) * SIZE
    else:
        left = tl.load(source + half, mask=inside, other=0.0)
        right = tl.load(source + SIZE // 2 + half, mask=inside, other=0.0)
        target = values + ((row * KEY_HEADS + head - HEADS - KEY_HEADS) * context + position) * SIZE
    tl.store(target + half, left, mask=inside)
    tl.store(target + SIZE // 2 + half, right, mask=inside)


@triton.jit
def attend_kernel(
    q,
    keys,
    values,
    positions,
    out,
    context,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE: tl.constexpr,
):
    """Attend with one head of one row to the row's places so far. ``BLOCK`` covers a head, ``LANE`` places a step."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(positions + row).to(tl.int32) + 1
    start = (row * KEY_HEADS + head // (HEADS // KEY_HEADS)) * context * SIZE
    column = tl.arange(0, BLOCK)
    lane = tl.arange(0, LANE)
    inside = column < SIZE
    query = tl.load(q + (row * HEADS + head) * SIZE + column, mask=inside, other=0.0).to(tl.float32) * scale
    most = tl.full([LANE], -1.0e30, tl.float32)
    weight = tl.zeros([LANE], tl.float32)
    found = tl.zeros([LANE, BLOCK], tl.float32)
    for first in range(0, length, LANE):
        place = first + lane
        there = place < length
        tile = start + place[:, None] * SIZE + column[None, :]
        mask = there[:, None] & inside[None, :]
        key = tl.load(keys + tile, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values + tile, mask=mask, other=0.0).to(tl.float32)
        score = tl.where(there, tl.sum(key * query[None, :], axis=1), -1.0e30)
        now = tl.maximum(most, score)
        kept = tl.exp(most - now)
        share = tl.where(there, tl.exp(score - now), 0.0)
        weight = weight * kept + share
        found = found * kept[:, None] + share[:, None] * value
        most = now
    kept = tl.exp(most - tl.max(most, axis=0))
    whole = tl.sum(weight * kept, axis=0)
    result = tl.sum(found * kept[:, None], axis=0) / whole
    tl.store(out + (row * HEADS + head) * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_kernel(both, out, width, BLOCK: tl.constexpr):
    """Write ``silu`` of a row's left half times its right half, ``width`` each."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(both + 2 * row * width + column, mask=inside, other=0.0)
    up = tl.load(both + (2 * row + 1) * width + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(value.dtype)
    tl.store(out + row * width + column, silu * up, mask=inside)


class TritonOperations:
    """:class:`drk.training.decode_model.Operations` by the kernels above. Tensors are contiguous."""

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See :class:`drk.training.decode_model.Operations`."""
        rows, width = x.shape
        total = x if delta is None else torch.empty_like(x)
        out = torch.empty_like(x)
        add_norm_kernel[(rows,)](
            x, x if delta is None else delta, weight, total, out, width, eps,
            HAS_DELTA=delta is not None, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
        return total, out

    def rotate(self, heads: Tensor, place: Place) -> Tensor:
        """See :class:`drk.training.decode_model.Operations`."""
        rows, count, size = heads.shape
        key_heads = place.keys.shape[1]
        queries = count - 2 * key_heads
        out = torch.empty(rows, queries, size, device=heads.device, dtype=heads.dtype)
        norm = place.q_norm is not None
        rotate_kernel[(rows, count)](
            heads, place.q_norm if norm else heads, place.k_norm if norm else heads, place.cos, place.sin,
            place.positions, out, place.keys, place.values, place.keys.shape[2], place.eps,
            HEADS=queries, KEY_HEADS=key_heads, SIZE=size, NORM=norm, HALF=triton.next_power_of_2(size // 2),
            num_warps=1,
        )  # fmt: skip
        return out

    def attend(self, q: Tensor, place: Place) -> Tensor:
        """See :class:`drk.training.decode_model.Operations`."""
        rows, heads, size = q.shape
        out = torch.empty(rows, heads * size, device=q.device, dtype=q.dtype)
        attend_kernel[(rows, heads)](
            q, place.keys, place.values, place.positions, out, place.keys.shape[2], place.scale,
            HEADS=heads, KEY_HEADS=place.keys.shape[1], SIZE=size, BLOCK=triton.next_power_of_2(size), LANE=LANES,
        )  # fmt: skip
        return out

    def gated(self, both: Tensor) -> Tensor:
        """See :class:`drk.training.decode_model.Operations`."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = torch.empty(rows, width, device=both.device, dtype=both.dtype)
        gated_kernel[(rows, triton.cdiv(width, GATE_BLOCK))](both, out, width, BLOCK=GATE_BLOCK)
        return out
