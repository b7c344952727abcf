"""Regions that gather: what integers pick from tables, pointwise operators and reductions around it.

A table is an operand that lies in those of the region's dimensions that are its own; the integers lie in the others, or
in all of them. Arithmetic on the index alone (a clamp, an offset) belongs to the region where nothing else reads it.

Left out: tables that the region itself makes, gathers beside matrix products, windows and scans, and
indices that are results of reductions or of other gathers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from drk.assistant.synth.domain import Operand, align
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.frames import Frame, broadcast, choose_frame
from drk.assistant.synth.gathers import (
    INDEX_DTYPES,
    Gather,
    Made,
    Position,
    gather_of,
    known_operands,
    tell_sizes,
)
from drk.assistant.synth.regions import (
    MAX_OPERANDS,
    Facts,
    Region,
    dropped_names,
    reduced_dims,
    region_inputs,
    region_outputs,
    rows_in_pieces,
)
from drk.assistant.synth.row_joins import Joined, joined_of, place_operand
from drk.gym.graph import Node, TensorMeta


def build_gather_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of ``nodes`` (in graph order), some of which gather, or None."""
    gathers = [item for node in nodes if (item := gather_of(node, facts.metas)) is not None]
    joins = [item for node in nodes if (item := joined_of(node, facts.metas)) is not None]
    reductions = [(node, dims) for node in nodes if (dims := reduced_dims(node, facts.metas)) is not None]
    special = {*(item.node.name for item in (*gathers, *joins)), *(node.name for node, _ in reductions)}
    if not all(node.name in special or is_pointwise(node, facts.metas) for node in nodes):
        return None
    chains = _index_chains(nodes, gathers, facts)
    frame = None if chains is None else _frame(nodes, chains, reductions, facts)
    inside = {node.name for node in nodes}
    tables = {name for item in (*gathers, *joins) for name in item.tables}
    dropped = dropped_names(nodes, reductions, inside, facts)
    if chains is None or frame is None or dropped is None or not tables.isdisjoint(inside):
        return None
    picking = {item.node.name for item in (*gathers, *joins)}
    reading = [node for node in nodes if node.name not in chains and node.name not in picking]
    others = region_inputs(reading, inside, frame, dropped, facts, [])
    outputs = region_outputs(nodes, inside, frame, dropped, facts)
    if others is None or outputs is None:
        return None
    picked = _Picked(frame, facts, {item.value: item for item in others})
    placed = [*(picked.gather(item, inside) for item in gathers), *(picked.join(item) for item in joins)]
    indices = [(name, chains[node.name]) for node in nodes if node.name in chains for name in node.inputs()]
    if None in placed or not all(name in inside or picked.index(name, trailing) for name, trailing in indices):
        return None
    inputs = tuple(picked.found.values())
    places = [item.place for item in placed if isinstance(item, Joined) and item.place is not None]
    if len(inputs) + len(outputs) > MAX_OPERANDS or not tell_sizes(frame.shape, (*inputs, *places)):
        return None
    made = facts.made if not any(name in facts.made for name in tables) else Made()
    read, positions, numbers = known_operands(reading, frame.shape, inputs, made)
    split = bool(reductions) and rows_in_pieces(frame.shape, frame.columns, inputs)
    if joins and (split or not reductions):
        return None
    return Region(
        "split" if split else "row" if reductions else "pointwise",
        tuple(nodes),
        frame.shape,
        frame.columns,
        read,
        outputs,
        dropped,
        scalars=_scalars(nodes, facts) | picked.numbers | numbers,
        gathers=tuple(item for item in placed if item is not None),
        positions=picked.positions | positions,
    )


@dataclass
class _Picked:
    """Tables and indices, aligned to a frame; ``found`` holds all that the region reads."""

    frame: Frame
    facts: Facts
    found: dict[str, Operand]
    positions: dict[str, tuple[Operand, Position]] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)

    def gather(self, item: Gather, inside: set[str]) -> Gather | None:
        """Take a gather's table and index in; the gather with its own place, or None where something does not fit."""
        table = self._rows(item) if item.of_rows else self._spread(item)
        whole = self.frame.place(item.node.name, item.node.meta)
        if table is None or whole is None or self.found.setdefault(item.table, table) != table:
            return None
        for pick in item.picks:
            if pick.index not in inside and not self.index(pick.index, pick.trailing):
                return None
            if not pick.wraps and self.numbers.get(pick.index, 0) < 0:
                return None
        return replace(item, whole=whole)

    def join(self, item: Joined) -> Joined | None:
        """Take a join's pieces in; the join with its own place, or None where something does not fit."""
        whole = self.frame.place(item.node.name, item.node.meta)
        for piece in item.pieces:
            operand = self._spread(Gather(item.node, piece, (), item.axes))
            if self.found.setdefault(piece, operand) != operand:
                return None
        place = place_operand(item, len(self.frame.logical) - len(item.axes)).framed(self.frame.order)
        self.positions[f"{item.node.name}'s place"] = place, Position(item.dim - len(item.axes))
        return None if whole is None else replace(item, whole=whole, place=place)

    def _rows(self, item: Gather) -> Operand | None:
        """A table whose rows lie in the region's last dimensions."""
        meta, fixed = self.facts.metas[item.table], item.table in self.facts.fixed
        inner = TensorMeta(meta.shape[1:], meta.dtype, meta.strides[1:])
        row = self.frame.place(item.table, inner, fixed=fixed)
        if row is None:
            return None
        return replace(row, meta=meta) if meta.contiguous else replace(row, meta=meta, order=None, strided=True)

    def _spread(self, item: Gather) -> Operand:
        """A table that is addressed by its strides along the dimensions that it shares with the region."""
        meta, fixed = self.facts.metas[item.table], item.table in self.facts.fixed
        rank, lead = len(meta.shape), len(self.frame.logical) - len(item.axes)
        axes = (*(None,) * lead, *(None if axis is None else axis - rank for axis in item.axes))
        varies = tuple(
            axis is not None and (meta.shape[axis] != 1 or (size == 1 and not fixed))
            for axis, size in zip(axes, self.frame.logical, strict=True)
        )
        order = tuple(range(-rank, 0)) if meta.contiguous else None
        operand = Operand(item.table, meta, varies, axes, strided=True, fixed=fixed, order=order)
        return replace(operand.framed(self.frame.order), strided=True)

    def index(self, name: str, trailing: int) -> bool:
        """Take in an integer value that lacks ``trailing`` dimensions of the region at the end; say whether it fits."""
        made = self.facts.made
        if name in self.facts.scalars:
            return True
        if name in made.numbers:
            self.numbers[name] = made.numbers[name]
            return name not in self.found
        if self.facts.metas[name].dtype not in INDEX_DTYPES:
            return False
        placed = align(
            name, self.facts.metas[name], self.frame.logical, dropped=trailing, fixed=name in self.facts.fixed
        )
        if placed is None:
            return False
        if name not in made.positions:
            operand = placed.framed(self.frame.order)
            return self.found.setdefault(name, operand) == operand
        position = made.positions[name]
        along = tuple(axis == position.axis for axis in placed.axes)
        entry = replace(placed, varies=along).framed(self.frame.order), position
        return name not in self.found and self.positions.setdefault(name, entry) == entry


def _index_chains(nodes: list[Node], gathers: list[Gather], facts: Facts) -> dict[str, int] | None:
    """Nodes that compute indices, with how many dimensions their values lack at the end.

    None where something else reads one, or where it is no arithmetic.
    """
    by_name = {node.name: node for node in nodes}
    chains: dict[str, int] = {}
    pending = [(pick.index, pick.trailing) for item in gathers for pick in item.picks]
    while pending:
        name, trailing = pending.pop()
        if name not in by_name or chains.get(name) == trailing:
            continue
        if name in chains or not is_pointwise(by_name[name], facts.metas):
            return None
        chains[name] = trailing
        pending += [(source, trailing) for source in by_name[name].inputs()]
    readers = {*chains, *(item.node.name for item in gathers)}
    numbers = facts.made.numbers.keys() | facts.scalars.keys()
    for name in chains:
        if not set(facts.users[name]) <= readers or set(by_name[name].inputs()) <= numbers:
            return None
    return chains


def _frame(
    nodes: list[Node],
    chains: dict[str, int],
    reductions: list[tuple[Node, tuple[tuple[int, ...], bool]]],
    facts: Facts,
) -> Frame | None:
    """How the region walks its dimensions: those of what its nodes make, indices aside."""
    own = [node for node in nodes if node.name not in chains]
    if reductions:
        return choose_frame(own, reductions, facts.metas, facts.users)
    shape = broadcast([node.meta.shape for node in own])
    return Frame(shape, tuple(range(len(shape))), 0) if shape else None


def _scalars(nodes: list[Node], facts: Facts) -> dict[str, float]:
    used = {name for node in nodes for name in node.inputs()}
    return {name: value for name, value in facts.scalars.items() if name in used}
