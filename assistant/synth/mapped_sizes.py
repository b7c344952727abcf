"""Sizes of the parts of a mapped kernel's dimensions, as launchers find them in the tensors.

A part that walks a whole axis of some operand has that axis' size. What is left of an axis when all parts but one are
known is that size divided by theirs; of several unknown parts the one that a view leaves open (-1), else the outermost
is taken for the one that may change, the others (a pixel shuffle's factor, a number of groups) for numbers. Parts that
no operand has (the factor of nearest upsampling) are numbers too, and slices that end where the tensor does reach to
its end at other sizes. A dimension of joined values is as long as its pieces together.

Left out: whole dimensions that no operand has (an expansion), and parts of axes that were sliced unevenly, but of
parameters, where nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.index_maps import Atoms, Coordinate, Join
from drk.assistant.synth.index_text import divided, product_text, sum_text
from drk.assistant.synth.mapped_trace import Trace
from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class AxisSize:
    """``shape[axis]`` of the value, divided by the product of ``over`` (atoms) and by ``parts``, less ``less``.

    With ``step``: every so many elements of what is left from the element ``less`` on.
    """

    value: str
    axis: int
    over: tuple[int, ...] = ()
    parts: int = 1
    less: int = 0
    step: int = 1


@dataclass(frozen=True)
class JoinSize:
    """The sizes of ``pieces`` (atoms) together and ``more``, divided by the product of ``over``."""

    pieces: tuple[int, ...]
    more: int
    over: tuple[int, ...] = ()


@dataclass(frozen=True)
class Product:
    """The product of the sizes of ``parts`` (atoms)."""

    parts: tuple[int, ...]


Size = AxisSize | JoinSize | Product | int
Sizes = Mapping[int, Size]
"""By atom: where its size stands, or the number that it is."""


def sizes_of(found: Trace, metas: Mapping[str, TensorMeta], fixed: frozenset[str]) -> Sizes | None:
    """Where the launcher finds each atom's size, or None where it cannot."""
    sizes: dict[int, Size] = {}
    loads = sorted(found.loads, key=lambda place: (place[0] in fixed, -metas[place[0]].numel))
    axes = [
        (name, axis, coordinate, metas[name].shape[axis])
        for name, coords in loads
        for axis, coordinate in enumerate(coords)
        if coordinate.digits
    ]
    captured = found.atoms.sizes
    for name, _, coordinate, size in axes:
        if name in fixed and (_dense(coordinate, captured, size) or len(coordinate.digits) == 1):
            sizes.update({digit.atom: captured[digit.atom] for digit in coordinate.digits})
    for name, axis, coordinate, size in axes:
        atom = coordinate.digits[0].atom
        if len(coordinate.digits) == 1 and coordinate.digits[0].weight == 1 and captured[atom] == size:
            sizes.setdefault(atom, AxisSize(name, axis))
    for item in axes:
        _divided(sizes, captured, item, found.atoms.left)
    for item in axes:
        _of_slices(sizes, found.atoms, item)
    if not all(_of_join(sizes, found.atoms, join) for join in reversed(found.atoms.joins)):
        return None
    return sizes if all(_told(sizes, found.atoms, digit.atom) for item in found.root for digit in item.digits) else None


def _told(sizes: dict[int, Size], atoms: Atoms, atom: int) -> bool:
    """Whether the size of ``atom`` is known; that of a part is a number where nothing else tells it."""
    if atom in sizes:
        return True
    leaves = atoms.leaves(atom)
    if len(leaves) > 1:
        sizes[atom] = Product(tuple(leaves))
        return all(_told(sizes, atoms, leaf) for leaf in leaves)
    if atom in atoms.grown or not any(atom in pair for pair in atoms.children.values()):
        return False
    sizes[atom] = atoms.sizes[atom]
    return True


def _of_join(sizes: dict[int, Size], atoms: Atoms, join: Join) -> bool:
    """Take what a dimension's pieces leave for its own part; whether all that its index needs is known."""
    if not all(_told(sizes, atoms, piece) for piece in join.pieces):
        return False
    whole = JoinSize(join.pieces, join.more)
    own = [digit.atom for digit in join.whole.digits]
    if not _dense(join.whole, atoms.sizes, join.size) or join.whole.start:
        return all(_told(sizes, atoms, atom) for atom in own)
    unknown = [atom for atom in own if atom not in sizes]
    first = next((atom for atom in unknown if atom in atoms.left), unknown[0] if unknown else -1)
    for atom in unknown:
        if atom != first:
            sizes[atom] = atoms.sizes[atom]
    if unknown:
        sizes[first] = replace(whole, over=tuple(atom for atom in own if atom != first))
    return True


_Axis = tuple[str, int, Coordinate, int]


def _dense(coordinate: Coordinate, captured: list[int], size: int) -> bool:
    """Whether a coordinate's parts make up the whole axis."""
    weight = 1
    for digit in reversed(coordinate.digits):
        if digit.weight != weight:
            return False
        weight *= captured[digit.atom]
    return weight == size


def _divided(sizes: dict[int, Size], captured: list[int], item: _Axis, left: set[int]) -> None:
    """Take one part of a whole axis, where it is unknown, for what the others leave of it.

    It is one of those that are ``left`` open by a view, else the outermost.
    """
    name, axis, coordinate, size = item
    if not _dense(coordinate, captured, size):
        return
    own = [digit.atom for digit in coordinate.digits]
    first = next((atom for atom in own if atom in left), own[0])
    others = [atom for atom in own if atom != first]
    for atom in others:
        sizes.setdefault(atom, captured[atom])
    sizes.setdefault(first, AxisSize(name, axis, tuple(others)))


def _of_slices(sizes: dict[int, Size], atoms: Atoms, item: _Axis) -> None:
    """Sizes of slices: equal parts, all to the end, every so many to the end, or as many as the graph says."""
    name, axis, coordinate, size = item
    atom, weight = coordinate.digits[0].atom, coordinate.digits[0].weight
    if len(coordinate.digits) != 1:
        return
    captured = atoms.sizes[atom]
    if coordinate.parts:
        if weight == 1 and captured * coordinate.parts == size:
            sizes.setdefault(atom, AxisSize(name, axis, parts=coordinate.parts))
    elif weight == 1 and coordinate.start + captured == size:
        sizes.setdefault(atom, AxisSize(name, axis, less=coordinate.start))
    elif atoms.ends.get(atom) is True and captured == (size - coordinate.start + weight - 1) // weight:
        sizes.setdefault(atom, AxisSize(name, axis, less=coordinate.start, step=weight))
    elif atoms.ends.get(atom) is False:
        sizes.setdefault(atom, captured)


def needed(coordinate: Coordinate, atoms: Atoms, sizes: Sizes) -> int:
    """How long an axis must be for a slice of it that the graph ends at a number, or 0."""
    cut = [digit for digit in coordinate.digits if atoms.ends.get(digit.atom) is False]
    if len(coordinate.digits) != 1 or not cut or not isinstance(sizes.get(cut[0].atom), int):
        return 0
    return atoms.most(coordinate) + 1


def size_text(atom: int, sizes: Sizes, names: Mapping[str, str]) -> str:
    """Launcher expression for an atom's size; no parentheses needed in a product."""
    found = sizes[atom]
    if isinstance(found, int):
        return str(found)
    if isinstance(found, Product):
        return product_text([size_text(part, sizes, names) for part in found.parts])
    if isinstance(found, JoinSize):
        whole = sum_text([*((1, size_text(piece, sizes, names)) for piece in found.pieces), (1, str(found.more))])
        return divided(whole, [size_text(over, sizes, names) for over in found.over])
    text = f"{names[found.value]}.shape[{found.axis}]"
    if found.step > 1:
        return divided(sum_text([(1, text), (1, str(found.step - 1 - found.less))]), [str(found.step)])
    text = divided(text, [*(size_text(over, sizes, names) for over in found.over), str(found.parts)])
    return f"({text} - {found.less})" if found.less else text
