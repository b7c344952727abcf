"""How the programs of a region in pieces walk over rows and columns: tiles that never cross an inner group.

Where operands differ in the dimensions along which they vary, rows or columns fall into groups, and an element's place
in each group is a division away. Tiles are therefore laid out inside the innermost group of columns: the division is
one for each tile, and neighbouring lanes read neighbouring elements. Where the rows' elements lie apart in memory the
same is done with rows, so that lanes follow memory along the innermost group of rows (channels, say).

Left out: innermost groups of columns shorter than :data:`LEAST_INNER`; their tiles would be mostly empty, so these
rows are walked as one and divided element by element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from drk.assistant.synth.body import Body
from drk.assistant.synth.domain import Group, group_size_text, index_lines
from drk.assistant.synth.frames import transposed

PROGRAMS = 528
"""Programs that a level aims at: four for each multiprocessor of the largest Hopper GPU, all of them at once there.

A few more than fit would keep most of the device waiting for the last ones.
"""
TALL_PROGRAMS = 1056
"""The same where tiles have many rows."""
LEAST_INNER = 192
"""Shortest innermost group of columns inside which tiles are laid out."""
LONG_INNER = 512
"""Shortest innermost group of rows inside which tiles of rows are laid out for an input's sake."""
TALL = 32
"""Rows of a tile whose rows lie next to each other in memory: a cache line of float32."""


@dataclass(frozen=True)
class Walk:
    """The walk that all passes of a region share; the dimensions are those of the innermost groups."""

    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()

    @property
    def first(self) -> str:
        """Condition on the first tile of a piece."""
        return "tile == first_tile" if self.cols else "start == first_col"

    @property
    def sizes(self) -> tuple[str, ...]:
        """Kernel parameters, which the launcher has under the same names."""
        inner_rows = ("inner_rows", "row_tiles") if self.rows else ()
        inner_cols = ("inner_cols", "col_tiles", "n_tiles", "piece_tiles") if self.cols else ("piece_size",)
        return ("n_rows", "n_cols", "n_pieces", *inner_rows, *inner_cols)

    def row_lines(self, body: Body, tile: str) -> list[str]:
        """``rows``, their mask and their groups' indices, from a tile's number."""
        if not self.rows:
            lines = [f"rows = {tile}.to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)", "row_mask = rows[:, None] < n_rows"]
            return [*lines, *index_lines(body.domain.rows, "rows")]
        return [
            f"outer_row = ({tile} // row_tiles).to(INDEX)",
            f"inner_row = ({tile} % row_tiles * BLOCK_M).to(INDEX) + tl.arange(0, BLOCK_M)",
            "rows = outer_row * inner_rows + inner_row",
            "row_mask = inner_row[:, None] < inner_rows",
            *_group_lines(body.domain.rows, self.rows, "row", "BLOCK_M", body.steady),
        ]

    def loop_lines(self, body: Body, inside: Sequence[str]) -> list[str]:
        """The loop over a piece's tiles around the statements ``inside``."""
        if not self.cols:
            head = [
                "first_col = piece.to(INDEX) * piece_size",
                "for start in range(first_col, tl.minimum(first_col + piece_size, n_cols), BLOCK_N):",
            ]
            place = ["cols = start + tl.arange(0, BLOCK_N)", "col_mask = cols[None, :] < n_cols"]
            place += ["mask = row_mask & col_mask", *index_lines(body.domain.cols, "cols")]
            return [*head, *(f"    {line}" for line in (*place, *inside))]
        head = [
            "first_tile = piece * piece_tiles",
            "for tile in range(first_tile, tl.minimum(first_tile + piece_tiles, n_tiles)):",
        ]
        place = [
            "outer_col = (tile // col_tiles).to(INDEX)",
            "inner_col = (tile % col_tiles * BLOCK_N).to(INDEX) + tl.arange(0, BLOCK_N)",
            "cols = outer_col * inner_cols + inner_col",
            "col_mask = inner_col[None, :] < inner_cols",
            "mask = row_mask & col_mask",
            *_group_lines(body.domain.cols, self.cols, "col", "BLOCK_N"),
        ]
        return [*head, *(f"    {line}" for line in (*place, *inside))]

    def count_lines(self, result: str, piece: str) -> list[str]:
        """``result``: how many columns ``piece`` (or each of several) has."""
        if not self.cols:
            ahead = f"tl.maximum(n_cols - {piece} * piece_size, 0)"
            return [f"{result} = tl.minimum({ahead}, piece_size).to(tl.float32)"]
        return [
            f"ends = tl.minimum(({piece} + 1) * piece_tiles, n_tiles)",
            f"starts = tl.minimum({piece} * piece_tiles, n_tiles)",
            f"{result} = (ends // col_tiles - starts // col_tiles) * inner_cols",
            f"{result} += tl.minimum(ends % col_tiles * BLOCK_N, inner_cols)",
            f"{result} -= tl.minimum(starts % col_tiles * BLOCK_N, inner_cols)",
            f"{result} = {result}.to(tl.float32)",
        ]

    def launch_lines(self, body: Body, elements: int) -> list[str]:
        """Sizes of tiles and pieces."""
        lines = self.inner_row_lines(body) if self.rows else []
        lines += [f"block_m = min({TALL}, triton.next_power_of_2(inner_rows))"] if self.rows else ["block_m = 1"]
        width = "n_cols"
        if self.cols:
            lines.append(f"inner_cols = {self._inner_size(body, body.domain.cols, 'n_cols')}")
            width = "inner_cols"
        elements = elements // 2 if self.rows else elements  # tall tiles need more registers
        lines.append(f"block_n = min({elements} // block_m, triton.next_power_of_2({width}))")
        lines.append("# Pieces of whole tiles, as many as keep the device busy.")
        if self.rows:
            lines.append("row_tiles = triton.cdiv(inner_rows, block_m)")
        lines.append(
            f"tiles_m = {'row_tiles * (n_rows // inner_rows)' if self.rows else 'triton.cdiv(n_rows, block_m)'}"
        )
        tiles = "tiles_n"
        if self.cols:
            tiles = "n_tiles"
            lines += ["col_tiles = triton.cdiv(inner_cols, block_n)", "n_tiles = col_tiles * (n_cols // inner_cols)"]
        else:
            lines.append("tiles_n = triton.cdiv(n_cols, block_n)")
        programs = TALL_PROGRAMS if self.rows else PROGRAMS
        lines.append(f"wanted = min({tiles}, 8192 // block_m, max(1, {programs} // max(1, tiles_m)))")
        if self.cols:
            return [
                *lines, "piece_tiles = triton.cdiv(n_tiles, wanted)", "n_pieces = triton.cdiv(n_tiles, piece_tiles)"
            ]  # fmt: skip
        return [
            *lines, "piece_size = triton.cdiv(tiles_n, wanted) * block_n", "n_pieces = triton.cdiv(n_cols, piece_size)"
        ]  # fmt: skip

    def inner_row_lines(self, body: Body) -> list[str]:
        """The size of the innermost group of rows."""
        return [f"inner_rows = {self._inner_size(body, body.domain.rows, 'n_rows')}"]

    def _inner_size(self, body: Body, groups: Sequence[Group], total: str) -> str:
        if len(groups) == 1:
            return total
        return group_size_text(groups[-1], list(body.region.inputs), dict(body.names))


def walk_of(body: Body) -> Walk:
    """The walk of a whole region: by rows' or columns' innermost groups where that pays."""
    region, domain = body.region, body.domain
    turned = any(transposed(item, region.columns) for item in region.inputs)
    rows = domain.rows[-1].dims if turned and domain.rows else ()
    cols = domain.cols[-1].dims if len(domain.cols) > 1 else ()
    if math.prod(region.shape[dim] for dim in cols) < LEAST_INNER:
        cols = ()
    return Walk(rows, cols)


def rows_walk(body: Body) -> Walk:
    """The walk of whole rows: along an innermost group where a tile's rows lie next to each other in memory.

    Also where that group is long and some input is the same all along it (scales of an image's channels): a tile then
    needs one row of that.
    """
    rows, region = walk_of(body).rows, body.region
    if len(body.domain.rows) < 2:
        return Walk()
    inner = body.domain.rows[-1].dims
    edge = len(region.shape) - region.columns
    shared = any(
        any(item.varies[:edge]) and any(item.varies[edge:]) and not item.varies[inner[-1]] for item in region.inputs
    )
    if not rows and shared and math.prod(region.shape[dim] for dim in inner) >= LONG_INNER:
        return Walk(inner)
    return Walk(rows if math.prod(region.shape[dim] for dim in rows) >= TALL else ())


def _group_lines(
    groups: Sequence[Group], inner: tuple[int, ...], side: str, block: str, steady: frozenset[str] = frozenset()
) -> list[str]:
    """Indices of ``groups``; where the last one is the walk's own, the others are the same for the whole tile.

    Those in ``steady`` stay single numbers.
    """
    flat = f"{side}s"
    if len(groups) < 2 or groups[-1].dims != inner:
        return index_lines(tuple(groups), flat)
    lines, rest = [f"{groups[-1].index} = inner_{side}"], f"outer_{side}"
    spread = f" + tl.zeros(({block},), tl.int32)"
    for group in reversed(groups[1:-1]):
        lines.append(f"{group.index} = {rest} % {group.size}{'' if group.index in steady else spread}")
        rest = f"{rest} // {group.size}"
    return [*lines, f"{groups[0].index} = {rest}{'' if groups[0].index in steady else spread}"]


def steady_rows(body: Body, walk: Walk) -> frozenset[str]:
    """Indices of the groups of rows that are the same for a whole tile of ``walk``: all but the innermost.

    None where an output does not follow the innermost one, or integers are read by position.
    """
    region, groups = body.region, body.domain.rows
    if not walk.rows or len(groups) < 2 or groups[-1].dims != walk.rows or region.gathers or region.positions:
        return frozenset()
    if not all(operand.varies[groups[-1].dims[-1]] for operand in region.outputs):
        return frozenset()
    return frozenset(group.index for group in groups[:-1])
