"""Tile shapes for matrix products, and which are worth trying for a given size.

A tile is ``BLOCK_M x BLOCK_N`` outputs, ``BLOCK_K`` of the inner dimension a step, with ``num_warps`` warps and
``num_stages`` loads in flight. The tables hold shapes that Hopper likes; the estimate only orders them: it counts the
waves that the tiles make over the multiprocessors and the operand traffic per tile.

Left out: anything measured at call time. The search around the proposer measures, this file suggests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tile:
    """One launch configuration of a matrix product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    parts: int = 1
    """Into so many parts the inner dimension is split (:mod:`drk.assistant.synth.split_product`)."""

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"


FP32_TILES = (
    Tile(128, 128, 32, 8, 3),
    Tile(128, 128, 64, 8, 2),
    Tile(128, 64, 32, 4, 3),
    Tile(64, 128, 32, 4, 3),
    Tile(64, 64, 32, 4, 3),
    Tile(32, 64, 32, 4, 4),
    Tile(128, 32, 32, 4, 4),
    Tile(128, 16, 32, 4, 4),
)
"""For ``tf32x3``: three products a step, so arithmetic dominates and registers are short."""

HALF_TILES = (
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 64, 4, 5),
    Tile(128, 32, 64, 4, 4),
    Tile(128, 16, 64, 4, 4),
)
"""For float16 and bfloat16 operands."""

PAIR_FP32_TILES = (Tile(128, 64, 32, 8, 3), Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3))
"""For two products that share their left operand: two accumulators; larger tiles spill registers."""

PAIR_HALF_TILES = (Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(32, 64, 64, 4, 4))

THIN = 64
"""Products of so few rows or columns take as long as reading the other factor."""
LEAST_INNER = 512
"""The shortest part of an inner dimension."""
MAX_PARTS = 128
PART_COST, LAUNCH_COST = 90.0, 1e6
"""In multiplications of one multiprocessor: 8 bytes of memory traffic, 3 us."""


def ranked_tiles(rows: int, cols: int, inner: int, *, half: bool, pair: bool, multiprocessors: int) -> tuple[Tile, ...]:
    """Return the tiles of the fitting table, most promising first, for a ``rows x inner @ inner x cols`` product."""
    table = (PAIR_HALF_TILES if pair else HALF_TILES) if half else (PAIR_FP32_TILES if pair else FP32_TILES)
    split = (replace(tile, parts=parts_of(tile, rows, cols, inner, multiprocessors)) for tile in table)
    return tuple(sorted(split, key=lambda tile: estimated_cost(tile, rows, cols, inner, multiprocessors)))


def parts_of(tile: Tile, rows: int, cols: int, inner: int, multiprocessors: int) -> int:
    """Into how many parts, a power of two, a long inner dimension is split so that all multiprocessors have work.

    Tiles of thin products only wait for memory: several of them are to be in flight on each multiprocessor.
    """
    tiles = math.ceil(rows / tile.block_m) * math.ceil(cols / tile.block_n)
    wanted = multiprocessors * (4 if min(rows, cols) <= THIN else 1) // tiles
    parts = min(wanted, inner // LEAST_INNER, MAX_PARTS)
    return 1 << parts.bit_length() - 1 if parts > 1 else 1


def estimated_cost(tile: Tile, rows: int, cols: int, inner: int, multiprocessors: int) -> float:
    """A relative cost: waves of tiles times a tile's work, with a penalty for small tiles' operand traffic."""
    tiles = math.ceil(rows / tile.block_m) * math.ceil(cols / tile.block_n) * tile.parts
    resident = max(1, min(4, 16 // tile.num_warps))
    waves = math.ceil(tiles / (multiprocessors * resident))
    area = tile.block_m * tile.block_n
    traffic = (tile.block_m + tile.block_n) / area
    busy = min(resident, math.ceil(tiles / multiprocessors))
    adding = PART_COST * rows * cols * tile.parts / multiprocessors + LAUNCH_COST if tile.parts > 1 else 0.0
    return waves * busy * area * inner / tile.parts * (1.0 + 24.0 * traffic) + adding
