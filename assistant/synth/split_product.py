"""Products whose output tiles are too few for the device: the inner dimension in parts, one program for each.

The product's kernel then leaves its sums in a buffer (part, row, column); a second kernel adds the parts up, always in
the same order, and goes on with the epilogue. Programs of the first one read neighbouring parts of the factors, so that
a weight that few rows are multiplied by is read by the whole device.

Left out: atomics (sums would depend on the order of programs), products with bands.
"""

from __future__ import annotations

from collections.abc import Sequence

from drk.assistant.synth.body import Body
from drk.assistant.synth.launcher import Arguments, call_lines, kernel_source
from drk.assistant.synth.tiles import Tile

SUM_COLS = 64
SUM_ELEMENTS = 8192
"""Block of the second kernel, over all parts."""
PART_LINES = (
    "# Each program takes the part of the inner dimension that axis 1 of the grid numbers.",
    "part = tl.program_id(1).to(INDEX)",
    "first_inner = part * (tl.cdiv(tl.cdiv(n_inner, PARTS), BLOCK_K) * BLOCK_K)",
    "last_inner = tl.minimum(first_inner + tl.cdiv(tl.cdiv(n_inner, PARTS), BLOCK_K) * BLOCK_K, n_inner)",
)
"""Statements that set ``first_inner`` and ``last_inner``."""


def store_lines(accumulators: Sequence[str], rows: str) -> list[str]:
    """Statements that leave sums of a part in the buffer."""
    place = "rows[:, None]) * n_cols + cols[None, :]"
    lines = [
        "",
        f"mask = ({rows}[:, None] < n_rows) & (cols[None, :] < n_cols)",
        f"parts_ptrs = parts_ptr + (part * all_rows + {place}",
    ]
    for number, name in enumerate(accumulators):
        if number:
            lines.append(f"parts_ptrs = parts_ptr + ((part + {number} * PARTS) * all_rows + {place}")
        lines.append(f"tl.store(parts_ptrs, {name}, mask=mask)")
    return lines


def sum_kernel(
    body: Body, name: str, pointers: Arguments, shapes: Arguments, formula: Sequence[str], epilogue: Sequence[str]
) -> str:
    """Source of the second kernel; ``epilogue`` are the statements after the product."""
    accumulators = [body.names[item.node.name] for item in body.region.products]
    place = "rows[None, :, None]) * n_cols + cols[None, None, :]"
    lines = [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        "part = tl.arange(0, PARTS)[:, None, None].to(INDEX)",
        f"parts_ptrs = parts_ptr + (part * n_rows + {place}",
        "parts_mask = (rows[None, :, None] < n_rows) & (cols[None, None, :] < n_cols)",
    ]
    for number, accumulator in enumerate(accumulators):
        if number:
            lines.append(f"parts_ptrs = parts_ptr + ((part + {number} * PARTS) * n_rows + {place}")
        lines.append(f"{accumulator} = tl.sum(tl.load(parts_ptrs, mask=parts_mask, other=0.0), axis=0)")
    constants = [f"{item}: tl.constexpr" for item in ("INDEX", "PARTS", "BLOCK_M", "BLOCK_N")]
    parameters = ["parts_ptr", *pointers.parameters, "n_rows", "n_cols", *shapes.parameters, *constants]
    doc = ["Sums of the product's parts, then the epilogue:", *formula]
    return kernel_source(f"{name}_kernel", parameters, doc, [*lines, *epilogue])


def sum_launch_lines(name: str, pointers: Arguments, shapes: Arguments, tile: Tile) -> list[str]:
    """Statements that launch the second kernel."""
    rows = max(1, SUM_ELEMENTS // (SUM_COLS * tile.parts))
    options = [
        "INDEX=index_type",
        f"PARTS={tile.parts}",
        f"BLOCK_M={rows}",
        f"BLOCK_N={SUM_COLS}",
        "num_warps=4",
    ]
    grid = f"(triton.cdiv(all_rows, {rows}) * triton.cdiv(n_cols, {SUM_COLS}),)"
    arguments = ["parts", *pointers.values, "all_rows", "n_cols", *shapes.values]
    return call_lines(f"{name}_kernel", grid, arguments, options)


def parts_lines(body: Body, tile: Tile, out: str) -> list[str]:
    """Statements that make the buffer of parts."""
    count = tile.parts * len(body.region.products)
    return [
        f"all_rows = {f'{out}.numel() // n_cols' if body.region.products[0].batched else 'n_rows'}",
        f"parts = torch.empty(({count}, all_rows, n_cols), device={out}.device, dtype=torch.float32)",
    ]
