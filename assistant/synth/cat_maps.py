"""Where the elements of concatenated, stacked, padded and rolled tensors come from.

A concatenation's coordinate is cut into *pieces*: each has an index of its own (the coordinate less what stands before
the piece) and a guard that says whether it lies inside. What a kernel reads for a piece is loaded where the guard
holds, so that each element is loaded once, and the pieces' values are chosen by guards. Padding by a constant is one
piece with the constant around it. Rolls and the other paddings bend a coordinate without choosing: one load serves
them.

These indices are atoms like the parts of the output's dimensions (:mod:`drk.assistant.synth.index_maps`), so that views
behind them split and permute them as they do those. What stands before a piece is told by sizes at run time.

Left out: pieces of different types, pieces without elements, paddings that cut off, coordinates that begin at one of
the parts of a cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drk.assistant.synth.index_maps import Atoms, Bend, Coordinate, Coordinates, Join, NoMap
from drk.gym.graph import Node, Ref, TensorMeta

_STACKS = frozenset({"hstack", "vstack", "dstack"})
_CATS = frozenset({"cat", "concat", "concatenate"}) | _STACKS
_BENT_PADS: Mapping[str, str] = {
    **{f"reflection_pad{rank}d": "reflect" for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d": "replicate" for rank in (1, 2, 3)},
}


@dataclass(frozen=True)
class Piece:
    """What a joined value is where all ``guards`` hold: ``source`` at ``coords``, or the number ``fill``."""

    source: str | None
    coords: Coordinates
    guards: tuple[int, ...]
    fill: float = 0.0


def is_join(node: Node) -> bool:
    """Whether ``node`` puts tensors together, or one tensor and a constant around it."""
    if not node.op.startswith("aten.") or len(node.metas) != 1 or node.metas[0] is None or node.metas[0].numel == 0:
        return False
    if node.bare_op in _CATS or node.bare_op == "stack":
        return isinstance(node.args[0], tuple) and all(isinstance(item, Ref) for item in node.args[0])
    return padding(node) == "constant" and isinstance(node.args[0], Ref)


def padding(node: Node) -> str | None:
    """The mode of a padding, or None."""
    if node.bare_op == "pad":
        return str(node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant"))
    return "constant" if node.bare_op == "constant_pad_nd" else _BENT_PADS.get(node.bare_op)


def join_dim(node: Node) -> int:
    """The dimension along which a concatenation or stack ``node`` puts its pieces, counted from the first."""
    rank = len(node.meta.shape)
    if node.bare_op in _STACKS:
        return {"hstack": min(1, rank - 1), "vstack": 0, "dstack": 2}[node.bare_op]
    return int(node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % rank


def joined(node: Node, coords: Coordinates, metas: Mapping[str, TensorMeta], atoms: Atoms) -> tuple[Piece, ...]:
    """The pieces of what ``node``, for which :func:`is_join` holds, has at ``coords``; the last one is what is left.

    Raises:
        NoMap: the pieces differ in type or rank, one is empty, or a coordinate is not one that can be cut.
    """
    if node.bare_op not in _CATS and node.bare_op != "stack":
        return _padded(node, coords, metas, atoms)
    names = [item.name for item in node.args[0]]
    dim, rank = join_dim(node), len(node.meta.shape)
    whole = _cuttable(coords[dim])
    sources = [metas.get(name) for name in names]
    own_rank = rank - 1 if node.bare_op == "stack" else rank
    if any(m is None or m.dtype != node.meta.dtype or not m.numel or len(m.shape) != own_rank for m in sources):
        raise NoMap
    found: list[Piece] = []
    before: tuple[int, ...] = ()
    for place, name in enumerate(names):
        label, last = f"{_axis(whole, atoms)}_{place}", place + 1 == len(names)
        if node.bare_op == "stack":
            atom = atoms.bent(Bend("slot", node.name, whole, (), place, last), 1, label)
            found.append(Piece(name, (*coords[:dim], *coords[dim + 1 :]), (atom,)))
            continue
        bend = Bend("piece", node.name, whole, before, 0, last)
        atom = atoms.bent(bend, metas[name].shape[dim], label)
        found.append(Piece(name, (*coords[:dim], atoms.coordinate(atom), *coords[dim + 1 :]), (atom,)))
        before = (*before, atom)
    more = len(names) if node.bare_op == "stack" else 0
    atoms.joins[Join(whole, before, more, node.meta.shape[dim])] = None
    return tuple(found)


def _cuttable(coordinate: Coordinate) -> Coordinate:
    if coordinate.parts:
        raise NoMap
    return coordinate


def _axis(coordinate: Coordinate, atoms: Atoms) -> str:
    """What the dimension that a coordinate walks may be called."""
    return atoms.names[coordinate.digits[0].atom] if coordinate.digits else "only"


def _padded(node: Node, coords: Coordinates, metas: Mapping[str, TensorMeta], atoms: Atoms) -> tuple[Piece, ...]:
    source, fill = node.args[0], _fill(node)
    if source.name not in metas or metas[source.name].dtype != node.meta.dtype or not metas[source.name].numel:
        raise NoMap
    before = metas[source.name].shape
    result, guards = list(coords), []
    for dim, (first, last) in _pads(node).items():
        whole = _cuttable(coords[dim])
        atom = atoms.bent(
            Bend("piece", node.name, whole, (), first, last == 0), before[dim], f"{_axis(whole, atoms)}_inner"
        )
        result[dim] = atoms.coordinate(atom)
        guards.append(atom)
        atoms.joins[Join(whole, (atom,), first + last, node.meta.shape[dim])] = None
    inner = Piece(source.name, tuple(result), tuple(guards))
    return (inner, Piece(None, (), (), fill)) if guards else (inner,)


def _pads(node: Node) -> dict[int, tuple[int, int]]:
    """(elements before, after) by dimension, where there are any.

    Raises:
        NoMap: a number is negative.
    """
    rank, flat = len(node.meta.shape), node.args[1]
    found = {rank - 1 - place: (flat[2 * place], flat[2 * place + 1]) for place in range(len(flat) // 2)}
    if any(type(size) is not int or size < 0 for pair in found.values() for size in pair):
        raise NoMap
    return {dim: pair for dim, pair in found.items() if pair != (0, 0)}


def _fill(node: Node) -> float:
    at = 3 if node.bare_op == "pad" else 2
    value: Any = node.args[at] if len(node.args) > at else node.kwargs.get("value", 0.0)
    value = 0.0 if value is None else value
    if not isinstance(value, bool | int | float):
        raise NoMap
    return value


# --- One load for all ----------------------------------------------------------------------------------------


def bent_pad(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    """Coordinates of what reflecting, replicating and circular padding shows at ``coords``.

    Raises:
        NoMap: a coordinate is not one that can be bent.
    """
    kind = padding(node)
    assert kind is not None
    changes = {dim: (kind, first, first + last) for dim, (first, last) in _pads(node).items()}
    return _bent(node, coords, before, atoms, changes)


def rolled(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    """Coordinates of what a roll shows at ``coords``.

    Raises:
        NoMap: a coordinate is not one that can be bent, or what is rolled is flattened.
    """
    shifts, dims = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("dims", ())
    shifts, dims = ((item,) if isinstance(item, int) else item for item in (shifts, dims))
    if len(before) == 1 and not dims:
        dims = (0,)
    if len(shifts) != len(dims) or len({dim % len(before) for dim in dims}) != len(dims):
        raise NoMap
    changes = {dim % len(before): ("roll", shift, 0) for shift, dim in zip(shifts, dims, strict=True) if shift}
    return _bent(node, coords, before, atoms, changes)


def _bent(
    node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms, changes: Mapping[int, tuple[str, int, int]]
) -> Coordinates:
    result = list(coords)
    for dim, (kind, shift, more) in changes.items():
        whole = _cuttable(coords[dim])
        atom = atoms.bent(Bend(kind, node.name, whole, (), shift), before[dim], f"{_axis(whole, atoms)}_{kind}")
        result[dim] = atoms.coordinate(atom)
        atoms.joins[Join(whole, (atom,), more, node.meta.shape[dim])] = None
    return tuple(result)
