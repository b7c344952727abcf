"""Writes kernels for scan regions: a block of rows walks along the scanned dimension, a tile at a time, with a carry.

Tiles are scanned in registers, in float64: only a thread's own elements and one number per thread are added up, so the
loads remain the bottleneck, and long rows lose nothing. Rows whose elements lie apart in memory are taken many at a
time.

Left out: scans of one row by several programs.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from drk.gym.graph import Ref, TensorMeta


def write_scan(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a scan region; ``owned`` values are known to be contiguous."""
    body = Body(region, names, metas, two_dimensional=True)
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
    result, backwards = body.names[scan.name], bool(scan.flips)
    product = node.bare_op == "cumprod"
    neutral, symbol = ("1.0", "*") if product else ("0.0", "+")
    option = ", reverse=True" if backwards else ""
    scanned = f"tl.associative_scan(tile, 1, multiplied{option})" if product else f"tl.cumsum(tile, axis=1{option})"
    whole = "tl.reduce(tile, 1, multiplied)" if product else "tl.sum(tile, axis=1)"
    start = "(tl.cdiv(n_cols, BLOCK_N) - 1 - step) * BLOCK_N" if backwards else "step * BLOCK_N"
    statements = body.statements(before)
    source = tidy(body.text(Ref(scan.source), "float"))
    for flip in scan.flips:
        body.rename(flip, result)
    loop = [
        f"cols = {start} + tl.arange(0, BLOCK_N)",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.cols, "cols"),
        *(body.load(operand) for operand in region.inputs),
        *statements,
        f"tile = tl.where(col_mask, {source}, {neutral}).to(tl.float64)",
        f"{result} = (carry {symbol} {scanned}).to(tl.float32)",
        f"carry {symbol}= {whole}[:, None]",
        *body.statements(after),
        *(body.store(operand) for operand in region.outputs),
    ]
    return [
        "rows = tl.program_id(0).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "row_mask = rows[:, None] < n_rows",
        *index_lines(body.domain.rows, "rows"),
        f"carry = tl.full((BLOCK_M, 1), {neutral}, dtype=tl.float64)",
        "for step in range(0, tl.cdiv(n_cols, BLOCK_N)):",
        *(f"    {line}" for line in loop),
    ]


def _launch_lines(body: Body, name: str, values: list[str], owned: frozenset[str], block: Block) -> list[str]:
    turned = any(transposed(item, body.region.columns) for item in body.region.inputs)
    tile = ["block_m = 64", "block_n = 32"]
    if not turned:
        tile = [
            f"block_n = min({2 * block.elements}, triton.next_power_of_2(n_cols))",
            f"block_m = max(1, min(16, {block.elements} // block_n))",
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
            ["INDEX=index_type", "BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=4"],
        ),
        result_line(body),
    ]
