"""Writes kernels that order rows: each program holds a block of rows in registers, as integers that sort like them.

An element becomes an integer of 64 bits: its own bits, turned so that integers are in the same order (NaN above all
else, as in PyTorch), and below them its column, so that of equal elements the first one comes first. A few elements are
picked one after the other, each the maximum of what is left; whole rows are sorted by Triton's bitonic sort. Value and
place are both read off the integer.

Left out: rows that several programs would share, and operators before and behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.body import KernelText
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, row_major_lines
from drk.assistant.synth.lone_region import lone_region
from drk.assistant.synth.orders import MOST_PICKED, Order, order_of
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.regions import Facts, Region
from drk.gym.graph import Node, TensorMeta

LEAST = "-9223372036854775808"


def build_order_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of the results of one ordering, or None."""
    found = [order_of(node, facts.metas) for node in nodes]
    orders = [item for item in found if item is not None]
    kinds = {(item.source, item.count, item.largest) for item in orders}
    if len(orders) != len(nodes) or len(kinds) != 1 or len({item.places for item in orders}) != len(nodes):
        return None
    source = orders[0].source
    return lone_region("order", nodes, [source], facts, facts.metas[source].shape)


def write_order(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher; ``owned`` values are known to be contiguous."""
    orders = [order for node in region.nodes if (order := order_of(node, metas)) is not None]
    first, source = orders[0], names[orders[0].source]
    results = {order.places: f"out_{names[order.node.name]}" for order in orders}
    picks = first.count is not None and first.count <= MOST_PICKED
    side = "largest" if first.largest else "smallest"
    what = f"the {first.count} {side}" if first.count is not None else f"all, the {side} first"
    formula = [f"{names[order.node.name]} = {'places' if order.places else 'values'} of {what}" for order in orders]
    parameters = [f"{source}_ptr", *(f"{item}_ptr" for item in results.values()), "n_rows", "n_cols", "wanted"]
    parameters += ["BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr", *(["BLOCK_K: tl.constexpr"] if picks else [])]
    lines = _kernel_lines(first, source, results, picks=picks)
    title = f"Whole rows of {source} in registers, in order:"
    kernel = kernel_source(f"{name}_kernel", parameters, [title, *formula], lines)
    launch = [
        *row_major_lines(region.inputs[0], names, owned),
        f"n_cols = {source}.shape[-1]",
        f"n_rows = {source}.numel() // max(1, n_cols)",
        f"wanted = {first.count if first.count is not None else 'n_cols'}",
        *(_allocation(order, source, results[order.places]) for order in orders),
        "block_n = triton.next_power_of_2(n_cols)",
        f"block_m = max(1, {block.elements} // block_n)",
        f"num_warps = max(1, min(16, block_m * block_n // {block.per_warp}))",
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m),)",
            [source, *results.values(), "n_rows", "n_cols", "wanted"],
            [
                "BLOCK_M=block_m",
                "BLOCK_N=block_n",
                *(["BLOCK_K=triton.next_power_of_2(wanted)"] if picks else []),
                "num_warps=num_warps",
            ],
        ),
        f"return {', '.join(results.values())}",
    ]
    doc = f"Launch ``{name}_kernel`` with one program for each block of rows."
    launcher = function_source(name, [source], doc, launch, len(orders))
    outputs = tuple(order.node.name for order in orders)
    return KernelText(name, kernel, launcher, (first.source,), outputs, "; ".join(formula))


def _allocation(order: Order, source: str, result: str) -> str:
    dtype = ", dtype=torch.int64" if order.places else ""
    return f"{result} = {source}.new_empty((*{source}.shape[:-1], wanted){dtype})"


def _kernel_lines(order: Order, source: str, results: Mapping[bool, str], *, picks: bool) -> list[str]:
    lines = [
        "rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)",
        "cols = tl.arange(0, BLOCK_N)",
        "row_mask = rows[:, None] < n_rows",
        "mask = row_mask & (cols[None, :] < n_cols)",
        f"x = tl.load({source}_ptr + rows[:, None] * n_cols + cols[None, :], mask=mask, other=0.0).to(tl.float32)",
        f"keys = {'' if order.largest else '~'}ordered_bits(x).to(tl.int64)",
        "keys = (keys << 32) | (2147483647 - cols[None, :]).to(tl.int64)  # equal ones: the first column wins",
        f"keys = tl.where(cols[None, :] < n_cols, keys, {LEAST})",
    ]
    if picks:
        lines += [
            "slots = tl.arange(0, BLOCK_K)",
            "taken = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int64)",
            "for slot in range(wanted):",
            "    best = tl.max(keys, axis=1)[:, None]",
            "    taken = tl.where(slots[None, :] == slot, best, taken)",
            f"    keys = tl.where(keys == best, {LEAST}, keys)",
        ]
    else:
        lines += ["slots = cols", "taken = tl.sort(keys, descending=True)"]
    lines += ["slot_mask = row_mask & (slots[None, :] < wanted)", "place = rows[:, None] * wanted + slots[None, :]"]
    if False in results:
        bits = f"{'' if order.largest else '~'}(taken >> 32)"
        lines.append(f"values = from_ordered_bits(({bits}).to(tl.int32))")
        lines.append(f"tl.store({results[False]}_ptr + place, values, mask=slot_mask)")
    if True in results:
        lines.append("columns = 2147483647 - (taken & 2147483647)")
        lines.append(f"tl.store({results[True]}_ptr + place, columns, mask=slot_mask)")
    return lines
