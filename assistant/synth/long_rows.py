"""Writes kernels for rows that are too long for registers: one program walks its rows in blocks of columns.

Reductions come in levels, as in :mod:`drk.assistant.synth.split_reduction`: each level is one loop over the row, which
keeps an accumulator per lane and reduces the lanes at its end; values of full size are written by a last loop. Loops
behind the first read the row from the L2 cache. A maximum and its sums of exponentials take one loop together
(:mod:`drk.assistant.synth.online`). Each loop goes over the whole blocks without column masks, then over what is left.

Where rows lie next to each other in memory and one walk does (a sum or maximum over a middle dimension), a program
takes as many rows as fill whole cache lines, and lanes run along them.

Left out: other rows whose elements lie apart in memory (several in registers, or pieces), and few rows (pieces).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drk.assistant.synth import online
from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import Group, Operand, fold, index_lines
from drk.assistant.synth.expression import scalar_flops
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
from drk.assistant.synth.online import Online, online_groups
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.reducers import begin_lines, row_lines, twin_of, update_lines
from drk.assistant.synth.regions import REDUCTIONS, Region
from drk.assistant.synth.split_reduction import Pass, passes_of
from drk.assistant.synth.split_walk import Walk, rows_walk, steady_rows
from drk.gym.graph import Node, TensorMeta

MAX_REGISTERS = 64
"""Registers of a thread that a row and what is made of it may take, of the 128 that each of 512 threads can have."""
MAX_ELEMENTS = 32
"""Most elements of one row that a thread holds."""
MAX_ELEMENTS_READ_ONCE = 16
"""The same for rows that a walk would read once as well: there is nothing to be gained by holding them."""
LEAST_WALK = 64
"""Shortest rows beside each other that are walked; shorter ones are held."""
LINES = 32
"""Fewest rows of a program where rows lie next to each other: a cache line of float32."""
WIDE = 256
"""Most of them."""
PROGRAMS = 512
"""Programs at which such rows aim: about four for each multiprocessor."""
LEAST_PROGRAMS = 256
"""Fewest of them."""
THREADS = 512
"""Threads of the largest program of a row kernel: 16 warps."""
HEAVY = 48
"""Arithmetic instructions for an element from which on lanes beyond a row's end cost more than a walk."""
WIDTHS = (2048, 1024, 512, 256)
"""Block lengths of walks over rows that are heavy: the launcher takes the one with the fewest lanes beyond the end."""


def fits_registers(region: Region) -> bool:
    """Whether a program of 16 warps should hold a row of ``region`` and what is made of it in registers."""
    edge = len(region.shape) - region.columns
    if any(transposed(item, region.columns) for item in region.inputs):
        return not beside_each_other(region)
    n_cols = 1 << max(0, math.prod(region.shape[edge:]) - 1).bit_length()
    walks = sum(item.walks for item in passes_of(region, online_groups(region.nodes)))
    wasteful = n_cols >= 2 * WIDTHS[-1] and 4 * n_cols > 5 * math.prod(region.shape[edge:])
    if walks == 1 and wasteful and is_heavy(region):
        return False
    most = MAX_ELEMENTS if walks > 1 else MAX_ELEMENTS_READ_ONCE
    return n_cols <= most * THREADS and n_cols * live_rows(region) <= MAX_REGISTERS * THREADS


def beside_each_other(region: Region) -> bool:
    """Whether rows lie next to each other in memory, several cache lines of them, and one walk is all they need."""
    edge = len(region.shape) - region.columns
    if math.prod(region.shape[edge:]) < LEAST_WALK or region.gathers or region.positions:
        return False
    full = [item for item in region.inputs if any(item.varies[edge:])]
    groups = fold(region.shape, region.columns, [*region.inputs, *region.outputs]).rows
    if not groups or not all(transposed(item, region.columns) and _unit_along(item, groups[-1]) for item in full):
        return False
    inner = math.prod(region.shape[dim] for dim in groups[-1].dims)
    many = inner >= LINES and math.prod(region.shape[:edge]) >= LINES * LEAST_PROGRAMS
    return many and sum(item.walks for item in passes_of(region)) == 1


def _unit_along(operand: Operand, group: Group) -> bool:
    """Whether an operand's elements are neighbours along the last dimension of ``group`` that it has."""
    axes = [axis for dim in group.dims if operand.varies[dim] and (axis := operand.axes[dim]) is not None]
    return bool(axes) and operand.meta.strides[axes[-1]] == 1


def is_heavy(region: Region) -> bool:
    """Whether a kernel of ``region`` is bound by arithmetic, as one with powers is, so that empty lanes cost time."""
    edge = len(region.shape) - region.columns
    full = {item.value for item in region.inputs if any(item.varies[edge:])}
    nodes: list[Node] = []
    for node in region.nodes:
        if node.bare_op not in REDUCTIONS and full & set(node.inputs()):
            full.add(node.name)
            nodes.append(node)
    return scalar_flops(nodes) >= HEAVY


def live_rows(region: Region) -> int:
    """Most values of full size that are needed at the same time, each 4 bytes an element, inputs from the start."""
    edge = len(region.shape) - region.columns
    alive = {item.value for item in region.inputs if any(item.varies[edge:])}
    full = alive | {item.value for item, _ in region.positions.values() if any(item.varies[edge:])}
    last = {name: place for place, node in enumerate(region.nodes) for name in node.inputs()}
    last |= {item.value: len(region.nodes) for item in region.outputs}
    most = len(alive)
    for place, node in enumerate(region.nodes):
        if node.bare_op not in REDUCTIONS and full & set(node.inputs()):
            full.add(node.name)
            alive.add(node.name)
        alive = {name for name in alive if last.get(name, 0) > place}
        most = max(most, len(alive))
    return max(1, most)


@dataclass(frozen=True)
class _Loops:
    """The walks of one kernel over its rows, and the maxima that take their sums along."""

    passes: tuple[Pass, ...]
    groups: tuple[Online, ...]

    def of(self, item: Pass) -> list[Online]:
        """Groups of one walk."""
        return [group for group in self.groups if group.top in item.made]

    def alone(self, item: Pass) -> list[Node]:
        """Reductions of one walk that belong to no group, those that others take their result from first."""
        grouped = {node.name for group in self.groups for node in (group.top, *group.sums)}
        found = [node for node in item.made if node.name not in grouped]
        return sorted(found, key=lambda node: twin_of(node, item.region.nodes) is not None)


def write_long_rows(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a row region in loops; ``owned`` values are known to be contiguous."""
    body = Body(region, names, metas, two_dimensional=True)
    walk = rows_walk(body) if beside_each_other(region) else Walk()
    body.steady = steady_rows(body, walk)
    groups = online_groups(region.nodes)
    loops = _Loops(tuple(passes_of(region, groups)), groups)
    return row_blocks(
        body,
        name,
        names,
        "Rows in blocks of columns, by one program each:",
        lambda own: _kernel_lines(own, loops, walk),
        lambda values: _launch_lines(body, name, values, owned, block, walk),
        ("n_rows", "n_cols", *(("inner_rows", "row_tiles") if walk.rows else ())),
    )


def _kernel_lines(body: Body, loops: _Loops, walk: Walk) -> list[str]:
    region = body.region
    edge = len(region.shape) - region.columns
    flat = [item for item in region.inputs if not any(item.varies[edge:])]
    lines = [
        *walk.row_lines(body, "tl.program_id(0)"),
        *body.loads(flat),
        "whole = n_cols // BLOCK_N * BLOCK_N",
    ]
    known: set[str] = set()
    for item in loops.passes:
        lines += body.statements([node for node in item.per_row if node.name not in known])
        known |= {node.name for node in item.per_row}
        outputs = item.region.outputs
        lines += [body.store(operand) for operand in outputs if not any(operand.varies[edge:])]
        if item.walks:
            stored = [operand for operand in outputs if any(operand.varies[edge:])]
            lines += _walk_lines(body, loops, item, stored)
    return lines


def _walk_lines(body: Body, loops: _Loops, item: Pass, stored: Sequence[Operand]) -> list[str]:
    """One loop over the row, with the accumulators before it and the lanes' reduction behind it."""
    groups, alone = loops.of(item), loops.alone(item)
    edge = len(item.region.shape) - item.region.columns
    spread = [operand for operand in item.region.inputs if any(operand.varies[edge:])]
    inside = [
        "cols = start + tl.arange(0, BLOCK_N)",
        "col_mask = cols[None, :] < n_cols if tail else tl.full((1, BLOCK_N), True, tl.int1)",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.cols, "cols"),
        *body.loads(spread),
        *body.statements(item.tiled),
        *(line for group in groups for line in online.update_lines(body, group)),
        *(line for node in alone for line in update_lines(body, node, "start == 0")),
        *(body.store(operand) for operand in stored),
    ]
    return [
        *(line for group in groups for line in online.begin_lines(body, group)),
        *(line for node in alone for line in begin_lines(body, node)),
        "for tail in tl.static_range(2):",
        "    for start in range(whole if tail else 0, n_cols if tail else whole, BLOCK_N):",
        *(f"        {line}" for line in inside),
        *(line for group in groups for line in online.end_lines(body, group)),
        *(line for node in alone for line in row_lines(body, node)),
    ]


def _launch_lines(
    body: Body, name: str, values: list[str], owned: frozenset[str], block: Block, walk: Walk
) -> list[str]:
    warps = block.elements // block.per_warp
    elements, width = 2 * block.elements, f"min({2 * block.elements}, triton.next_power_of_2(n_cols))"
    sides = [f"block_n = {width}", f"block_m = max(1, {elements} // block_n)"]
    if beside_each_other(body.region):
        warps = 8
        sides = [
            *(walk.inner_row_lines(body) if walk.rows else []),
            f"block_m = min({WIDE}, max({LINES}, triton.next_power_of_2(n_rows // {PROGRAMS})))",
            *(["block_m = min(block_m, triton.next_power_of_2(inner_rows))"] if walk.rows else []),
            f"block_n = {_beside_elements(body.region)} // block_m",
            *(["row_tiles = triton.cdiv(inner_rows, block_m)"] if walk.rows else []),
        ]
    elif is_heavy(body.region):
        width = f"min({WIDTHS}, key=lambda width: triton.cdiv(n_cols, width) * width)"
        sides = [f"block_n = {width}", f"block_m = max(1, {block.elements} // block_n)"]
    return [
        *layout_lines(body, owned),
        *allocation_lines(body),
        *row_size_lines(body),
        index_type_line(body),
        *sides,
        *call_lines(
            f"{name}_kernel",
            "(row_tiles * (n_rows // inner_rows),)" if walk.rows else "(triton.cdiv(n_rows, block_m),)",
            values,
            ["INDEX=index_type", "BLOCK_M=block_m", "BLOCK_N=block_n", f"num_warps={warps}"],
        ),
        result_line(body),
    ]


def _beside_elements(region: Region) -> int:
    """Elements of a tile: 16 a thread of 8 warps, or 8 where many accumulators and inputs want registers."""
    edge = len(region.shape) - region.columns
    kept = sum(1 + (node.bare_op in {"argmax", "argmin", "var"}) for node in region.nodes if node.bare_op in REDUCTIONS)
    read = sum(any(item.varies[edge:]) for item in region.inputs)
    return 4096 if kept + read <= 2 else 2048
