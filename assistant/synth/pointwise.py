"""Writes kernels for pointwise regions.

Where all operands have the output's shape and order, each program handles ``BLOCK`` elements of a flat walk. Where some
are broadcast or strided, programs handle tiles of rows and columns instead: the innermost dimensions along which all
operands agree are the columns, and only a row's index needs division and remainder.

Left out: outputs in other memory formats than row-major and channels-last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import fold, group_size_text, index_lines
from drk.assistant.synth.frames import transposed
from drk.assistant.synth.launcher import (
    all_operands,
    allocation_lines,
    call_lines,
    function_source,
    index_type_line,
    kernel_source,
    layout_lines,
    pointer_arguments,
    result_line,
    shape_arguments,
)
from drk.assistant.synth.regions import Region
from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class Block:
    """How many elements a program of a pointwise or row kernel handles, and how many a warp."""

    elements: int = 1024
    per_warp: int = 256


BLOCKS = (Block(1024, 256), Block(2048, 512), Block(4096, 512), Block(1024, 128))
"""Launch configurations, the default first."""


def write_pointwise(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a pointwise region; ``owned`` values are known to be contiguous."""
    positions = (operand for operand, _ in region.positions.values())
    groups = fold(region.shape, 0, [*region.inputs, *region.outputs, *positions]).rows
    tiled = len(groups) > 1
    if tiled:
        region = replace(region, columns=len(groups[-1].dims))
    body = Body(region, names, metas, two_dimensional=tiled)
    outputs = tuple(operand.value for operand in region.outputs)
    inputs = tuple(operand.value for operand in region.inputs)
    formula = body.formula(outputs)
    parameters, index, launch = _tiled(body, name, owned, block) if tiled else _flat(body, name, owned, block)
    lines = [
        *index,
        *body.loads(region.inputs),
        *body.statements(region.nodes),
        *(body.store(operand) for operand in region.outputs),
    ]
    words = ["One pass over the output, elementwise:", *formula, *body.remarks()]
    kernel = kernel_source(f"{name}_kernel", parameters, words, lines)
    doc = f"Launch ``{name}_kernel`` over the output."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _flat(body: Body, name: str, owned: frozenset[str], block: Block) -> tuple[list[str], list[str], list[str]]:
    """Kernel parameters, index statements and launcher of the flat form."""
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    parameters = [*pointers.parameters, "n_elements", *shapes.parameters, "INDEX: tl.constexpr", "BLOCK: tl.constexpr"]
    index = ["index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)", "mask = index < n_elements"]
    launch = [
        *layout_lines(body, owned),
        *allocation_lines(body),
        f"n_elements = out_{body.names[body.region.outputs[0].value]}.numel()",
        index_type_line(body),
        *call_lines(
            f"{name}_kernel",
            f"(triton.cdiv(n_elements, {block.elements}),)",
            [*pointers.values, "n_elements", *shapes.values],
            ["INDEX=index_type", f"BLOCK={block.elements}", f"num_warps={block.elements // block.per_warp}"],
        ),
        result_line(body),
    ]
    return parameters, index, launch


def _tiled(body: Body, name: str, owned: frozenset[str], block: Block) -> tuple[list[str], list[str], list[str]]:
    """Kernel parameters, index statements and launcher of the form with rows and columns."""
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    constants = ["INDEX: tl.constexpr", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    parameters = [*pointers.parameters, "n_rows", "n_cols", *shapes.parameters, *constants]
    index = [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        "row_mask = rows[:, None] < n_rows",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.rows, "rows"),
    ]
    operands, names = all_operands(body), dict(body.names)
    sizes = [
        " * ".join(text for group in groups if (text := group_size_text(group, operands, names)) != "1") or "1"
        for groups in (body.domain.rows, body.domain.cols)
    ]
    # Where some operand has other neighbours in memory than the tile's columns, tiles are square: both sides are read
    # in whole sectors.
    turned = any(transposed(item, body.region.columns) for item in (*body.region.inputs, *body.region.outputs))
    block = Block(max(block.elements, 2048), block.per_warp) if turned else block
    launch = [
        *layout_lines(body, owned),
        *allocation_lines(body),
        f"n_rows = {sizes[0]}",
        f"n_cols = {sizes[1]}",
        index_type_line(body),
        *_side_lines(block, turned),
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n),)",
            [*pointers.values, "n_rows", "n_cols", *shapes.values],
            [
                "INDEX=index_type",
                "BLOCK_M=block_m",
                "BLOCK_N=block_n",
                f"num_warps={block.elements // block.per_warp}",
            ],
        ),
        result_line(body),
    ]
    return parameters, index, launch


def _side_lines(block: Block, turned: bool) -> list[str]:
    """Statements that set a tile's sides: as wide as can be, or about square."""
    if not turned:
        return [
            f"block_n = min({block.elements}, triton.next_power_of_2(n_cols))",
            f"block_m = {block.elements} // block_n",
        ]
    return [
        "block_n = min(64, triton.next_power_of_2(n_cols))",
        f"block_m = min({block.elements} // block_n, triton.next_power_of_2(n_rows))",
        f"block_n = min({block.elements} // block_m, triton.next_power_of_2(n_cols))",
    ]
