"""Sizes of the parts of a mapped kernel's dimensions, as launchers find them in the tensors.

A part that walks a whole axis of some operand has that axis' size. What is left of an axis when all parts but one are
known is that size divided by theirs; of several unknown parts the one that a view leaves open (-1), else the outermost
is taken for the one that may change, the others (a pixel shuffle's factor, a number of groups) for numbers. Parts that
no operand has (the factor of nearest upsampling) are numbers too, and slices that end where the tensor does reach to
its end at other sizes.

Left out: whole dimensions that no operand has (an expansion), and parts of axes that were sliced unevenly, but of
parameters, where nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.assistant.synth.index_maps import Coordinate
from drk.assistant.synth.mapped_trace import Trace
from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class AxisSize:
    """``shape[axis]`` of the value, divided by the product of ``over`` (atoms) and by ``parts``, less ``less``."""

    value: str
    axis: int
    over: tuple[int, ...] = ()
    parts: int = 1
    less: int = 0


Sizes = Mapping[int, AxisSize | int]
"""By atom: where its size stands, or the number that it is."""


def sizes_of(found: Trace, metas: Mapping[str, TensorMeta], fixed: frozenset[str]) -> Sizes | None:
    """Where the launcher finds each atom's size, or None where it cannot."""
    sizes: dict[int, AxisSize | int] = {}
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
        _of_slices(sizes, captured, item)
    parts = {atom for pair in found.atoms.children.values() for atom in pair} - found.atoms.grown
    for coordinate in found.root:
        for digit in coordinate.digits:
            if digit.atom not in sizes and digit.atom not in parts:
                return None
            sizes.setdefault(digit.atom, captured[digit.atom])
    return sizes


_Axis = tuple[str, int, Coordinate, int]


def _dense(coordinate: Coordinate, captured: list[int], size: int) -> bool:
    """Whether a coordinate's parts make up the whole axis."""
    weight = 1
    for digit in reversed(coordinate.digits):
        if digit.weight != weight:
            return False
        weight *= captured[digit.atom]
    return weight == size


def _divided(sizes: dict[int, AxisSize | int], captured: list[int], item: _Axis, left: set[int]) -> None:
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


def _of_slices(sizes: dict[int, AxisSize | int], captured: list[int], item: _Axis) -> None:
    """Sizes of slices: equal parts, or all to the end."""
    name, axis, coordinate, size = item
    atom = coordinate.digits[0].atom
    if len(coordinate.digits) != 1 or coordinate.digits[0].weight != 1:
        return
    if coordinate.parts and captured[atom] * coordinate.parts == size:
        sizes.setdefault(atom, AxisSize(name, axis, parts=coordinate.parts))
    elif not coordinate.parts and coordinate.start + captured[atom] == size:
        sizes.setdefault(atom, AxisSize(name, axis, less=coordinate.start))


def size_text(atom: int, sizes: Sizes, names: Mapping[str, str]) -> str:
    """Launcher expression for an atom's size; no parentheses needed in a product."""
    found = sizes[atom]
    if isinstance(found, int):
        return str(found)
    text = f"{names[found.value]}.shape[{found.axis}]"
    divisors = [factor for over in found.over if (factor := size_text(over, sizes, names)) != "1"]
    divisors += [str(found.parts)] if found.parts > 1 else []
    if divisors:
        by = " * ".join(divisors)
        text = f"({text} // ({by}))" if len(divisors) > 1 else f"({text} // {by})"
    return f"({text} - {found.less})" if found.less else text
