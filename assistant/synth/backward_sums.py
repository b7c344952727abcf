"""Writes kernels that compute rows and, on the way, sum some values over all rows: gradients of weights and biases.

Each program takes every n-th block of rows, keeps the sums of its columns in registers and stores one row of partial
sums; the launcher adds these up. Nothing is accumulated by atomics, so results do not vary from run to run. Where rows
are reduced as well, a program holds whole rows; else columns are split among programs too.

Left out: a second kernel for the last addition, which torch does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.backward_plan import holds_rows, row_sums
from drk.assistant.synth.body import Body, KernelText, tidy
from drk.assistant.synth.domain import index_lines
from drk.assistant.synth.launcher import (
    all_operands,
    allocation_lines,
    call_lines,
    function_source,
    index_type_line,
    kernel_source,
    layout_lines,
    pointer_arguments,
    row_size_lines,
    shape_arguments,
)
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.reducers import whole_lines
from drk.assistant.synth.regions import REDUCTIONS, Region
from drk.gym.graph import Node, TensorMeta

MULTIPROCESSORS = 132
"""Of the GPUs that are aimed at: as many programs at least, where there are rows for them."""
LEAST_BLOCKS = 8
"""Blocks of rows that a program takes before there are more programs than that: partial sums cost traffic too."""


@dataclass(frozen=True)
class _Sums:
    """A body, and the sums over rows beside it."""

    body: Body
    sums: tuple[Node, ...]
    whole: bool

    def parts(self, node: Node) -> str:
        """Name of the partial sums."""
        return f"{self.body.names[node.name]}_parts"


def write_sums(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a ``sums`` region; ``owned`` values are known to be contiguous."""
    sums = tuple(row_sums(region))
    # Sums still count as readers: what they read gets a name of its own.
    body = Body(region, names, metas, two_dimensional=True)
    work = _Sums(body, sums, holds_rows(region))
    outputs = (*(operand.value for operand in region.outputs), *(node.name for node in sums))
    inputs = tuple(operand.value for operand in region.inputs)
    formula = body.formula(outputs)
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    constants = [f"{item}: tl.constexpr" for item in ("INDEX", "BLOCK_M", "BLOCK_N")]
    parts = [f"{work.parts(node)}_ptr" for node in sums]
    parameters = [*pointers.parameters, *parts, "n_rows", "n_cols", "n_programs", *shapes.parameters, *constants]
    title = "Every n-th block of rows, and sums over them:"
    kernel = kernel_source(f"{name}_kernel", parameters, [title, *formula], _kernel_lines(work))
    values = [*pointers.values, *(work.parts(node) for node in sums), "n_rows", "n_cols", "n_programs", *shapes.values]
    launch = _launch_lines(work, name, values, owned, block)
    doc = f"Launch ``{name}_kernel`` and add up its partial sums."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, len(outputs))
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _kernel_lines(work: _Sums) -> list[str]:
    body, region = work.body, work.body.region
    edge = len(region.shape) - region.columns
    by_column = [item for item in region.inputs if not any(item.varies[:edge])]
    each_row = [item for item in region.inputs if item not in by_column]
    if work.whole:
        head = ["program = tl.program_id(0)", "cols = tl.arange(0, BLOCK_N)"]
    else:
        head = [
            "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
            "program = tl.program_id(0) // tiles_n",
            "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        ]
    place = "program * n_cols + cols[None, :]"
    loop = [
        "rows = (start + tl.arange(0, BLOCK_M)).to(INDEX)",
        "row_mask = rows[:, None] < n_rows",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.rows, "rows"),
        *body.loads(each_row),
        *_statements(work),
        *(body.store(operand) for operand in region.outputs),
        *(line for node in work.sums for line in _sum_lines(work, node)),
    ]
    return [
        *head,
        "col_mask = cols[None, :] < n_cols",
        *index_lines(body.domain.cols, "cols"),
        *body.loads(by_column),
        *(f"{body.names[node.name]} = tl.zeros((1, BLOCK_N), dtype=tl.float32)" for node in work.sums),
        "for start in range(program * BLOCK_M, n_rows, n_programs * BLOCK_M):",
        *(f"    {line}" for line in loop),
        *(f"tl.store({work.parts(node)}_ptr + {place}, {body.names[node.name]}, mask=col_mask)" for node in work.sums),
    ]


def _statements(work: _Sums) -> list[str]:
    body = work.body
    lines: list[str] = []
    pending: list[Node] = []
    kept = frozenset(node.args[0].name for node in work.sums)
    for node in body.region.nodes:
        if node in work.sums:
            continue
        if node.bare_op not in REDUCTIONS:
            pending.append(node)
            continue
        lines += body.statements(pending, kept)
        pending = []
        lines += whole_lines(body, node)
    return lines + body.statements(pending, kept)


def _sum_lines(work: _Sums, node: Node) -> list[str]:
    name, source = work.body.names[node.name], tidy(work.body.text(node.args[0], "float"))
    return [f"{name} += tl.sum(tl.where(mask, {source}, 0.0), axis=0)[None, :]"]


def _launch_lines(work: _Sums, name: str, values: list[str], owned: frozenset[str], block: Block) -> list[str]:
    body, names = work.body, work.body.names
    device = f"{names[all_operands(body)[0].value]}.device"
    lines = [*layout_lines(body, owned), *allocation_lines(body), *row_size_lines(body), _index_type(body)]
    if work.whole:
        lines += [
            "block_n = triton.next_power_of_2(n_cols)",
            f"block_m = max(1, min(64, {block.elements} // block_n))",
            f"num_warps = max(1, min(16, block_m * block_n // {block.per_warp}))",
        ]
        tiles = ""
    else:
        lines += [
            "block_n = min(128, triton.next_power_of_2(n_cols))",
            f"block_m = {block.elements} // block_n",
            f"num_warps = {block.elements // block.per_warp}",
        ]
        tiles = " * triton.cdiv(n_cols, block_n)"
    lines += [
        "n_blocks = triton.cdiv(n_rows, block_m)",
        f"n_programs = min(n_blocks // {LEAST_BLOCKS}, {MULTIPROCESSORS} * max(1, 32 // num_warps))",
        f"n_programs = min(n_blocks, max(n_programs, {MULTIPROCESSORS}))",
    ]
    for node in work.sums:
        lines.append(f"{work.parts(node)} = torch.empty((n_programs, n_cols), device={device}, dtype=torch.float32)")
    options = ["INDEX=index_type", "BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=num_warps"]
    lines += call_lines(f"{name}_kernel", f"(n_programs{tiles},)", values, options)
    results = [f"out_{names[operand.value]}" for operand in body.region.outputs]
    return [*lines, f"return {', '.join([*results, *(_total(work, node) for node in work.sums)])}"]


def _index_type(body: Body) -> str:
    if body.region.outputs:
        return index_type_line(body)
    return index_type_line(replace(body, region=replace(body.region, outputs=body.region.inputs[:1])))


def _total(work: _Sums, node: Node) -> str:
    """The sum of all partial sums, with the node's shape."""
    total = f"{work.parts(node)}.sum(0)"
    if len(node.meta.shape) == 1:
        return total
    read = next((item for item in work.body.region.inputs if all(item.varies)), None)
    shape = f"{work.body.names[read.value]}.shape[{-len(node.meta.shape)}:]" if read else repr(node.meta.shape)
    return f"{total}.reshape({shape})"
