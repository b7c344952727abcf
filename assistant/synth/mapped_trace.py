"""What a kernel reads and computes, element by element of its output: views followed back to the tensors in memory.

From the outputs' coordinates :func:`trace` walks a region's nodes backwards. Elementwise operators keep coordinates
(operands that broadcast lose some), views change them (:mod:`drk.assistant.synth.index_maps`), and what the region does
not hold is loaded. A value that is wanted at two places (both halves of a chunk) is computed at both. What joins values
(:mod:`drk.assistant.synth.cat_maps`) wants each where its guards hold; so does all that is read for it alone.

Left out: outputs of different shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from drk.assistant.synth.cat_maps import Piece, is_join, joined
from drk.assistant.synth.index_maps import Atoms, Coordinate, Coordinates, Refined
from drk.assistant.synth.index_rules import is_view, pull
from drk.gym.graph import Node, TensorMeta

MAX_REFINEMENTS = 96
_AXES = {
    1: ("position",),
    2: ("row", "column"),
    3: ("image", "channel", "x"),
    4: ("image", "channel", "y", "x"),
    5: ("image", "channel", "z", "y", "x"),
}
"""Names of an output's dimensions, as convolutions have them."""

Place = tuple[str, Coordinates]
"""A value at coordinates."""


@dataclass(frozen=True)
class Choice:
    """What a joined value is where all ``guards`` hold: what is at ``place``, or the number ``fill``."""

    guards: tuple[int, ...]
    place: Place | None
    fill: float = 0.0


@dataclass
class Trace:
    """Places in the order in which they can be computed; ``loads`` maps places to the value whose name they may have.

    ``operands`` gives the place behind each reference of an elementwise operator at a place, ``joined`` the choices of
    a join, ``guards`` what holds wherever the value at a place is of use.
    """

    atoms: Atoms
    root: Coordinates
    computed: list[tuple[Node, Coordinates]] = field(default_factory=list)
    loads: dict[Place, str] = field(default_factory=dict)
    operands: dict[tuple[Place, str], Place] = field(default_factory=dict)
    uses: dict[Place, int] = field(default_factory=dict)
    outputs: dict[str, Place] = field(default_factory=dict)
    joined: dict[Place, tuple[Choice, ...]] = field(default_factory=dict)
    guards: dict[Place, frozenset[int]] = field(default_factory=dict)


def trace(
    outputs: Sequence[str],
    nodes: Sequence[Node],
    by_name: Mapping[str, Node],
    metas: Mapping[str, TensorMeta],
    fixed: frozenset[str],
    scalars: Mapping[str, float],
) -> Trace | None:
    """Follow ``outputs``, which have one shape, back through ``nodes``; None where that takes too many splits.

    Raises:
        NoMap: a view's index change is not known.
    """
    shape = metas[outputs[0]].shape
    names = _AXES.get(len(shape), tuple(f"axis_{dim}" for dim in range(len(shape))))
    atoms = Atoms()
    tops = [atoms.add(size, name) for size, name in zip(shape, names, strict=True)]
    walk = _Walk({node.name: node for node in nodes}, by_name, metas, fixed, scalars, atoms)
    for _ in range(MAX_REFINEMENTS):
        atoms.joins.clear()
        found = Trace(atoms, tuple(atoms.coordinate(top) for top in tops))
        try:
            for name in outputs:
                found.outputs[name] = walk.visit(name, found.root, found)
        except Refined:
            continue
        found.guards = _guards(found)
        return found
    return None


def _guards(found: Trace) -> dict[Place, frozenset[int]]:
    """What holds wherever a place's value is of use: with several readers, what they have in common."""
    read: dict[Place, list[tuple[Place, frozenset[int]]]] = {}
    for (reader, _), source in found.operands.items():
        read.setdefault(reader, []).append((source, frozenset()))
    for reader, choices in found.joined.items():
        read[reader] = [(item.place, frozenset(item.guards)) for item in choices if item.place is not None]
    result: dict[Place, frozenset[int]] = dict.fromkeys(found.outputs.values(), frozenset())
    for node, coords in reversed(found.computed):
        own = result[node.name, coords]
        for source, more in read.get((node.name, coords), ()):
            result[source] = result[source] & (own | more) if source in result else own | more
    return result


@dataclass(frozen=True)
class _Walk:
    inside: Mapping[str, Node]
    by_name: Mapping[str, Node]
    metas: Mapping[str, TensorMeta]
    fixed: frozenset[str]
    scalars: Mapping[str, float]
    atoms: Atoms

    def visit(self, name: str, coords: Coordinates, found: Trace, via: str = "") -> Place:
        """Take in what the value ``name`` at ``coords`` needs; the place that holds it. ``via``: a view of it."""
        while name in self.inside and is_view(self.inside[name]):
            node = self.inside[name]
            via = via or name
            name, coords = pull(node, coords, self.by_name, self.metas, self.atoms)
        place = (name, coords)
        found.uses[place] = found.uses.get(place, 0) + 1
        if name not in self.inside:
            found.loads.setdefault(place, via or name)
            return place
        node = self.inside[name]
        if found.uses[place] > 1:
            return place
        if is_join(node):
            pieces = joined(node, coords, self.metas, self.atoms)
            found.joined[place] = tuple(self._choice(item, found) for item in pieces)
        for argument in () if is_join(node) else node.inputs():
            if argument not in self.scalars:
                own = self._broadcast(coords, node.meta.shape, argument)
                found.operands[place, argument] = self.visit(argument, own, found)
        found.computed.append((node, coords))
        return place

    def _choice(self, piece: Piece, found: Trace) -> Choice:
        place = None if piece.source is None else self.visit(piece.source, piece.coords, found)
        return Choice(piece.guards, place, piece.fill)

    def _broadcast(self, coords: Coordinates, shape: tuple[int, ...], name: str) -> Coordinates:
        """Coordinates of an operand of what has ``coords`` in ``shape``."""
        sizes = self.metas[name].shape
        own = coords[len(coords) - len(sizes) :]
        full = shape[len(shape) - len(sizes) :]
        return tuple(
            Coordinate() if size == 1 and (whole != 1 or name in self.fixed) else item
            for item, size, whole in zip(own, sizes, full, strict=True)
        )
