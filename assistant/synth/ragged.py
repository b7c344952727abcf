"""Writes kernels for bags of different lengths: each program combines the rows of one bag.

A program loads a block of the bag's integers, the rows that they pick, and reduces those before it takes the next
block; nothing is accumulated by atomics, so that results are the same from run to run. A block has as many rows as a
bag has on average, up to :data:`LONGEST`.

Left out: splitting very long bags among programs, and operators around the bags.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.bags import MAX, MEAN, Bags, bags_of
from drk.assistant.synth.body import KernelText
from drk.assistant.synth.domain import unaligned
from drk.assistant.synth.gathers import OUTSIDE
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, operand_layout_lines
from drk.assistant.synth.lone_region import whole_tensors
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Facts, Region
from drk.gym.graph import Node, TensorMeta

LONGEST = 32
"""Most rows that are loaded at a time."""
WIDEST = 256
"""Most columns of a program."""


def build_bag_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of one operator that combines bags of rows, or None."""
    bags = bags_of(nodes[0], facts.metas) if len(nodes) == 1 else None
    if bags is None:
        return None
    read = [name for name in (bags.table, bags.ids, bags.offsets, bags.weights) if name is not None]
    result = unaligned(nodes[0].name, nodes[0].meta)
    return Region("bags", tuple(nodes), nodes[0].meta.shape, 1, whole_tensors(read, facts), (result,))


def write_bags(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher; ``owned`` values are known to be contiguous."""
    bags = bags_of(region.nodes[0], metas)
    assert bags is not None
    inputs = tuple(operand.value for operand in region.inputs)
    table, ids, offsets = names[bags.table], names[bags.ids], names[bags.offsets]
    result = f"out_{names[bags.node.name]}"
    word = {MEAN: "mean", MAX: "maximum"}.get(bags.mode, "sum")
    scale = f"{names[bags.weights]} * " if bags.weights else ""
    formula = f"{names[bags.node.name]} = {word} of {scale}{table}[{ids}] in each bag"
    strides = [f"{table}_stride", f"{table}_step", f"{ids}_stride", f"{offsets}_stride"]
    strides += [f"{names[bags.weights]}_stride"] if bags.weights else []
    parameters = [
        *(f"{names[value]}_ptr" for value in inputs),
        f"{result}_ptr",
        *("n_bags", "n_ids", "n_cols", f"{table}_rows"),
        *strides,
        *("BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"),
    ]
    words = ["A bag for each program, a block of its rows at a time:", formula, OUTSIDE]
    kernel = kernel_source(f"{name}_kernel", parameters, words, _kernel_lines(bags, names))
    lines = _launch_lines(bags, region, name, names, owned, block)
    doc = f"Launch ``{name}_kernel`` with a program for each bag."
    launcher = function_source(name, [names[value] for value in inputs], doc, lines, 1)
    return KernelText(name, kernel, launcher, inputs, (bags.node.name,), formula)


def _launch_lines(
    bags: Bags, region: Region, name: str, names: Mapping[str, str], owned: frozenset[str], block: Block
) -> list[str]:
    table, ids, offsets = names[bags.table], names[bags.ids], names[bags.offsets]
    result = f"out_{names[bags.node.name]}"
    values = [
        *(names[operand.value] for operand in region.inputs),
        result,
        *("n_bags", "n_ids", "n_cols", f"{table}.shape[0]"),
        *(f"{table}.stride({axis})" for axis in (0, 1)),
        *(f"{names[value]}.stride(0)" for value in (bags.ids, bags.offsets)),
        *([f"{names[bags.weights]}.stride(0)"] if bags.weights else []),
    ]
    return [
        *operand_layout_lines([item for item in region.inputs if item.value == bags.table], names, owned),
        f"n_bags = {offsets}.shape[0]{' - 1' if bags.closed else ''}",
        f"n_ids = {ids}.shape[0]",
        f"n_cols = {table}.shape[1]",
        f"{result} = {table}.new_empty((n_bags, n_cols))",
        f"block_n = min({WIDEST}, triton.next_power_of_2(n_cols))",
        f"block_m = min({LONGEST}, triton.next_power_of_2(triton.cdiv(n_ids, max(1, n_bags))))",
        f"num_warps = max(1, min(8, block_m * block_n // {block.per_warp}))",
        *call_lines(
            f"{name}_kernel",
            "(n_bags * triton.cdiv(n_cols, block_n),)",
            values,
            ["BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=num_warps"],
        ),
        f"return {result}",
    ]


def _kernel_lines(bags: Bags, names: Mapping[str, str]) -> list[str]:
    table, ids, offsets = names[bags.table], names[bags.ids], names[bags.offsets]
    result, largest = f"out_{names[bags.node.name]}", bags.mode == MAX
    empty = 'float("-inf")' if largest else "0.0"
    following = f"tl.load({offsets}_ptr + (bag + 1) * {offsets}_stride"
    end = f"{following}).to(tl.int64)"
    if not bags.closed:
        end = f"tl.where(bag + 1 < n_bags, {following}, mask=bag + 1 < n_bags, other=0).to(tl.int64), n_ids)"
    lines = [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "bag = (tl.program_id(0) // tiles_n).to(tl.int64)",
        "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)",
        "col_mask = cols[None, :] < n_cols",
        f"first = tl.load({offsets}_ptr + bag * {offsets}_stride).to(tl.int64)",
        f"end = {end}",
        f"combined = tl.full((1, BLOCK_N), {empty}, dtype=tl.float32)",
        "count = 0",
        "for start in range(first, end, BLOCK_M):",
    ]
    loop = [
        "members = start + tl.arange(0, BLOCK_M)[:, None]",
        "taken = members < end",
        f"row = tl.load({ids}_ptr + members * {ids}_stride, mask=taken, other=0).to(tl.int64)",
        *([f"taken = taken & (row != {bags.padding})"] if bags.padding is not None else []),
        f"wanted = taken & (row >= 0) & (row < {table}_rows) & col_mask",
        f"place = row * {table}_stride + cols[None, :] * {table}_step",
        f"values = tl.load({table}_ptr + place, mask=wanted, other=0.0).to(tl.float32)",
    ]
    if bags.weights:
        weights = names[bags.weights]
        loop.append(f"weight = tl.load({weights}_ptr + members * {weights}_stride, mask=taken, other=0.0)")
        loop.append("values = tl.where(wanted, values * weight.to(tl.float32), 0.0)")
    if largest:
        loop.append(f"values = tl.where(taken, values, {empty})")
        loop.append("combined = larger(combined, tl.reduce(values, 0, larger)[None, :])")
    else:
        loop.append("combined += tl.sum(values, axis=0)[None, :]")
    loop.append("count += tl.sum(taken.to(tl.int32))")
    lines += [f"    {line}" for line in loop]
    if largest:
        lines.append("combined = tl.where(count > 0, combined, 0.0)")
    elif bags.mode == MEAN:
        lines.append("combined = combined / tl.maximum(count, 1)")
    return [*lines, f"tl.store({result}_ptr + bag * n_cols + cols[None, :], combined, mask=col_mask)"]
