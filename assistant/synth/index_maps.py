"""Maps from a kernel's output coordinates to the coordinates of what it reads, through views and other index changes.

A coordinate is a mixed-radix number: a sum of *digits* (parts of the output's dimensions, the atoms) times weights and
a start. Reshapes split atoms where a boundary falls inside of one (``y`` into ``y_outer``, ``y_inner``), permutations
reorder coordinates, slices add starts, flips turn digits around, nearest upsampling and repeats drop digits. So a pixel
shuffle, a channel shuffle and a plain transposition are the same in the end: each input is linear in the atoms.

Which operator does what is told by :mod:`drk.assistant.synth.index_rules`. Weights and sizes are those of the captured
shapes; the writer (:mod:`drk.assistant.synth.mapped`) states them by the tensors' sizes at run time.

Left out: splits at which sizes do not divide one another, and starts that are counted from a dimension's end
(``x[-4:]``, the first elements of what is flipped): a number would be another element at other sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Digit:
    """``weight`` times an atom's index, or times ``size - 1 - index`` where ``turned``."""

    atom: int
    weight: int = 1
    turned: bool = False


@dataclass(frozen=True)
class Coordinate:
    """``start`` plus digits, outermost first; ``parts`` says that ``start`` is where one of so many equal parts is."""

    digits: tuple[Digit, ...] = ()
    start: int = 0
    parts: int = 0


Coordinates = tuple[Coordinate, ...]


@dataclass(frozen=True)
class Bend:
    """How an index follows from the coordinate ``whole`` of the node ``of``; ``kind`` is one of these.

    ``piece``: less the sizes of the atoms ``before`` and ``shift``, of use inside the atom's own size (``last``:
    nothing stands behind it). ``slot``: of use where the coordinate is ``shift``. ``roll``: turned round by ``shift``.
    ``reflect``, ``replicate``, ``circular``: less ``shift``, and what falls outside is led back inside.
    """

    kind: str
    of: str
    whole: Coordinate
    before: tuple[int, ...] = ()
    shift: int = 0
    last: bool = False


@dataclass(frozen=True)
class Join:
    """A coordinate ``whole`` of a dimension as long as all the atoms ``pieces`` together and ``more``: ``size``."""

    whole: Coordinate
    pieces: tuple[int, ...]
    more: int
    size: int


class Refined(Exception):
    """An atom was split: coordinates that were made before hold the whole one and have to be made again."""


class NoMap(Exception):
    """The operator's index change is none of those that are known here."""


@dataclass
class Atoms:
    """The parts of an output's dimensions: sizes, names and what was split into what (outer, inner)."""

    sizes: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    children: dict[int, tuple[int, int]] = field(default_factory=dict)
    grown: set[int] = field(default_factory=set)
    """Atoms along which something was expanded: sizes that may be those of an input that is read elsewhere."""
    left: set[int] = field(default_factory=set)
    """Atoms whose size a view leaves open (-1), so that of several it is the one that may change."""
    ends: dict[int, bool] = field(default_factory=dict)
    """Atoms of slices: whether these reach to the end of what they are of, or to a number that the graph gives."""
    bends: dict[int, Bend] = field(default_factory=dict)
    """Indices that follow from coordinates, by their atom (:mod:`drk.assistant.synth.cat_maps`)."""
    joins: dict[Join, None] = field(default_factory=dict)
    """How long the dimensions are that those coordinates walk, in the order in which they were met."""

    def add(self, size: int, name: str) -> int:
        """Add an atom and return its number."""
        self.sizes.append(size)
        self.names.append(name)
        return len(self.sizes) - 1

    def bent(self, bend: Bend, size: int, name: str) -> int:
        """The number of the atom that follows from a coordinate by ``bend``; it is added where it is new."""
        known = next((atom for atom, other in self.bends.items() if other == bend and self.sizes[atom] == size), None)
        if known is None:
            known = self.add(size, name)
            self.bends[known] = bend
        return known

    def origin(self, atom: int) -> int | None:
        """The bent index that ``atom`` is or is a part of, if any."""
        above = {child: parent for parent, pair in self.children.items() for child in pair}
        while atom in above:
            atom = above[atom]
        return atom if atom in self.bends else None

    def split(self, atom: int, inner: int) -> None:
        """Split ``atom`` so that its inner part has the size ``inner``.

        Raises:
            Refined: always; coordinates have to be made again.
        """
        name = self.names[atom]
        outer = self.add(self.sizes[atom] // inner, f"{name}_outer")
        self.children[atom] = (outer, self.add(inner, f"{name}_inner"))
        raise Refined

    def leaves(self, atom: int) -> list[int]:
        """The parts that ``atom`` was split into, outermost first."""
        if atom not in self.children:
            return [atom]
        return [leaf for child in self.children[atom] for leaf in self.leaves(child)]

    def coordinate(self, atom: int) -> Coordinate:
        """The coordinate that walks ``atom``."""
        digits: list[Digit] = []
        weight = 1
        for leaf in reversed(self.leaves(atom)):
            digits.append(Digit(leaf, weight))
            weight *= self.sizes[leaf]
        return Coordinate(tuple(reversed(digits)))

    def most(self, coordinate: Coordinate) -> int:
        """The largest value of a coordinate."""
        return coordinate.start + sum((self.sizes[digit.atom] - 1) * digit.weight for digit in coordinate.digits)


# --- Index changes -------------------------------------------------------------------------------------------


def reshaped(coords: Coordinates, after: Sequence[int], before: Sequence[int], atoms: Atoms) -> Coordinates:
    """Coordinates in the shape ``before`` of what has ``coords`` in the shape ``after``.

    Raises:
        Refined: an atom had to be split.
        NoMap: sizes do not divide one another.
    """
    result: list[Coordinate] = []
    for here, there in blocks(before, after):
        if len(here) == 1 and len(there) == 1:
            result.append(coords[there[0]])
        elif not there:
            result += [Coordinate() for _ in here]
        elif here:
            result += _redigited([coords[dim] for dim in there], [after[dim] for dim in there],
                                 [before[dim] for dim in here], atoms)  # fmt: skip
    return tuple(result)


def blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of dimensions of both shapes with equal products, as short as can be; single ones on their own."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and j < len(after) and before[i] == after[j]:
            blocks.append(([i], [j]))
            i, j = i + 1, j + 1
        elif i < len(before) and before[i] == 1:
            blocks.append(([i], []))
            i += 1
        elif j < len(after) and after[j] == 1:
            blocks.append(([], [j]))
            j += 1
        else:
            here, there = [i], [j]
            sizes = [before[i], after[j]]
            i, j = i + 1, j + 1
            while sizes[0] != sizes[1]:
                if sizes[0] < sizes[1]:
                    sizes[0] *= before[i]
                    here.append(i)
                    i += 1
                else:
                    sizes[1] *= after[j]
                    there.append(j)
                    j += 1
            blocks.append((here, there))
    return blocks


def _redigited(coords: Sequence[Coordinate], after: list[int], before: list[int], atoms: Atoms) -> list[Coordinate]:
    flat: list[Digit] = []
    stride = 1
    for coordinate, size in zip(reversed(coords), reversed(after), strict=True):
        flat += [replace(digit, weight=digit.weight * stride) for digit in coordinate.digits]
        stride *= size
    start, parts = _start(coords, after, before)
    result: list[Coordinate] = []
    stride = 1
    for size in reversed(before):
        digits = [digit for digit in flat if stride <= digit.weight < stride * size]
        for digit in digits:
            _fits(digit, stride * size, atoms)
            if digit.weight % stride:
                raise NoMap
        digits.sort(key=lambda digit: -digit.weight)
        own = tuple(replace(digit, weight=digit.weight // stride) for digit in digits)
        made = Coordinate(own, start if stride == 1 else 0, parts)
        if atoms.most(made) >= size:
            raise NoMap
        result.append(made)
        stride *= size
    return result[::-1]


def _start(coords: Sequence[Coordinate], after: list[int], before: list[int]) -> tuple[int, int]:
    """Where a block begins along its innermost dimension before, and how many equal parts that counts in.

    Raises:
        NoMap: the place depends on sizes in a way that neither a number nor a number of parts tells.
    """
    first, *others = coords
    if first.start and others:
        if len(before) > 1 or any(item.start for item in others):
            raise NoMap
        return first.start * math.prod(after[1:]), after[0]
    start = coords[-1].start
    if any(item.start for item in coords[:-1]) or start >= before[-1]:
        raise NoMap
    return start, 0


def _fits(digit: Digit, edge: int, atoms: Atoms) -> None:
    """Split a digit's atom that crosses ``edge``."""
    size = atoms.sizes[digit.atom]
    if digit.weight * size <= edge:
        return
    inner, rest = divmod(edge, digit.weight)
    if rest or size % inner:
        raise NoMap
    atoms.split(digit.atom, inner)


def weighted(parts: Sequence[tuple[Coordinate, int]]) -> Coordinate:
    """The sum of coordinates times weights, outermost first.

    Raises:
        NoMap: one of them begins at one of several equal parts.
    """
    if any(coordinate.parts for coordinate, _ in parts):
        raise NoMap
    digits = [replace(digit, weight=digit.weight * weight) for item, weight in parts for digit in item.digits]
    return Coordinate(tuple(digits), sum(item.start * weight for item, weight in parts))


def permuted(coords: Coordinates, dims: Sequence[int]) -> Coordinates:
    """Coordinates before ``permute(dims)``."""
    result = list(coords)
    for place, dim in enumerate(dims):
        result[dim % len(dims)] = coords[place]
    return tuple(result)


def sliced(coordinate: Coordinate, start: int, step: int = 1, parts: int = 0) -> Coordinate:
    """The coordinate before a slice; with ``parts``, before a cut into so many.

    Raises:
        NoMap: a part of a slice, or a slice of a part: it begins at what no single number of elements or parts tells.
    """
    if coordinate.parts or (parts and coordinate.start):
        raise NoMap
    digits = tuple(replace(digit, weight=digit.weight * step) for digit in coordinate.digits)
    return Coordinate(digits, start + coordinate.start * step, parts)


def flipped(coordinate: Coordinate, size: int, atoms: Atoms) -> Coordinate:
    """The coordinate before a flip of a dimension of ``size``.

    Raises:
        NoMap: it does not reach the flipped dimension's end, so that it begins as far from the other one.
    """
    if atoms.most(coordinate) != size - 1:
        raise NoMap
    digits = tuple(replace(digit, turned=not digit.turned) for digit in coordinate.digits)
    return Coordinate(digits)
