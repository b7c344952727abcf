"""Writes kernels for row regions: reductions over some dimensions with pointwise operators around them.

The reduced dimensions are a row, whichever they are in the tensors (channels, say).

A program holds ``BLOCK_M`` whole rows in registers (one row from about 2,000 columns on), so every input is read once
and every output written once, whatever the number of reductions. Variance is computed in two passes over the
registers; sums are trees, not running sums.

Rows too long for registers are walked in blocks (:mod:`drk.assistant.synth.long_rows`); few long ones are no matter of
this module, :mod:`drk.assistant.synth.split_reduction` takes them in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from drk.assistant.synth.body import Body, KernelText
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
from drk.assistant.synth.long_rows import THREADS, fits_registers, live_rows, write_long_rows
from drk.assistant.synth.pointwise import BLOCKS, Block
from drk.assistant.synth.reducers import whole_lines
from drk.assistant.synth.regions import REDUCTIONS, Region
from drk.assistant.synth.split_walk import Walk, rows_walk, steady_rows
from drk.gym.graph import Node, TensorMeta

MANY_ROWS = 16_384
"""From so many short rows on a thread has twice as many elements: what is done once for a thread counts less."""
TWICE = 65_536 // (2 * THREADS)
"""Registers a thread with which two of the largest programs share a multiprocessor: one loads while one computes."""
SHORT_ROW = 1024
"""Longest row of which a thread can have twice as many elements and registers to spare."""


def write_row(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a row region; ``owned`` values are known to be contiguous."""
    if not fits_registers(region):
        return write_long_rows(region, name, names, metas, owned, block)
    body = Body(region, names, metas, two_dimensional=True)
    walk = rows_walk(body)
    body.steady = steady_rows(body, walk)
    return row_blocks(
        body,
        name,
        names,
        "Whole rows in registers:",
        lambda own: _kernel_lines(own, walk),
        lambda values: _launch_lines(body, name, values, owned, block, walk),
        ("n_rows", "n_cols", *(("inner_rows", "row_tiles") if walk.rows else ())),
    )


def _kernel_lines(body: Body, walk: Walk) -> list[str]:
    return [
        *walk.row_lines(body, "tl.program_id(0)"),
        "cols = tl.arange(0, BLOCK_N)",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.cols, "cols"),
        *body.loads(body.region.inputs),
        *_statements(body),
        *(body.store(operand) for operand in body.region.outputs),
    ]


def _statements(body: Body) -> list[str]:
    """Pointwise statements and reductions in graph order."""
    lines: list[str] = []
    pending: list[Node] = []
    for node in body.region.nodes:
        if node.bare_op not in REDUCTIONS:
            pending.append(node)
            continue
        lines += body.statements(pending)
        pending = []
        lines += whole_lines(body, node)
    return lines + body.statements(pending)


def _launch_lines(
    body: Body, name: str, values: list[str], owned: frozenset[str], block: Block, walk: Walk
) -> list[str]:
    # Rows whose elements lie apart in memory are read several at a time, so that each sector is read once.
    picked = [item.whole for item in body.region.gathers if item.whole is not None]
    turned = any(transposed(item, body.region.columns) for item in (*body.region.inputs, *picked))
    fewest, most = (8, max(block.elements, 4096)) if turned else (1, block.elements)
    per_warp = block.per_warp
    if body.domain.n_rows >= MANY_ROWS and body.domain.n_cols <= SHORT_ROW:
        most, per_warp = max(most, 2 * block.elements), 2 * per_warp
    return [
        *layout_lines(body, owned),
        *allocation_lines(body),
        *row_size_lines(body),
        index_type_line(body),
        "block_n = triton.next_power_of_2(n_cols)",
        f"block_m = max({fewest}, min(64, {most} // block_n))",
        f"num_warps = max(1, min(16, block_m * block_n // {per_warp}))",
        *([*walk.inner_row_lines(body), "row_tiles = triton.cdiv(inner_rows, block_m)"] if walk.rows else []),
        *call_lines(
            f"{name}_kernel",
            "(row_tiles * (n_rows // inner_rows),)" if walk.rows else "(triton.cdiv(n_rows, block_m),)",
            values,
            [
                "INDEX=index_type",
                "BLOCK_M=block_m",
                "BLOCK_N=block_n",
                "num_warps=num_warps",
                *_register_limit(body, block),
            ],
        ),
        result_line(body),
    ]


def _register_limit(body: Body, block: Block) -> list[str]:
    """In the default form, bound the registers of rows that would need just too many for two programs at once."""
    edge = len(body.region.shape) - body.region.columns
    n_cols = 1 << (math.prod(body.region.shape[edge:]) - 1).bit_length()
    held = n_cols * live_rows(body.region) // THREADS
    single = block == BLOCKS[0] and not any(transposed(item, body.region.columns) for item in body.region.inputs)
    return [f"maxnreg={TWICE}"] if single and TWICE // 2 < held <= TWICE else []
