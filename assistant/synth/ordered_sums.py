"""Writes segment sums whose terms are added in a fixed order: results are the same from run to run, bit for bit.

The launcher sorts the integers (stably, so that equal ones keep their order) and looks up where each result's terms
begin; a program then adds up the rows of one result, a block of them at a time. That takes a sort more than atomic
additions do (:mod:`drk.assistant.synth.scattering`), whose order varies; it is a variant of its own.

Left out: sums along other dimensions than the first, one element for each integer, operators before, and splitting very
many terms of one result among programs.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.body import KernelText
from drk.assistant.synth.domain import unaligned
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source
from drk.assistant.synth.lone_region import whole_tensors
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.ragged import LONGEST, WIDEST
from drk.assistant.synth.regions import Facts, Region
from drk.assistant.synth.scatters import LEFT_OUT, Scatter, scatter_of
from drk.gym.graph import Node, TensorMeta


def is_segment_sum(found: Scatter | None) -> bool:
    """Whether a scatter adds up whole rows of floating-point numbers."""
    return found is not None and not found.ordered and found.walks and not found.dim and len(found.node.meta.shape) > 1


def build_ordered_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of one segment sum, or None."""
    found = scatter_of(nodes[0], facts.metas) if len(nodes) == 1 else None
    if found is None or not is_segment_sum(found):
        return None
    inputs = whole_tensors((found.base, found.index, found.source), facts)
    return Region("ordered", tuple(nodes), found.node.meta.shape, 1, inputs, (unaligned(nodes[0].name, nodes[0].meta),))


def write_ordered(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    _owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher of a segment sum."""
    found = scatter_of(region.nodes[0], metas)
    assert found is not None
    base, index, source = (names[value] for value in (found.base, found.index, found.source))
    result = f"out_{names[found.node.name]}"
    pointers = [f"{base}_ptr", f"{source}_ptr", "order_ptr", "starts_ptr", f"{result}_ptr"]
    parameters = [*pointers, "n_cols", "BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    formula = f"{names[found.node.name]} = {base} and the rows of {source} that {index} sends there"
    words = ["The terms of one result for each program, in their order:", formula, LEFT_OUT]
    kernel = kernel_source(f"{name}_kernel", parameters, words, _kernel_lines(found, base, source, result))
    wrapped = [f"{index} = torch.where({index} < 0, {index} + n_rows, {index})"] if found.wraps else []
    launch = [
        f"{base} = {base}.contiguous()",
        f"{source} = {source}.contiguous()",
        f"{result} = torch.empty_like({base})",
        f"n_rows = {base}.shape[0]",
        f"n_cols = {base}.numel() // max(1, n_rows)",
        *wrapped,
        f"places, order = torch.sort({index}.clamp(-1, n_rows).to(torch.int32), stable=True)",
        f"ends = torch.arange(n_rows + 1, device={base}.device, dtype=torch.int32)",
        "starts = torch.searchsorted(places, ends)",
        f"block_n = min({WIDEST}, triton.next_power_of_2(n_cols))",
        f"block_m = min({LONGEST}, triton.next_power_of_2(triton.cdiv({index}.shape[0], max(1, n_rows))))",
        f"num_warps = max(1, min(8, block_m * block_n // {block.per_warp}))",
        *call_lines(
            f"{name}_kernel",
            "(n_rows * triton.cdiv(n_cols, block_n),)",
            [base, source, "order", "starts", result, "n_cols"],
            ["BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=num_warps"],
        ),
        f"return {result}",
    ]
    doc = f"Sort the integers, then launch ``{name}_kernel`` with a program for each result."
    inputs = tuple(operand.value for operand in region.inputs)
    launcher = function_source(name, [names[value] for value in inputs], doc, launch, 1)
    return KernelText(name, kernel, launcher, inputs, (found.node.name,), formula)


def _kernel_lines(found: Scatter, base: str, source: str, result: str) -> list[str]:
    scaled = "total" if found.scale == 1 else f"total * {float(found.scale)!r}"
    loop = [
        "members = start + tl.arange(0, BLOCK_M)[:, None]",
        "taken = members < end",
        "row = tl.load(order_ptr + members, mask=taken, other=0)",
        f"values = tl.load({source}_ptr + row * n_cols + cols, mask=taken & col_mask, other=0.0)",
        "total += tl.sum(values.to(tl.float32), axis=0)[None, :]",
    ]
    return [
        "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
        "segment = (tl.program_id(0) // tiles_n).to(tl.int64)",
        "cols = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]",
        "col_mask = cols < n_cols",
        "first = tl.load(starts_ptr + segment)",
        "end = tl.load(starts_ptr + segment + 1)",
        "total = tl.zeros((1, BLOCK_N), dtype=tl.float32)",
        "for start in range(first, end, BLOCK_M):",
        *(f"    {line}" for line in loop),
        f"before = tl.load({base}_ptr + segment * n_cols + cols, mask=col_mask, other=0.0).to(tl.float32)",
        f"tl.store({result}_ptr + segment * n_cols + cols, before + {scaled}, mask=col_mask)",
    ]
