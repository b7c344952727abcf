"""Tile shapes for matrix products, and which are worth trying for a given size.

A tile is ``BLOCK_M x BLOCK_N`` outputs, ``BLOCK_K`` of the inner dimension a step, with ``num_warps`` warps and
``num_stages`` loads in flight. The tables hold shapes that Hopper likes; the estimate only orders them: it counts the
waves that the tiles make over the multiprocessors and the operand traffic per tile.

Left out: anything measured at call time. The search around the proposer measures, this file suggests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """One launch configuration of a matrix product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"


FP32_TILES = (
    Tile(128, 128, 32, 8, 3),
    Tile(128, 128, 64, 8, 2),
    Tile(128, 64, 32, 4, 3),
    Tile(64, 128, 32, 4, 3),
    Tile(64, 64, 32, 4, 3),
    Tile(32, 64, 32, 4, 4),
)
"""For ``tf32x3``: three products a step, so arithmetic dominates and registers are short."""

HALF_TILES = (
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(32, 64, 64, 4, 5),
)
"""For float16 and bfloat16 operands."""

PAIR_FP32_TILES = (Tile(128, 64, 32, 8, 3), Tile(128, 64, 32, 8, 4), Tile(64, 64, 32, 4, 3), Tile(32, 64, 32, 4, 3))
"""For two products that share their left operand: two accumulators; larger tiles spill registers."""

PAIR_HALF_TILES = (Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), Tile(32, 64, 64, 4, 4))


def ranked_tiles(rows: int, cols: int, inner: int, *, half: bool, pair: bool, multiprocessors: int) -> tuple[Tile, ...]:
    """Return the tiles of the fitting table, most promising first, for a ``rows x inner @ inner x cols`` product."""
    table = (PAIR_HALF_TILES if pair else HALF_TILES) if half else (PAIR_FP32_TILES if pair else FP32_TILES)
    return tuple(sorted(table, key=lambda tile: estimated_cost(tile, rows, cols, inner, multiprocessors)))


def estimated_cost(tile: Tile, rows: int, cols: int, inner: int, multiprocessors: int) -> float:
    """A relative cost: waves of tiles times a tile's work, with a penalty for small tiles' operand traffic."""
    tiles = math.ceil(rows / tile.block_m) * math.ceil(cols / tile.block_n)
    resident = max(1, min(4, 16 // tile.num_warps))
    waves = math.ceil(tiles / (multiprocessors * resident))
    area = tile.block_m * tile.block_n
    traffic = (tile.block_m + tile.block_n) / area
    busy = min(resident, math.ceil(tiles / multiprocessors))
    return waves * busy * area * inner * (1.0 + 24.0 * traffic)
