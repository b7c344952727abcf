"""How the programs of a mapped kernel divide its output, and where in memory a program's elements lie.

Atoms (parts of the output's dimensions) that are neighbours for all tensors are folded into one *part*. Parts are
columns, rows or, where rows belong to an input's layout, outer ones that only number programs.

Left out: tiles of more than two sides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drk.assistant.synth.domain import Operand
from drk.assistant.synth.index_maps import Atoms, Coordinates, Digit
from drk.assistant.synth.launcher import call_lines
from drk.assistant.synth.mapped_trace import Place
from drk.assistant.synth.pointwise import Block

WIDE = 64
"""Columns are so many elements at least, where there are as many."""
DEEP = 32
"""So are rows that follow an input's memory."""
SECTOR = 8
"""Elements that are moved together in any case."""


@dataclass(frozen=True)
class Access:
    """A read or write: ``tensor`` and ``label`` are names in the launcher and the kernel, ``coords`` the place."""

    place: Place
    tensor: str
    label: str
    operand: Operand
    coords: Coordinates

    def digits(self) -> list[tuple[int, Digit]]:
        """Pairs of axis and digit."""
        return [(axis, digit) for axis, coordinate in enumerate(self.coords) for digit in coordinate.digits]

    @property
    def follows(self) -> bool:
        """Whether what are neighbours across axes as captured are so at all sizes: not where every other is skipped."""
        lowest = [min(digit.weight for digit in item.digits) for item in self.coords if item.digits]
        return self.operand.order is not None and all(weight == 1 for weight in lowest)

    def moves(self) -> dict[int, int]:
        """How far an atom's step moves in memory, in elements as captured."""
        found: dict[int, int] = {}
        for axis, digit in self.digits():
            sign = -1 if digit.turned else 1
            found[digit.atom] = found.get(digit.atom, 0) + sign * digit.weight * self.operand.meta.strides[axis]
        return found


@dataclass(frozen=True)
class Part:
    """Folded atoms, with the name of their index, their size as captured and as text."""

    atoms: tuple[int, ...]
    index: str
    size: int
    text: str

    @property
    def literal(self) -> bool:
        """Whether the size is a number."""
        return self.text.isdigit()


@dataclass
class Grid:
    """Parts by the side of the tile that they belong to, and the arguments that addresses need."""

    outer: list[Part]
    rows: list[Part]
    cols: list[Part]
    turned: bool
    accesses: Sequence[Access]
    atoms: Atoms
    size_of: Callable[[int], str]
    arguments: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in (*self.outer[1:], *self.rows[1:], *self.cols[1:]):
            if not part.literal:
                self.arguments[f"{part.index}_size"] = part.text
        for item in self.accesses:
            self.addresses[item.label] = self._address(item)

    # -- kernel text

    def parameters(self) -> list[str]:
        """Names of the kernel's numbers."""
        return ["n_rows", "n_cols", *self.arguments]

    def index_lines(self) -> list[str]:
        """Statements that give each program its rows and columns, and each part its index."""
        lines = [
            "tiles_n = tl.cdiv(n_cols, BLOCK_N)",
            "cols = (tl.program_id(0) % tiles_n).to(INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)",
        ]
        if self.outer:
            lines += [
                "tiles_m = tl.cdiv(n_rows, BLOCK_M)",
                "tile = tl.program_id(0) // tiles_n",
                "rows = (tile % tiles_m).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)",
                *_taken_apart(self.outer, "(tile // tiles_m).to(INDEX)"),
            ]
        else:
            lines.append("rows = (tl.program_id(0) // tiles_n).to(INDEX) * BLOCK_M + tl.arange(0, BLOCK_M)")
        lines += ["row_mask = rows[:, None] < n_rows", "col_mask = cols[None, :] < n_cols"]
        lines.append("mask = row_mask & col_mask")
        for parts, flat in ((self.rows, "rows"), (self.cols, "cols")):
            lines += _taken_apart(parts, flat) if len(parts) > 1 else []
        return [line for line in lines if self._read(line.split(" = ")[0])]

    def _read(self, name: str) -> bool:
        """Whether an index statement's name is of use: parts whose flat index serves all tensors are not."""
        parts = {part.index for part in (*self.outer, *self.rows, *self.cols)}
        pattern = re.compile(rf"\b{name}\b")
        return name not in parts or any(pattern.search(text) for text in self.addresses.values())

    def address(self, item: Access) -> str:
        """Pointer expression of an access."""
        return self.addresses[item.label]

    def mask(self, item: Access) -> str:
        """Name of the mask of a load."""
        moves = item.moves()
        by_row, by_col = (
            any(moves.get(atom) for part in parts for atom in part.atoms) for parts in (self.rows, self.cols)
        )
        return {(True, True): "mask", (True, False): "row_mask", (False, True): "col_mask"}.get((by_row, by_col), "")

    def _address(self, item: Access) -> str:
        terms = [f"{item.tensor}_ptr"]
        start = self._start(item)
        terms += [start] if start else []
        terms += self._terms(item, self.outer, "", "")
        terms += self._terms(item, self.rows, "rows", "[:, None]")
        terms += self._terms(item, self.cols, "cols", "[None, :]")
        return " + ".join(terms)

    def _terms(self, item: Access, parts: list[Part], flat: str, suffix: str) -> list[str]:
        moves = item.moves()
        steps = [moves.get(part.atoms[-1], 0) for part in parts]
        if not any(steps):
            return []
        chained = all(a == b * part.size for a, b, part in zip(steps, steps[1:], parts[1:], strict=False))
        if flat and (len(parts) == 1 or (chained and item.follows)):
            return [self._times(flat + suffix, item, parts[-1])]
        return [self._times(part.index + suffix, item, part) for part, step in zip(parts, steps, strict=True) if step]

    def _times(self, index: str, item: Access, part: Part) -> str:
        """An index times the distance in memory of one step of ``part``."""
        atom = part.atoms[-1]
        texts = [self._step(item, axis, digit) for axis, digit in item.digits() if digit.atom == atom]
        text = " + ".join(texts)
        if text == "1":
            return index
        return f"{index} * {self._argument(f'{item.label}_{part.index}_step', text)}"

    def _step(self, item: Access, axis: int, digit: Digit) -> str:
        weight, stride = self._weight(item, axis, digit), _stride(item, axis)
        text = _times(weight, stride)
        return f"-{text}" if digit.turned else text

    def _weight(self, item: Access, axis: int, digit: Digit) -> str:
        """A digit's weight: the product of the sizes of those inside of it, or the number that it was."""
        inner = [other for other in item.coords[axis].digits if other.weight < digit.weight]
        if inner and math.prod(self.atoms.sizes[other.atom] for other in inner) == digit.weight:
            texts = [self.size_of(other.atom) for other in inner]
            if not all(text.isdigit() for text in texts):
                return " * ".join(text for text in texts if text != "1")
        return str(digit.weight)

    def _start(self, item: Access) -> str:
        """Text of the distance of the access' first element, or nothing."""
        texts = []
        for axis, coordinate in enumerate(item.coords):
            start = coordinate.start
            if start and coordinate.parts and not item.operand.fixed:
                place = start * coordinate.parts // item.operand.meta.shape[axis]
                pieces = [_times(f"({item.tensor}.shape[{axis}] // {coordinate.parts})", str(place))]
            else:
                pieces = [str(start)] if start else []
            for digit in coordinate.digits:
                if digit.turned:
                    pieces.append(_times(_less_one(self.size_of(digit.atom)), self._weight(item, axis, digit)))
            total = " + ".join(pieces)
            texts += [_times(f"({total})" if len(pieces) > 1 else total, _stride(item, axis))] if pieces else []
        return self._argument(f"{item.label}_start", " + ".join(texts)) if texts else ""

    def _argument(self, name: str, text: str) -> str:
        if text.isdigit() and int(text) < 2**31:
            return text
        known = next((key for key, value in self.arguments.items() if value == text), None)
        if known is not None:
            return known
        self.arguments[name] = text
        return name

    # -- launcher text

    def launch_lines(self, kernel: str, pointers: Sequence[str], block: Block) -> list[str]:
        """Statements that set sizes and launch."""
        counts = [product_text([part.text for part in parts]) for parts in (self.outer, self.rows, self.cols)]
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
                [*pointers, "n_rows", "n_cols", *self.arguments.values()],
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


def _stride(item: Access, axis: int) -> str:
    """A tensor's stride: a number where it is known for good."""
    rank, order = len(item.operand.meta.shape), item.operand.order
    if order is not None and item.operand.fixed:
        return str(item.operand.meta.strides[axis])
    if order is not None and order[-1] == axis - rank:
        return "1"
    return f"{item.tensor}.stride({axis})"


def _times(left: str, right: str) -> str:
    """The product of two factors' texts."""
    if left.isdigit() and right.isdigit():
        return str(int(left) * int(right))
    return right if left == "1" else left if right == "1" else f"{left} * {right}"


def product_text(factors: Sequence[str]) -> str:
    """The product of sizes' texts, numbers multiplied out."""
    number = math.prod(int(text) for text in factors if text.isdigit())
    texts = [text for text in factors if not text.isdigit()]
    return " * ".join([*texts, *([str(number)] if number != 1 or not texts else [])])


def _less_one(text: str) -> str:
    return str(int(text) - 1) if text.isdigit() else f"({text} - 1)"


def _taken_apart(parts: list[Part], flat: str) -> list[str]:
    """Statements that split a flat index into those of its parts."""
    lines: list[str] = []
    for place in range(len(parts) - 1, -1, -1):
        inner = [part.text if part.literal else f"{part.index}_size" for part in parts[place + 1 :]]
        text = flat
        for size in reversed(inner):
            text = f"{text} // {size}"
        own = parts[place].text if parts[place].literal else f"{parts[place].index}_size"
        lines.append(f"{parts[place].index} = {text}" + (f" % {own}" if place else ""))
    return lines


# --- Which parts, and where ----------------------------------------------------------------------------------


def grid_of(
    loads: Sequence[Access], stores: Sequence[Access], atoms: Atoms, size_of: Callable[[int], str], taken: set[str]
) -> Grid:
    """Choose the sides of the tiles for what is read and written; ``taken`` names are not given to indices."""
    accesses = [*loads, *stores]
    parts = _folded(accesses, stores[0], atoms, size_of, taken)
    cols = [parts.pop()]
    while parts and math.prod(part.size for part in cols) < WIDE:
        cols.insert(0, parts.pop())
    total = math.prod(part.size for part in (*parts, *cols))
    turned = next((item for item in loads if _turned(item, [*parts, *cols], cols, total)), None)
    if turned is None:
        return Grid([], parts, cols, False, accesses, atoms, size_of)
    moves = turned.moves()
    moving = [part for part in parts if moves.get(part.atoms[-1])]
    moving.sort(key=lambda part: abs(moves[part.atoms[-1]]))
    rows: list[Part] = []
    while moving and math.prod(part.size for part in rows) < DEEP:
        rows.insert(0, moving.pop(0))
    outer = [part for part in parts if part not in rows]
    return Grid(outer, rows, cols, True, accesses, atoms, size_of)


def _turned(item: Access, parts: list[Part], cols: list[Part], total: int) -> bool:
    """Whether a large input's neighbours in memory are not the tile's columns."""
    moves = item.moves()
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
    accesses: Sequence[Access], store: Access, atoms: Atoms, size_of: Callable[[int], str], taken: set[str]
) -> list[Part]:
    """Atoms in the output's order in memory, those that are neighbours for all tensors in one part."""
    order = store.operand.order
    assert order is not None, "outputs are stored in an order of their own"
    leaves = [digit.atom for axis in order for digit in store.coords[axis].digits]
    groups: list[list[int]] = []
    for atom in leaves:
        if groups and all(_neighbours(item, groups[-1][-1], atom, atoms) for item in accesses):
            groups[-1].append(atom)
        else:
            groups.append([atom])
    parts = []
    for group in groups:
        name = "_".join(atoms.names[atom] for atom in group) + "_at"
        while name in taken:
            name += "_"
        text = product_text([size_of(atom) for atom in group])
        parts.append(Part(tuple(group), name, math.prod(atoms.sizes[atom] for atom in group), text))
    return parts


def _neighbours(item: Access, outer: int, inner: int, atoms: Atoms) -> bool:
    """Whether a step of ``outer`` is as far in memory as all of ``inner``, at any sizes."""
    moves = item.moves()
    if (moves.get(outer, 0) != moves.get(inner, 0) * atoms.sizes[inner]) or (moves.get(outer, 0) < 0):
        return False
    axes = {axis for axis, digit in item.digits() if digit.atom in (outer, inner)}
    return item.follows or len(axes) < 2
