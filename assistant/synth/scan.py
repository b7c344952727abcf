"""Writes kernels for scan regions: a block of rows walks along the scanned dimension, a tile at a time, with a carry.

Rows along memory are scanned by single warps where there are many of them, each thread taking neighbouring elements;
few rows get several warps each. Of rows whose elements lie apart in memory a thread has some neighbouring ones, so that
it adds up most of their elements by itself. Later tiles are on their way while one is scanned (``num_stages``).

Sums and products are scanned and carried in float64, so that long rows lose nothing. Scans from the end walk
backwards: Triton's own ``reverse`` moves each element through a whole warp, twice.

Left out: scans of one row by several programs. Where an inner dimension is no multiple of 16, so that nothing tells
Triton 3.6 what are neighbours in memory, lanes may lie along the scanned dimension, which is slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.domain import index_lines
from drk.assistant.synth.frames import transposed
from drk.assistant.synth.launcher import (
    allocation_lines,
    call_lines,
    index_type_line,
    layout_lines,
    result_line,
    row_blocks,
    row_size_lines,
)
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region, leading_names
from drk.gym.graph import Node, Ref, TensorMeta

LANE_ROWS = 64
"""Rows of a tile where neighbours in memory belong to different rows."""
STAGES = {1: 3, 2: 2, 3: 2}
"""Tiles on their way by the number of tensors that are read; more than three would not fit into shared memory."""


@dataclass(frozen=True)
class _Form:
    """How a scan combines: device function, neutral element, and the types of a tile and of the carry."""

    function: str
    neutral: str
    tile: str = "float32"
    carry: str = "float32"
    symbol: str = ""

    def joined(self, left: str, right: str) -> str:
        """Source that combines two values."""
        return f"{left} {self.symbol} {right}" if self.symbol else f"{self.function}({left}, {right})"

    def whole(self, axis: int) -> str:
        """Source of a whole tile combined along an axis."""
        if self.symbol == "+":
            return f"tl.sum(tile, axis={axis}, keep_dims=True)"
        return f"tl.reduce(tile, {axis}, {self.function}, keep_dims=True)"


_FORMS: Mapping[str, _Form] = {
    "cumsum": _Form("added", "0.0", tile="float64", carry="float64", symbol="+"),
    "cumprod": _Form("multiplied", "1.0", tile="float64", carry="float64", symbol="*"),
    "cummax": _Form("larger", 'float("-inf")'),
    "cummin": _Form("smaller", 'float("inf")'),
    "logcumsumexp": _Form("log_add_exp", 'float("-inf")'),
}
_COUNTED = _Form("added", "0", tile="int64", carry="int64", symbol="+")
"""Of sums of integers and booleans."""


def write_scan(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a scan region; ``owned`` values are known to be contiguous."""
    apart = any(transposed(item, region.columns) for item in region.inputs)
    body = Body(region, names, metas, two_dimensional=True, columns_first=apart)
    title = "A block of rows, tile by tile with a carry:"
    return row_blocks(
        body, name, names, title, _kernel_lines, lambda values: _launch_lines(body, name, values, owned, block)
    )


def _kernel_lines(body: Body) -> list[str]:
    region, scan = body.region, body.region.scan
    assert scan is not None
    node = next(item for item in region.nodes if item.name == scan.name)
    place = region.nodes.index(node)
    skipped = {scan.name, *scan.flips}
    leading = leading_names(region.nodes, scan.source)
    before = [item for item in region.nodes[:place] if item.name in leading - skipped]
    after = [item for item in region.nodes if item.name not in skipped and item not in before]
    for flip in scan.flips:
        body.rename(flip, body.names[scan.name])
    row, column = body.suffixes
    stages = STAGES.get(len(region.inputs), 1)
    walked = "step * BLOCK_N + tl.arange(0, BLOCK_N)"
    loop = [
        f"cols = n_cols - 1 - ({walked})" if scan.flips else f"cols = {walked}",
        f"col_mask = cols{column} {'>= 0' if scan.flips else '< n_cols'}",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.cols, "cols"),
        *(body.load(operand) for operand in region.inputs),
        *body.statements(before),
        *_scan_lines(body, node, _form(node)),
        *body.statements(after),
        *(body.store(operand) for operand in region.outputs),
    ]
    carry = "(1, BLOCK_M)" if body.columns_first else "(BLOCK_M, 1)"
    rows = "tl.program_id(0).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)"
    return [
        f"rows = {rows}",
        f"row_mask = rows{row} < n_rows",
        *index_lines(body.domain.rows, "rows"),
        f"carry = tl.full({carry}, {_form(node).neutral}, dtype=tl.{_form(node).carry})",
        f"for step in tl.range(0, tl.cdiv(n_cols, BLOCK_N), num_stages={stages}):",
        *(f"    {line}" for line in loop),
    ]


def _form(node: Node) -> _Form:
    return _COUNTED if node.meta.dtype == "int64" else _FORMS[node.bare_op]


def _scan_lines(body: Body, node: Node, form: _Form) -> list[str]:
    """Statements that scan a tile, make the result of it and carry what it comes to."""
    scan = body.region.scan
    assert scan is not None
    axis, result = (0 if body.columns_first else 1), body.names[node.name]
    source = tidy(body.text(Ref(scan.source), "int" if form is _COUNTED else "float"))
    loaded = [item for item in body.region.inputs if item.value == scan.source and body.mask(item) == "mask"]
    plain = loaded and float(0) == _number(form.neutral)  # what lies outside is read as 0
    tile = source if plain else f"tl.where(col_mask, {source}, {form.neutral})"
    if form.tile != "float32":
        tile = f"{f'({tile})' if ' ' in tile and plain else tile}.to(tl.{form.tile})"
    scanned = f"tl.associative_scan(tile, {axis}, {form.function})"
    joined = form.joined("carry", scanned)
    whole = form.whole(axis)
    carried = f"carry {form.symbol}= {whole}" if form.symbol else f"carry = {form.joined('carry', whole)}"
    return [
        f"tile = {tile}",
        f"{result} = ({joined}).to(tl.float32)" if form.tile == "float64" else f"{result} = {joined}",
        carried,
    ]


def _number(text: str) -> float:
    return float(text.removeprefix('float("').removesuffix('")'))


def _launch_lines(body: Body, name: str, values: list[str], owned: frozenset[str], block: Block) -> list[str]:
    warps = 1024 * block.elements // block.per_warp
    if body.columns_first:
        tile = [
            f"num_warps = max(1, min(8, triton.next_power_of_2({warps * LANE_ROWS // 16} // max(1, n_rows))))",
            f"block_m = {LANE_ROWS}",
            "block_n = min(triton.next_power_of_2(n_cols), 32)",
        ]
    else:
        tile = [
            f"num_warps = max(1, min(8, triton.next_power_of_2({warps} // max(1, n_rows))))",
            f"block_n = min(triton.next_power_of_2(n_cols), {2 * block.per_warp} * num_warps)",
            f"block_m = max(1, {2 * block.per_warp} * num_warps // block_n)",
        ]
    return [
        *layout_lines(body, owned),
        *allocation_lines(body),
        *row_size_lines(body),
        index_type_line(body),
        *tile,
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m),)",
            values,
            ["INDEX=index_type", "BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=num_warps"],
        ),
        result_line(body),
    ]
