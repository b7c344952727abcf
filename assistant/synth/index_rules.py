"""Which index change each ATen operator is: views, shuffles, flips, repeats, nearest upsampling.

:func:`pull` goes from an operator's result to what it reads (:mod:`drk.assistant.synth.index_maps` has the arithmetic).

What joins several tensors is in :mod:`drk.assistant.synth.cat_maps`. Left out: interpolation between elements, gathers
by tensors; upsampling to a given size, which other inputs' sizes may have told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from drk.assistant.synth.cat_maps import bent_pad, is_join, padding, rolled
from drk.assistant.synth.index_maps import (
    Atoms,
    Coordinate,
    Coordinates,
    NoMap,
    blocks,
    flipped,
    permuted,
    reshaped,
    sliced,
    weighted,
)
from drk.gym.graph import Node, Ref, TensorMeta

MAX_UPSAMPLED = 65_536
"""Longest upsampled dimension for which PyTorch's rounding of source positions is checked."""

_Rule = Callable[[Node, Coordinates, Sequence[int], Atoms], Coordinates]
"""Takes the node, its coordinates, the shape of what it reads, and the atoms."""


def _reshape(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    after, left = node.meta.shape, _left_open(node)
    if left is not None and any(left in there[1:] for _, there in blocks(before, after)):
        atoms.left |= {digit.atom for digit in coords[left].digits}
    return reshaped(coords, after, before, atoms)


def _left_open(node: Node) -> int | None:
    """The dimension of a view's result that is -1 in the graph."""
    start, sizes = 0, node.args[1] if len(node.args) == 2 else None
    if node.bare_op == "unflatten":
        start, sizes = node.args[1] % len(node.meta.shape), node.args[2]
    return start + sizes.index(-1) if isinstance(sizes, tuple) and -1 in sizes else None


def _permute(node: Node, coords: Coordinates, _before: Sequence[int], _: Atoms) -> Coordinates:
    return permuted(coords, node.args[1])


def _transpose(node: Node, coords: Coordinates, before: Sequence[int], _: Atoms) -> Coordinates:
    rank = len(before)
    dims = list(range(rank))
    first, second = node.args[1:3] if len(node.args) > 2 else (0, rank - 1)
    dims[first % rank], dims[second % rank] = dims[second % rank], dims[first % rank]
    return permuted(coords, dims)


def _expand(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    after = node.meta.shape
    added = len(after) - len(before)
    kept = [size == after[added + dim] for dim, size in enumerate(before)]
    dropped = [*coords[:added], *(item for item, same in zip(coords[added:], kept, strict=True) if not same)]
    atoms.grown |= {digit.atom for coordinate in dropped for digit in coordinate.digits}
    return tuple(item if same else Coordinate() for item, same in zip(coords[added:], kept, strict=True))


def _slice(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])[:4]
    start = 0 if start is None else start
    if start < 0 or (step > 1 and end is not None and end < 0):
        raise NoMap  # counted from the end, which may be elsewhere at the next call
    if end is None or end >= 0:
        opened = end is None or end >= before[dim % len(before)]
        atoms.ends |= {digit.atom: opened for digit in coords[dim].digits}
    return _replaced(coords, dim, sliced(coords[dim], min(start, before[dim % len(before)]), step))


def _narrow(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    dim, start, length = node.args[1:4]
    if start < 0 or (start and start + length == before[dim % len(before)]):
        raise NoMap  # its length is a number, but sizes would have it reach to the end
    atoms.ends |= {digit.atom: start + length == before[dim % len(before)] for digit in coords[dim].digits}
    return _replaced(coords, dim, sliced(coords[dim], start))


def _select(node: Node, coords: Coordinates, before: Sequence[int], _: Atoms) -> Coordinates:
    dim, index = node.args[1] % len(before), node.args[2]
    if index < 0:
        raise NoMap
    return (*coords[:dim], Coordinate((), index), *coords[dim:])


def _flip(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    dims = {dim % len(before) for dim in node.args[1]}
    return tuple(flipped(item, before[dim], atoms) if dim in dims else item for dim, item in enumerate(coords))


def _replaced(coords: Coordinates, dim: int, coordinate: Coordinate) -> Coordinates:
    dim %= len(coords)
    return (*coords[:dim], coordinate, *coords[dim + 1 :])


def _pixel_shuffle(node: Node, coords: Coordinates, _before: Sequence[int], atoms: Atoms) -> Coordinates:
    factor, (height, width) = node.args[1], node.meta.shape[-2:]
    *lead, channel, y, x = coords
    (h, y_inner), (w, x_inner) = (
        reshaped((item,), (size,), (size // factor, factor), atoms) for item, size in ((y, height), (x, width))
    )
    # One channel stays a digit: there may be more at the next call.
    return (*lead, weighted(((channel, factor * factor), (y_inner, factor), (x_inner, 1))), h, w)


def _pixel_unshuffle(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    factor = node.args[1]
    *lead, channels, height, width = before
    rank, h, w = len(lead), height // factor, width // factor
    split = reshaped(coords, node.meta.shape, (*lead, channels, factor, factor, h, w), atoms)
    order = (*range(rank), rank, rank + 3, rank + 1, rank + 4, rank + 2)
    moved = tuple(split[place] for place in order)
    return reshaped(moved, (*lead, channels, h, factor, w, factor), before, atoms)


def _channel_shuffle(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    batch, channels, *rest = before
    groups = node.args[1]
    split = reshaped(coords, before, (batch, channels // groups, groups, *rest), atoms)
    atoms.left |= {digit.atom for digit in split[1].digits}  # groups are given, channels of one are not
    moved = (split[0], split[2], split[1], *split[3:])
    return reshaped(moved, (batch, groups, channels // groups, *rest), before, atoms)


def _upsample(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    """Every source element stands ``factor`` times in a row along each dimension of the image."""
    scales = node.args[2] if len(node.args) > 2 and node.op.endswith(".vec") else None
    images = range(2, len(before))
    if scales is None or len(scales) != len(images):
        raise NoMap
    result = list(coords)
    for dim, scale in zip(images, scales, strict=True):
        factor = int(scale)
        single = before[dim] == 1 and factor > 1  # what is broadcast now may have more elements at the next call
        if factor != scale or factor < 1 or single or not _rounds_down(node.meta.shape[dim], factor):
            raise NoMap
        result[dim] = _dropped(coords[dim], before[dim], factor, atoms, inner=True)
    return tuple(result)


def _rounds_down(size: int, factor: int) -> bool:
    """Whether ``floor(position * float32(1 / factor))``, PyTorch's source position, is the quotient everywhere."""
    if factor & (factor - 1) == 0:
        return True
    positions = numpy.arange(max(size, MAX_UPSAMPLED))
    found = numpy.floor(positions.astype(numpy.float32) * numpy.float32(1.0 / factor))
    return size <= MAX_UPSAMPLED and bool((found == positions // factor).all())


def _dropped(coordinate: Coordinate, size: int, factor: int, atoms: Atoms, *, inner: bool) -> Coordinate:
    """A coordinate of ``size * factor`` without the factor's digit, which is the inner or the outer one."""
    if factor == 1:
        return coordinate
    if size == 1:
        return Coordinate()
    shape = (size, factor) if inner else (factor, size)
    return reshaped((coordinate,), (size * factor,), shape, atoms)[0 if inner else 1]


def _repeat(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    counts = (*(1,) * (len(before) - len(node.args[1])), *node.args[1])  # ``tile`` may give fewer
    added = len(counts) - len(before)
    return tuple(
        _dropped(coords[added + dim], size, counts[added + dim], atoms, inner=False) for dim, size in enumerate(before)
    )


def _repeat_interleave(node: Node, coords: Coordinates, before: Sequence[int], atoms: Atoms) -> Coordinates:
    if len(node.args) < 3 or type(node.args[1]) is not int or type(node.args[2]) is not int:
        raise NoMap
    dim = node.args[2] % len(before)
    return _replaced(coords, dim, _dropped(coords[dim], before[dim], node.args[1], atoms, inner=True))


def _same(_node: Node, coords: Coordinates, _before: Sequence[int], _: Atoms) -> Coordinates:
    return coords


def _movedim(node: Node, coords: Coordinates, before: Sequence[int], _: Atoms) -> Coordinates:
    rank = len(before)
    sources, places = ((item,) if isinstance(item, int) else item for item in node.args[1:3])
    target = {place % rank: source % rank for source, place in zip(sources, places, strict=True)}
    rest = iter(dim for dim in range(rank) if dim not in target.values())
    return permuted(coords, [target[place] if place in target else next(rest) for place in range(rank)])


_RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"})
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    "permute": _permute, "transpose": _transpose, "t": _transpose, "expand": _expand, "expand_as": _expand,
    "slice": _slice, "narrow": _narrow, "select": _select, "flip": _flip, "clone": _same, "contiguous": _same,
    "pixel_shuffle": _pixel_shuffle, "pixel_unshuffle": _pixel_unshuffle,
    "channel_shuffle": _channel_shuffle, "native_channel_shuffle": _channel_shuffle,
    "upsample_nearest1d": _upsample, "upsample_nearest2d": _upsample, "upsample_nearest3d": _upsample,
    "repeat": _repeat, "tile": _repeat, "repeat_interleave": _repeat_interleave, "roll": rolled, "movedim": _movedim,
    "moveaxis": _movedim, "swapaxes": _transpose, "swapdims": _transpose, "pad": bent_pad,
    **{f"{kind}_pad{rank}d": bent_pad for kind in ("reflection", "replication") for rank in (1, 2, 3)},
}  # fmt: skip
_BENT = frozenset({"reflect", "replicate", "circular"})
_PARTS = frozenset({"chunk", "split", "split_with_sizes", "unbind"})
_COPIES = frozenset(
    {
        "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "native_channel_shuffle", "upsample_nearest1d",
        "upsample_nearest2d", "upsample_nearest3d", "repeat", "tile", "repeat_interleave", "flip", "clone",
        "contiguous", "roll",
    }
)  # fmt: skip


def is_view(node: Node) -> bool:
    """Whether ``node`` only moves elements, in a way that :func:`pull` may know."""
    if node.op.startswith("aten.") and node.bare_op in _PARTS:
        return bool(node.metas) and all(meta is not None for meta in node.metas)
    if len(node.metas) != 1 or node.metas[0] is None or node.metas[0].numel == 0:
        return False
    if node.bare_op == "pad" and padding(node) not in _BENT:
        return False
    return node.op == "getitem" or (node.op.startswith("aten.") and node.bare_op in _RULES)


def moves_data(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether PyTorch makes a new tensor for ``node``, which :func:`is_view` or ``is_join`` holds for."""
    if node.bare_op in _COPIES or padding(node) is not None or is_join(node):
        return True
    source = metas.get(node.args[0].name) if node.args and isinstance(node.args[0], Ref) else None
    if node.bare_op not in {"reshape", "flatten", "_unsafe_view"} or source is None:
        return False
    plain = [size for size in source.shape if size != 1] == [size for size in node.meta.shape if size != 1]
    return not source.contiguous and not plain


def pull(
    node: Node, coords: Coordinates, by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta], atoms: Atoms
) -> tuple[str, Coordinates]:
    """Name and coordinates of the element that ``node`` has at ``coords``.

    Raises:
        Refined: an atom had to be split, coordinates have to be made again.
        NoMap: the operator's index change is not known.
    """
    if node.op == "getitem":
        return _part(by_name[node.args[0].name], node.args[1], coords, metas)
    source = node.args[0]
    if not isinstance(source, Ref) or source.name not in metas or metas[source.name].dtype != node.meta.dtype:
        raise NoMap
    return source.name, _RULES[node.bare_op](node, coords, metas[source.name].shape, atoms)


def _part(cut: Node, place: Any, coords: Coordinates, metas: Mapping[str, TensorMeta]) -> tuple[str, Coordinates]:
    """The element before a cut into parts."""
    source = cut.args[0]
    if cut.bare_op not in _PARTS or not isinstance(source, Ref) or source.name not in metas:
        raise NoMap
    before = metas[source.name].shape
    at = 2 if cut.bare_op != "unbind" else 1
    dim = (cut.args[at] if len(cut.args) > at else cut.kwargs.get("dim", 0)) % len(before)
    if cut.bare_op == "unbind":
        return source.name, (*coords[:dim], Coordinate((), place), *coords[dim:])
    sizes = [meta.shape[dim] for meta in cut.metas if meta is not None]
    parts = cut.args[1] if cut.bare_op == "chunk" else 0
    if parts and (len(set(sizes)) != 1 or len(sizes) != parts):
        raise NoMap
    part = sliced(coords[dim], sum(sizes[:place]), parts=parts)
    return source.name, _replaced(coords, dim, part)
