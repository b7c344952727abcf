"""Writes kernels for scatters: each program makes a tile of values and adds it to the results by atomic operations.

A tile's columns are the innermost dimensions along which everything agrees, so that a row of values is added to
neighbours in memory and its index is read once. Sums of 16-bit types are taken in float32 and rounded once.

Atomic sums of floating-point numbers are added in an order that differs from run to run, as PyTorch's own are; sums of
integers are the same in any order. Left out: results that a program could own (sorted indices).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import fold, group_size_text, index_lines, offset
from drk.assistant.synth.expression import kind_of
from drk.assistant.synth.launcher import (
    all_operands,
    call_lines,
    function_source,
    kernel_source,
    layout_lines,
    pointer_arguments,
    shape_arguments,
)
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Region
from drk.assistant.synth.scatters import LEFT_OUT, NO_ORDER, Scatter
from drk.gym.graph import Ref, TensorMeta

HALVES = frozenset({"float16", "bfloat16"})


def write_scatter(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a scatter region; ``owned`` values are known to be contiguous."""
    scatter = region.scatter
    assert scatter is not None
    positions = (operand for operand, _ in region.positions.values())
    groups = fold(region.shape, 0, [*region.inputs, *region.outputs, *positions]).rows
    tiled = len(groups) > 1
    if tiled:
        region = replace(region, columns=len(groups[-1].dims))
    body = Body(region, names, metas, two_dimensional=tiled)
    outputs = (scatter.node.name,)
    inputs = tuple(dict.fromkeys([*(operand.value for operand in region.inputs), scatter.base]))
    formula = body.formula(outputs)
    result = f"out_{names[scatter.node.name]}"
    pointers, shapes = pointer_arguments(body), shape_arguments(body)
    sizes = ["n_rows", "n_cols"] if tiled else ["n_elements"]
    constants = ["INDEX", "BLOCK_M", "BLOCK_N"] if tiled else ["INDEX", "BLOCK"]
    parameters = [*pointers.parameters, *sizes, *shapes.parameters, f"{result}_rows", f"{result}_step"]
    parameters += [f"{item}: tl.constexpr" for item in constants]
    words = ["Each value is added to the result that its index tells:", *formula, *body.remarks(), LEFT_OUT]
    words += [] if scatter.ordered else [NO_ORDER]
    kernel = kernel_source(f"{name}_kernel", parameters, words, _kernel_lines(body, scatter))
    step = f"{result}.stride({scatter.dim})"
    values = [*pointers.values, *sizes, *shapes.values, f"{result}.shape[{scatter.dim}]", step]
    launch = _launch_lines(body, scatter, name, values, owned, block)
    doc = f"Launch ``{name}_kernel`` over the values; what they are added to is there before."
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, 1)
    return KernelText(name, kernel, launcher, inputs, outputs, "; ".join(formula))


def _kernel_lines(body: Body, scatter: Scatter) -> list[str]:
    region = body.region
    nodes = [node for node in region.nodes if node is not scatter.node]
    return [
        *(_tile_lines(body) if body.two_dimensional else _flat_lines()),
        *body.loads(region.inputs),
        *body.statements(nodes),
        *_adding_lines(body, scatter),
    ]


def _flat_lines() -> list[str]:
    return ["index = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK)", "mask = index < n_elements"]


def _tile_lines(body: Body) -> list[str]:
    return [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        "row_mask = rows[:, None] < n_rows",
        "col_mask = cols[None, :] < n_cols",
        "mask = row_mask & col_mask",
        *index_lines(body.domain.rows, "rows"),
    ]


def _adding_lines(body: Body, scatter: Scatter) -> list[str]:
    """Statements that find each value's place and add it there."""
    operand, result = body.region.outputs[0], f"out_{body.names[scatter.node.name]}"
    kind = kind_of(operand.meta.dtype)
    index, place = body.names[scatter.index], f"{result}_row"
    lines = [f"{place} = {index}.to(tl.int64)"]
    if scatter.wraps:
        lines.append(f"{place} = tl.where({place} < 0, {place} + {result}_rows, {place})  # counted from the end")
    lines.append(f"inside = ({place} >= 0) & ({place} < {result}_rows)")
    row, column = body.suffixes
    terms = [f"{result}_ptr", f"{place} * {result}_step"]
    inner = offset(operand, body.names[operand.value], body.domain, row, column)
    value = body.text(Ref(scatter.source), kind)
    if scatter.scale != 1:
        value = f"{value} * {float(scatter.scale) if kind == 'float' else scatter.scale}"
    target = " + ".join([*terms, *([inner] if inner else [])])
    return [*lines, f'tl.atomic_add({target}, {value}, mask=mask & inside, sem="relaxed")']


def _launch_lines(
    body: Body, scatter: Scatter, name: str, values: list[str], owned: frozenset[str], block: Block
) -> list[str]:
    names, dtype = body.names, scatter.node.meta.dtype
    base, result = names[scatter.base], f"out_{names[scatter.node.name]}"
    operands, table = all_operands(body), dict(names)
    if dtype in HALVES:
        start = f"{base}.to(torch.float32, memory_format=torch.contiguous_format)"
    else:
        start = base if scatter.fresh else f"{base}.clone(memory_format=torch.contiguous_format)"
    lines = [*layout_lines(body, owned), f"{result} = {start}"]
    if body.two_dimensional:
        sizes = [
            " * ".join(text for group in groups if (text := group_size_text(group, operands, table)) != "1") or "1"
            for groups in (body.domain.rows, body.domain.cols)
        ]
        lines += [f"n_rows = {sizes[0]}", f"n_cols = {sizes[1]}"]
        count, grid = "n_rows * n_cols", "(triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n),)"
        tile = [
            f"block_n = min({block.elements}, triton.next_power_of_2(n_cols))",
            f"block_m = {block.elements} // block_n",
        ]
        options = ["BLOCK_M=block_m", "BLOCK_N=block_n"]
    else:
        size = " * ".join(group_size_text(group, operands, table) for group in body.domain.rows)
        lines.append(f"n_elements = {size}")
        count, grid, tile = "n_elements", f"(triton.cdiv(n_elements, {block.elements}),)", []
        options = [f"BLOCK={block.elements}"]
    lines += [f"index_type = tl.int32 if max({result}.numel(), {count}) < 2**31 else tl.int64", *tile]
    options = ["INDEX=index_type", *options, f"num_warps={block.elements // block.per_warp}"]
    lines += call_lines(f"{name}_kernel", grid, values, options)
    return [*lines, f"return {result}.to(torch.{dtype})" if dtype in HALVES else f"return {result}"]
