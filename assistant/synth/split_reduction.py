"""Writes kernels for row regions whose rows are too long, or too few, for one program each: rows in pieces.

Reductions come in levels: a level's inputs need no results but those of the levels before. Each level is one kernel
over (rows, pieces of a row) that leaves its parts in a small buffer; the next kernel begins by combining the parts of
its rows, which come from the L2 cache, and goes over the row again. The last one writes the outputs. So a norm over a
million elements reads its input twice and keeps all multiprocessors busy even for one row. Every second kernel walks
backwards: it meets what its predecessor left in L2.

How tiles follow memory is :mod:`drk.assistant.synth.split_walk`'s.
Left out: atomics (sums would depend on the order of programs) and one-pass softmax statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from drk.assistant.synth.body import Body, KernelText
from drk.assistant.synth.domain import Operand, group_size_text
from drk.assistant.synth.launcher import (
    Arguments,
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
from drk.assistant.synth.online import Online
from drk.assistant.synth.pointwise import Block
from drk.assistant.synth.reducers import begin_lines, combine_lines, end_lines, parts_of, twin_of, update_lines
from drk.assistant.synth.regions import REDUCTIONS, Region
from drk.assistant.synth.split_walk import Walk, walk_of
from drk.gym.graph import Node, TensorMeta


@dataclass(frozen=True)
class Pass:
    """One kernel: the reductions it begins with, per-row nodes, nodes of the tile, and what it makes."""

    region: Region
    combined: tuple[Node, ...]
    per_row: tuple[Node, ...]
    tiled: tuple[Node, ...]
    made: tuple[Node, ...]
    """Reductions of this level; none in the last pass."""

    @property
    def walks(self) -> bool:
        """Whether it goes over the rows; else it only combines parts."""
        edge = len(self.region.shape) - self.region.columns
        return bool(self.made) or any(any(operand.varies[edge:]) for operand in self.region.outputs)

    def along(self, walk: Walk) -> Walk:
        """The part of the region's walk that it needs: rows of parts lie one behind the other."""
        return walk if self.walks else replace(walk, rows=())


def write_split(
    region: Region,
    name: str,
    names: Mapping[str, str],
    metas: Mapping[str, TensorMeta],
    owned: frozenset[str],
    block: Block,
) -> KernelText:
    """Return kernels and launcher of a row region in pieces; ``owned`` values are known to be contiguous."""
    whole = Body(region, names, metas, two_dimensional=True)
    outputs = tuple(operand.value for operand in region.outputs)
    inputs = tuple(operand.value for operand in region.inputs)
    formula = whole.formula(outputs)
    passes, walk = passes_of(region), walk_of(whole)
    kernels, launches = [], []
    for number, item in enumerate(passes, start=1):
        last = number == len(passes)
        kernel_name = f"{name}_kernel" if last else f"{name}_pass{number}_kernel"
        body = Body(item.region, names, metas, two_dimensional=True)
        own = item.along(walk)
        arguments = _arguments(body, item, region, own)
        title = ["Combine the parts, then the outputs:", *formula] if last else [_title(body, item)]
        title += body.remarks()
        kernels.append(
            kernel_source(
                kernel_name, _parameters(arguments), title, _kernel_lines(body, item, own, backwards=number % 2 == 0)
            )
        )
        launches += _call(kernel_name, arguments, item)
    doc = f"Launch the {len(passes)} kernels of ``{name}``: reductions level by level, rows in pieces."
    lines = [*_size_lines(whole, owned, walk, block), *_buffer_lines(whole, passes), *launches, result_line(whole)]
    launcher = function_source(name, [names[value] for value in inputs], doc, lines, len(outputs))
    return KernelText(name, "\n\n".join(kernels), launcher, inputs, outputs, "; ".join(formula))


def _title(body: Body, item: Pass) -> str:
    return f"Parts of {', '.join(body.names[node.name] for node in item.made)}, one for each piece of a row."


# --- Passes --------------------------------------------------------------------------------------------------


def passes_of(region: Region, groups: Sequence[Online] = ()) -> list[Pass]:
    """The passes over a region's rows, in order: one for each level of reductions, then one for the outputs.

    The sums of ``groups`` are on the level of their maximum and made from what that is made of.
    """
    by_name = {node.name: node for node in region.nodes}
    tops = {node.name: group.top for group in groups for node in group.sums}
    levels: dict[str, int] = {}
    for node in region.nodes:
        below = max((levels[name] for name in node.inputs() if name in levels), default=0)
        levels[node.name] = levels[tops[node.name].name] if node.name in tops else below + (node.bare_op in REDUCTIONS)
    reductions = [node for node in region.nodes if node.bare_op in REDUCTIONS]
    edge = len(region.shape) - region.columns
    # What no reduction leads to is written by the first pass, which has it anyway.
    early = [item for item in region.outputs if levels[item.value] == 0 and any(item.varies[edge:])]
    late = [item for item in region.outputs if item not in early]
    found: list[Pass] = []
    for level in sorted({levels[node.name] for node in reductions}):
        made = tuple(node for node in reductions if levels[node.name] == level)
        stored = early if not found else []
        reduced = [tops.get(node.name, node).args[0].name for node in made]
        sources = [*reduced, *(item.value for item in stored)]
        found.append(_pass(region, by_name, sources, made, stored))
    return [*found, _pass(region, by_name, [item.value for item in late], (), late)]


def _pass(
    region: Region,
    by_name: Mapping[str, Node],
    wanted: Sequence[str],
    made: tuple[Node, ...],
    outputs: Sequence[Operand],
) -> Pass:
    """The pass that computes ``wanted`` values of the region, and the reductions ``made`` of them."""
    pending, needed = list(wanted), set(wanted)
    while pending:
        node = by_name.get(pending.pop())
        twin = None if node is None else twin_of(node, region.nodes)
        needed |= {twin.name} if twin is not None else set()
        if node is None or node.bare_op in REDUCTIONS:
            continue
        fresh = set(node.inputs()) - needed
        needed |= fresh
        pending += fresh
    combined = tuple(n for n in region.nodes if n.name in needed and n.bare_op in REDUCTIONS)
    pointwise = [n for n in region.nodes if n.name in needed and n.bare_op not in REDUCTIONS]
    inputs = tuple(item for item in region.inputs if item.value in needed)
    edge = len(region.shape) - region.columns
    placed = (operand for operand, _ in region.positions.values())
    spread = {item.value for item in (*inputs, *placed) if any(item.varies[edge:])}
    for node in pointwise:
        if any(name in spread for name in node.inputs()):
            spread.add(node.name)
    names = {node.name for node in (*combined, *pointwise, *made)}
    nodes = tuple(node for node in region.nodes if node.name in names)
    part = replace(region, nodes=nodes, inputs=inputs, outputs=tuple(outputs))
    per_row = tuple(node for node in pointwise if node.name not in spread)
    return Pass(part, combined, per_row, tuple(node for node in pointwise if node.name in spread), made)


# --- Kernel text ---------------------------------------------------------------------------------------------


def _kernel_lines(body: Body, item: Pass, walk: Walk, *, backwards: bool) -> list[str]:
    edge = len(item.region.shape) - item.region.columns
    spread = [operand for operand in item.region.inputs if any(operand.varies[edge:])]
    flat = [operand for operand in item.region.inputs if operand not in spread]
    stored_late = [o for o in item.region.outputs if any(o.varies[edge:])]
    stored_early = [o for o in item.region.outputs if o not in stored_late]
    keep = frozenset(node.name for node in item.per_row)
    walks = item.walks
    program = "tl.num_programs(0) - 1 - tl.program_id(0)" if backwards else "tl.program_id(0)"
    lines = [
        f"pid = {program}",
        *(["piece = pid % n_pieces"] if walks else []),
        *walk.row_lines(body, "(pid // n_pieces)" if walks else "pid"),
        *_combine_lines(body, item, walk),
        *body.loads(flat),
        *body.statements(item.per_row, keep),
        *(body.store(operand) for operand in stored_early),
    ]
    if not walks:
        return lines
    loop = [
        *body.loads(spread),
        *body.statements(item.tiled),
        *(line for node in item.made for line in update_lines(body, node, walk.first)),
        *(body.store(operand) for operand in stored_late),
    ]
    counted = any(node.bare_op == "var" for node in item.made)
    slot = "rows[:, None] * n_pieces + piece"
    return [
        *lines,
        *(line for node in item.made for line in begin_lines(body, node)),
        *walk.loop_lines(body, loop),
        *(walk.count_lines("seen", "piece") if counted else []),
        *(line for node in item.made for line in end_lines(body, node, slot)),
    ]


def _combine_lines(body: Body, item: Pass, walk: Walk) -> list[str]:
    if not item.combined:
        return []
    lines = [
        "pieces = tl.arange(0, PIECES)[None, :]",
        "slots = rows[:, None] * n_pieces + pieces",
        "slot_mask = row_mask & (pieces < n_pieces)",
    ]
    if any(node.bare_op == "var" for node in item.combined):
        lines += walk.count_lines("counts", "pieces")
    ordered = sorted(item.combined, key=lambda node: twin_of(node, body.region.nodes) is not None)
    return [*lines, *(line for node in ordered for line in combine_lines(body, node))]


def _arguments(body: Body, item: Pass, region: Region, walk: Walk) -> Arguments:
    """Pointers, part buffers, sizes: parameter and value texts."""
    pointers = pointer_arguments(body)
    shapes = shape_arguments(body, [*region.inputs])
    buffers = [
        f"{body.names[n.name]}_{suffix}"
        for n in (*item.combined, *item.made)
        for suffix, _ in parts_of(n, body.region.nodes)
    ]
    parameters = (*pointers.parameters, *(f"{buffer}_ptr" for buffer in buffers), *walk.sizes, *shapes.parameters)
    return Arguments(parameters, (*pointers.values, *buffers, *walk.sizes, *shapes.values))


def _parameters(arguments: Arguments) -> list[str]:
    constants = ("INDEX", "PIECES", "BLOCK_M", "BLOCK_N")
    return [*arguments.parameters, *(f"{item}: tl.constexpr" for item in constants)]


# --- Launcher ------------------------------------------------------------------------------------------------


def _size_lines(body: Body, owned: frozenset[str], walk: Walk, block: Block) -> list[str]:
    operands, names = list(body.region.inputs), dict(body.names)
    n_rows, n_cols = (
        " * ".join(text for group in groups if (text := group_size_text(group, operands, names)) != "1") or "1"
        for groups in (body.domain.rows, body.domain.cols)
    )
    # A thread holds 16 elements of one input or 8 of each of several: registers for all programs at once.
    edge = len(body.region.shape) - body.region.columns
    several = sum(any(item.varies[edge:]) for item in operands) > 1
    return [
        *layout_lines(body, owned),
        *allocation_lines(body),
        f"n_rows = {n_rows}",
        f"n_cols = {n_cols}",
        index_type_line(body),
        *walk.launch_lines(body, max(2048 if several and not walk.rows else 4096, block.elements)),
    ]


def _buffer_lines(body: Body, passes: Sequence[Pass]) -> list[str]:
    operands = list(body.region.inputs)
    device = f"{body.names[operands[0].value]}.device"
    return [
        f"{body.names[node.name]}_{suffix} = torch.empty((n_rows, n_pieces), device={device}, dtype=torch.{dtype})"
        for item in passes
        for node in item.made
        for suffix, dtype in parts_of(node, item.region.nodes)
    ]


def _call(kernel: str, arguments: Arguments, item: Pass) -> list[str]:
    options = ["INDEX=index_type", "PIECES=triton.next_power_of_2(n_pieces)"]
    if item.walks:
        options += ["BLOCK_M=block_m", "BLOCK_N=block_n", "num_warps=8"]
        return call_lines(kernel, "(tiles_m * n_pieces,)", arguments.values, options)
    options += ["BLOCK_M=combine_m", "BLOCK_N=block_n", "num_warps=4"]
    return [
        "combine_m = max(1, min(triton.next_power_of_2(n_rows), 1024 // triton.next_power_of_2(n_pieces)))",
        *call_lines(kernel, "(triton.cdiv(n_rows, combine_m),)", arguments.values, options),
    ]
