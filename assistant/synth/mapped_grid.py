"""How the programs of a mapped kernel divide its output, and where in memory a program's elements lie.

Atoms (parts of the output's dimensions) that are neighbours for all tensors are folded into one *part*. Parts are
columns, rows or, where rows belong to an input's layout, outer ones that only number programs.

Left out: tiles of more than two sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drk.assistant.synth.index_maps import Atoms
from drk.assistant.synth.index_text import product_text, sum_text, times
from drk.assistant.synth.launcher import call_lines
from drk.assistant.synth.mapped_sides import Part, Sides, added, alone
from drk.assistant.synth.mapped_terms import Access, Line, SizeOf, line_of
from drk.assistant.synth.pointwise import Block

WIDE = 64
"""Columns are so many elements at least, where there are as many."""
DEEP = 32
"""So are rows that follow an input's memory."""
SECTOR = 8
"""Elements that are moved together in any case."""


@dataclass
class Grid:
    """What addresses need: the tile's sides, and the sums of indices that accesses are."""

    sides: Sides
    turned: bool
    accesses: Sequence[Access]
    texts: Mapping[str, Sequence[Line]]
    """By an access' label: the line of each of its axes."""
    guards: Sequence[int]
    addresses: dict[str, str] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in (*self.sides.outer[1:], *self.sides.rows[1:], *self.sides.cols[1:]):
            if not part.literal:
                self.sides.arguments[f"{part.index}_size"] = part.text
        for guard in self.guards:
            self.sides.guard(guard)
        for item in self.accesses:
            self.addresses[item.label] = self._address(item)
            self.masks[item.label] = self._mask(item)

    # -- kernel text

    def parameters(self) -> list[str]:
        """Names of the kernel's numbers."""
        return ["n_rows", "n_cols", *self.sides.arguments]

    def index_lines(self) -> list[str]:
        """Statements that give each program its rows and columns, and all that follows from them."""
        return self.sides.index_lines("\n".join(self.addresses.values()))

    def guard(self, atom: int) -> str:
        """The guard of a piece, as it stands among tiles."""
        return self.sides.guards[atom].spread

    def _mask(self, item: Access) -> str:
        """Mask of a load: where the tile is inside, and the guards of pieces along what the address walks."""
        moves = _moves(item, self.texts[item.label])
        bent = {self.sides.index_of(atom).side for atom in moves if self.sides.part_of(atom) is None}
        walked = {"rows", "cols"} if "both" in bent else bent & {"rows", "cols"}
        for side, parts in (("rows", self.sides.rows), ("cols", self.sides.cols)):
            walked |= {side} if any(moves.get(atom) for part in parts for atom in part.atoms) else set()
        name = {2: "mask", 1: "row_mask" if "rows" in walked else "col_mask", 0: ""}[len(walked)]
        guards = [self.sides.guards[atom] for atom in sorted(item.guards)]
        sides = {"both": {"rows", "cols"}, "": set[str]()}
        kept = [index for index in guards if sides.get(index.side, {index.side}) <= walked]
        return " & ".join([*([name] if name else []), *(index.spread for index in kept)])

    def _address(self, item: Access) -> str:
        terms = [f"{item.tensor}_ptr"]
        start = self._start(item)
        terms += [start] if start else []
        terms += self._terms(item, self.sides.outer, "", "")
        terms += self._terms(item, self.sides.rows, "rows", "[:, None]")
        terms += self._terms(item, self.sides.cols, "cols", "[None, :]")
        terms += self._bent(item)
        return added(terms)

    def _terms(self, item: Access, parts: list[Part], flat: str, suffix: str) -> list[str]:
        moves = _moves(item, self.texts[item.label])
        steps = [moves.get(part.atoms[-1], 0) for part in parts]
        if not any(steps):
            return []
        chained = all(a == b * part.size for a, b, part in zip(steps, steps[1:], parts[1:], strict=False))
        if flat and (len(parts) == 1 or (chained and item.follows)):
            return [self._times(flat + suffix, item, parts[-1].atoms[-1], parts[-1].index)]
        return [
            self._times(part.index + suffix, item, part.atoms[-1], part.index)
            for part, step in zip(parts, steps, strict=True)
            if step
        ]

    def _bent(self, item: Access) -> list[str]:
        """Terms of indices that are no part of the output."""
        moves = _moves(item, self.texts[item.label])
        bent = [atom for atom, step in moves.items() if step and self.sides.part_of(atom) is None]
        return [
            self._times(index.spread, item, atom, index.name) for atom in bent if (index := self.sides.index_of(atom))
        ]

    def _times(self, index: str, item: Access, atom: int, label: str) -> str:
        """An index times the distance in memory of one step of ``atom``."""
        steps = [
            (1 if term.weight > 0 else -1, times(term.text, item.stride(axis)))
            for axis, line in enumerate(self.texts[item.label])
            for term in line.terms
            if term.atom == atom
        ]
        text = sum_text(steps)
        return index if text == "1" else f"{index} * {self.sides.argument(f'{item.label}_{label}_step', text)}"

    def _start(self, item: Access) -> str:
        """Text of the distance of the access' first element, or nothing."""
        found: list[tuple[int, str]] = []
        for axis, (coordinate, line) in enumerate(zip(item.coords, self.texts[item.label], strict=True)):
            pieces = list(line.start)
            if coordinate.start and coordinate.parts and not item.operand.fixed:
                place = coordinate.start * coordinate.parts // item.operand.meta.shape[axis]
                pieces.append((1, times(f"({item.tensor}.shape[{axis}] // {coordinate.parts})", str(place))))
            else:
                pieces.append((1, str(coordinate.start)))
            total = sum_text(pieces)
            found += [(1, times(total, item.stride(axis)))] if total != "0" else []
        text = sum_text(found)
        return self.sides.argument(f"{item.label}_start", text) if text != "0" else ""

    # -- launcher text

    def launch_lines(self, kernel: str, pointers: Sequence[str], block: Block) -> list[str]:
        """Statements that set sizes and launch."""
        sides = (self.sides.outer, self.sides.rows, self.sides.cols)
        counts = [product_text([part.text for part in parts]) for parts in sides]
        elements = max(block.elements, 2048) if self.turned else block.elements
        full = [item for item in self.accesses if item.operand.meta.shape]
        largest = max(full, key=lambda item: item.operand.meta.numel)
        programs = "triton.cdiv(n_rows, block_m) * triton.cdiv(n_cols, block_n)"
        programs += f" * {counts[0]}" if counts[0] != "1" else ""
        return [
            f"n_rows = {counts[1]}",
            f"n_cols = {counts[2]}",
            f"index_type = tl.int32 if {largest.tensor}.numel() < 2**31 else tl.int64",
            *self._sides(elements),
            *call_lines(
                kernel,
                f"({programs},)",
                [*pointers, "n_rows", "n_cols", *self.sides.arguments.values()],
                ["INDEX=index_type", "BLOCK_M=block_m", "BLOCK_N=block_n",
                 f"num_warps={max(1, elements // block.per_warp)}"],
            ),
        ]  # fmt: skip

    def _sides(self, elements: int) -> list[str]:
        if not self.turned:
            return [
                f"block_n = min({elements}, triton.next_power_of_2(n_cols))",
                f"block_m = min({elements} // block_n, triton.next_power_of_2(n_rows))",
            ]
        return [
            "block_n = min(64, triton.next_power_of_2(n_cols))",
            f"block_m = min({elements} // block_n, triton.next_power_of_2(n_rows))",
            f"block_n = min({elements} // block_m, triton.next_power_of_2(n_cols))",
        ]


# --- Which parts, and where ----------------------------------------------------------------------------------


def grid_of(
    loads: Sequence[Access],
    stores: Sequence[Access],
    atoms: Atoms,
    size_of: SizeOf,
    taken: set[str],
    guards: Sequence[int] = (),
) -> Grid:
    """Choose the sides of the tiles for what is read and written; ``taken`` names are not given to indices."""
    accesses = [*loads, *stores]
    texts = {item.label: [line_of(coordinate, atoms, size_of) for coordinate in item.coords] for item in accesses}
    moves = {item.label: _moves(item, texts[item.label]) for item in accesses}
    used = {atom for found in moves.values() for atom in found}
    groups = _folded(stores[0], accesses, texts, atoms, alone(atoms, guards, used, size_of))
    parts = [_part(group, atoms, size_of, taken) for group in groups]
    reach = {item.label: _reach(moves[item.label], atoms, size_of) for item in accesses}
    cols = [parts.pop()]
    while parts and math.prod(part.size for part in cols) < WIDE:
        cols.insert(0, parts.pop())
    total = math.prod(part.size for part in (*parts, *cols))
    found = (reach[item.label] for item in loads if _turned(reach[item.label], [*parts, *cols], cols, total))
    turned = next(found, None)
    if turned is None:
        return Grid(Sides([], parts, cols, atoms, size_of, taken), False, accesses, texts, guards)
    moving = [part for part in parts if turned.get(part.atoms[-1])]
    moving.sort(key=lambda part: abs(turned[part.atoms[-1]]))
    rows: list[Part] = []
    while moving and math.prod(part.size for part in rows) < DEEP:
        rows.insert(0, moving.pop(0))
    outer = [part for part in parts if part not in rows]
    return Grid(Sides(outer, rows, cols, atoms, size_of, taken), True, accesses, texts, guards)


def _moves(item: Access, lines: Sequence[Line]) -> dict[int, int]:
    """How far an atom's step moves in memory, in elements as captured."""
    found: dict[int, int] = {}
    for axis, line in enumerate(lines):
        for term in line.terms:
            found[term.atom] = found.get(term.atom, 0) + term.weight * item.operand.meta.strides[axis]
    return found


def _reach(moves: Mapping[int, int], atoms: Atoms, size_of: SizeOf) -> dict[int, int]:
    """The same with about how far parts of the output move what follows from them."""
    found: dict[int, int] = {}
    for atom, step in moves.items():
        origin = atoms.origin(atom)
        if origin is None:
            found[atom] = found.get(atom, 0) + step
            continue
        for term in line_of(atoms.bends[origin].whole, atoms, size_of).terms:
            for base, weight in _reach({term.atom: term.weight}, atoms, size_of).items():
                found.setdefault(base, weight * step)
    return found


def _turned(moves: Mapping[int, int], parts: list[Part], cols: list[Part], total: int) -> bool:
    """Whether a large input's neighbours in memory are not the tile's columns."""
    moving = [part for part in parts if moves.get(part.atoms[-1])]
    if math.prod(part.size for part in moving) * 4 < total:
        return False
    run = 1
    for part in reversed(cols):
        step = abs(moves.get(part.atoms[-1], 0))
        if step == run:
            run *= part.size
        elif step:
            break
    others = [part for part in moving if part not in cols and abs(moves[part.atoms[-1]]) < SECTOR * max(run, 1)]
    return run < SECTOR and bool(others)


def _folded(
    store: Access,
    accesses: Sequence[Access],
    texts: Mapping[str, Sequence[Line]],
    atoms: Atoms,
    apart: tuple[set[int], set[int]],
) -> list[list[int]]:
    """Atoms in the output's order in memory, those that are neighbours for all tensors in one group.

    ``apart`` are those that must be alone, and those that nothing may be folded in front of.
    """
    single, first = apart
    order = store.operand.order
    assert order is not None, "outputs are stored in an order of their own"
    leaves = [digit.atom for axis in order for digit in store.coords[axis].digits]
    groups: list[list[int]] = []
    for atom in leaves:
        fits = groups and atom not in single | first and groups[-1][-1] not in single
        if fits and all(_neighbours(item, texts[item.label], groups[-1][-1], atom, atoms) for item in accesses):
            groups[-1].append(atom)
        else:
            groups.append([atom])
    return groups


def _neighbours(item: Access, lines: Sequence[Line], outer: int, inner: int, atoms: Atoms) -> bool:
    """Whether a step of ``outer`` is as far in memory as all of ``inner``, at any sizes."""
    moves = _moves(item, lines)
    if (moves.get(outer, 0) != moves.get(inner, 0) * atoms.sizes[inner]) or (moves.get(outer, 0) < 0):
        return False
    axes = {axis for axis, line in enumerate(lines) for term in line.terms if term.atom in (outer, inner)}
    return item.follows or len(axes) < 2


def _part(group: list[int], atoms: Atoms, size_of: SizeOf, taken: set[str]) -> Part:
    name = "_".join(atoms.names[atom] for atom in group) + "_at"
    while name in taken:
        name += "_"
    text = product_text([size_of(atom) for atom in group])
    return Part(tuple(group), name, math.prod(atoms.sizes[atom] for atom in group), text)
