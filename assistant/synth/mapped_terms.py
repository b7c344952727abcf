"""Where the elements of a mapped kernel's reads and writes lie in memory: sums of indices times distances.

Most coordinates are sums of the output's own indices. So is that of a concatenation's piece, less what stands before
it: addresses stay linear in the output, loads wide, and only the guard is new. Indices that follow otherwise (what is
rolled, reflected, or a part of a piece) are *bent*: they get a statement of their own in the kernel
(:mod:`drk.assistant.synth.mapped_sides`).

Left out: nothing is read here, sizes are told by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from drk.assistant.synth.domain import Operand
from drk.assistant.synth.index_maps import Atoms, Coordinate, Coordinates, Digit
from drk.assistant.synth.index_text import sum_text, times
from drk.assistant.synth.mapped_trace import Place

SizeOf = Callable[[int], str]
"""Text of an atom's size."""


@dataclass(frozen=True)
class Access:
    """A read or write: ``tensor`` and ``label`` are names in the launcher and the kernel, ``coords`` the place.

    ``guards`` are the pieces in which its value is of use.
    """

    place: Place
    tensor: str
    label: str
    operand: Operand
    coords: Coordinates
    guards: frozenset[int] = frozenset()

    @property
    def follows(self) -> bool:
        """Whether what are neighbours across axes as captured are so at all sizes: not where every other is skipped."""
        lowest = [min(digit.weight for digit in item.digits) for item in self.coords if item.digits]
        return self.operand.order is not None and all(weight == 1 for weight in lowest)

    def stride(self, axis: int) -> str:
        """A tensor's stride: a number where it is known for good."""
        rank, order = len(self.operand.meta.shape), self.operand.order
        if order is not None and self.operand.fixed:
            return str(self.operand.meta.strides[axis])
        if order is not None and order[-1] == axis - rank:
            return "1"
        return f"{self.tensor}.stride({axis})"


@dataclass(frozen=True)
class Term:
    """``weight`` times the index of an atom, as captured; ``text`` is the weight without its sign at any sizes."""

    atom: int
    weight: int
    text: str


@dataclass
class Line:
    """A coordinate as a sum of terms and signed distances."""

    terms: list[Term] = field(default_factory=list)
    start: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Line, weight: int, text: str) -> None:
        """Add ``weight``, which is positive, times ``other``."""
        self.terms += [Term(term.atom, term.weight * weight, times(term.text, text)) for term in other.terms]
        self.start += [(sign, times(start, text)) for sign, start in other.start]


def line_of(coordinate: Coordinate, atoms: Atoms, size_of: SizeOf) -> Line:
    """The coordinate as a sum of indices, pieces followed back; its own ``start`` is left to the caller."""
    line = Line()
    for digit in coordinate.digits:
        text = weight_text(coordinate, digit, atoms, size_of)
        bend = atoms.bends.get(digit.atom)
        if bend is not None and bend.kind == "piece" and not digit.turned:
            line.add(piece_line(digit.atom, atoms, size_of), digit.weight, text)
            continue
        line.terms.append(Term(digit.atom, -digit.weight if digit.turned else digit.weight, text))
        if digit.turned:
            last = sum_text([(1, size_of(digit.atom)), (-1, "1")])
            line.start.append((1, times(last, text)))
    return line


def whole_line(atom: int, atoms: Atoms, size_of: SizeOf) -> Line:
    """The coordinate that the bent index ``atom`` follows from."""
    whole = atoms.bends[atom].whole
    line = line_of(whole, atoms, size_of)
    line.start.append((1, str(whole.start)))
    return line


def piece_line(atom: int, atoms: Atoms, size_of: SizeOf) -> Line:
    """A piece's index: its coordinate less what stands before."""
    line = whole_line(atom, atoms, size_of)
    line.start += [(-sign, text) for sign, text in before(atom, atoms, size_of)]
    return line


def before(atom: int, atoms: Atoms, size_of: SizeOf) -> list[tuple[int, str]]:
    """What stands before a piece, or is left out before a bent index."""
    bend = atoms.bends[atom]
    return [*((1, size_of(piece)) for piece in bend.before), (1, str(bend.shift))]


def weight_text(coordinate: Coordinate, digit: Digit, atoms: Atoms, size_of: SizeOf) -> str:
    """A digit's weight: the product of the sizes of those inside of it, or the number that it was."""
    inner = [other for other in coordinate.digits if other.weight < digit.weight]
    if inner and math.prod(atoms.sizes[other.atom] for other in inner) == digit.weight:
        texts = [size_of(other.atom) for other in inner]
        if not all(text.isdigit() for text in texts):
            return " * ".join(text for text in texts if text != "1")
    return str(digit.weight)
