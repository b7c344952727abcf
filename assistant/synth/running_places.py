"""``cummax`` and ``cummin``: their values as a scan, and along rows where the running maximum or minimum stands.

Rows are walked a tile at a time. An element is an integer of 64 bits as in :mod:`drk.assistant.synth.ordering`, its
column below its own bits, so that of equal ones the last wins, as in PyTorch (NaN beats all else, the last NaN others);
the running maximum of these integers has the place in its low half. The values are a scan of their own
(:mod:`drk.assistant.synth.scan`), written as an operator of their own as the places are.

Left out: places along other dimensions than the last, and few long rows, which one program each would not keep the
device busy with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.body import KernelText
from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source, row_major_lines
from drk.assistant.synth.lone_region import lone_region
from drk.assistant.synth.ordering import LEAST
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.reduction_rules import Rule
from drk.assistant.synth.regions import Facts, Region
from drk.assistant.synth.scan_region import FEWEST_ROWS, LONG_COLUMNS
from drk.gym.graph import Node, Ref, TensorMeta

PLACES = {"aten.cummax.indices": "", "aten.cummin.indices": "~"}
"""Operators, and what turns the integers of elements so that the largest one is wanted."""


def places_of(node: Node, metas: Mapping[str, TensorMeta]) -> str | None:
    """The value along whose rows ``node`` has the places of running extremes, or None."""
    if node.op not in PLACES or len(node.metas) != 1 or node.metas[0] is None or not isinstance(node.args[0], Ref):
        return None
    meta = metas.get(node.args[0].name)
    if meta is None or not meta.shape or meta.dtype not in FLOATS or not meta.numel:
        return None
    columns, rank = meta.shape[-1], len(meta.shape)
    busy = meta.numel // columns >= FEWEST_ROWS or columns <= LONG_COLUMNS
    return node.args[0].name if busy and columns > 1 and int(node.args[1]) % rank == rank - 1 else None


def _running_extreme(node: Node, draft: Draft) -> Ref | None:
    """An operator for each result that is read, where kernels compute what is."""
    read = {user for user in draft.users.get(node.name, ()) if draft.users.get(user)}
    if node.op.split(".")[-1] != "default" or node.kwargs or len(node.metas) != 2 or None in node.metas:
        return None
    x, dim = node.args
    values, places = (
        replace(node, op=f"aten.{node.bare_op}.{result}", args=(x, dim), metas=(meta,))
        for result, meta in zip(("values", "indices"), node.metas, strict=True)
    )
    known = places_of(places, draft.metas) is not None
    if values.meta.dtype not in FLOATS or (len(read) > 1 and not known):
        return None
    draft.renamed[f"{node.name}[0]"] = draft.append(values, f"running_{node.bare_op[3:]}").name
    if known:
        draft.renamed[f"{node.name}[1]"] = draft.append(places, f"running_arg{node.bare_op[3:]}").name
    return None


RUNNING_RULES: Mapping[str, Rule] = {"cummax": _running_extreme, "cummin": _running_extreme}
"""Rules by operator."""


def build_places_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of one operator, or None."""
    source = places_of(nodes[0], facts.metas) if len(nodes) == 1 else None
    if source is None:
        return None
    return lone_region("places", nodes, [source], facts, nodes[0].meta.shape)


def write_places(
    region: Region,
    name: str,
    names: Mapping[str, str],
    _metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernel and launcher; ``owned`` values are known to be contiguous."""
    (node,), (operand,) = region.nodes, region.inputs
    source, result = names[operand.value], f"out_{names[node.name]}"
    parameters = [f"{source}_ptr", f"{result}_ptr", "n_rows", "n_cols"]
    parameters += ["BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr"]
    formula = f"{names[node.name]} = places of {node.bare_op}({source})"
    words = ["Rows, tile by tile with a carry:", formula]
    kernel = kernel_source(f"{name}_kernel", parameters, words, _kernel_lines(node, source, result))
    launch = [
        *row_major_lines(operand, names, owned),
        f"{result} = torch.empty_like({source}, dtype=torch.int64)",
        f"n_cols = {source}.shape[-1]",
        f"n_rows = {source}.numel() // max(1, n_cols)",
        f"block_n = min({block.elements}, triton.next_power_of_2(n_cols))",
        f"block_m = {block.elements} // block_n",
        *call_lines(
            f"{name}_kernel",
            "(triton.cdiv(n_rows, block_m),)",
            [source, result, "n_rows", "n_cols"],
            ["BLOCK_M=block_m", "BLOCK_N=block_n", f"num_warps={block.elements // block.per_warp}"],
        ),
        f"return {result}",
    ]
    doc = f"Launch ``{name}_kernel`` with one program for each block of rows."
    launcher = function_source(name, [source], doc, launch, 1)
    return KernelText(name, kernel, launcher, (operand.value,), (node.name,), formula)


def _kernel_lines(node: Node, source: str, result: str) -> list[str]:
    loop = [
        "cols = start + tl.arange(0, BLOCK_N)[None, :]",
        "mask = row_mask & (cols < n_cols)",
        f"x = tl.load({source}_ptr + rows * n_cols + cols, mask=mask, other=0.0).to(tl.float32)",
        f"bits = tl.where(x != x, 2147483647, {PLACES[node.op]}ordered_bits(x))",
        "keys = (bits.to(tl.int64) << 32) | cols.to(tl.int64)  # of equal ones the last wins",
        f"keys = tl.where(cols < n_cols, keys, {LEAST})",
        "reached = tl.maximum(tl.associative_scan(keys, 1, larger), carry)",
        f"tl.store({result}_ptr + rows * n_cols + cols, reached & 4294967295, mask=mask)",
        "carry = tl.maximum(carry, tl.max(keys, axis=1)[:, None])",
    ]
    return [
        "rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]",
        "row_mask = rows < n_rows",
        f"carry = tl.full((BLOCK_M, 1), {LEAST}, dtype=tl.int64)",
        "for start in range(0, n_cols, BLOCK_N):",
        *(f"    {line}" for line in loop),
    ]
