"""Assignments to parts of tensors (``y[:, :3] = x``), written as concatenations.

A captured graph has each as a scatter: a copy of the whole tensor with one part replaced. Several in a row, as loops
and shifts by channels have them, copy the whole several times. Here the parts are followed until something reads the
tensor: it is a concatenation of what was assigned and of what is left of the tensor before, which kernels read piece
by piece (:mod:`drk.assistant.synth.cat_maps`). Parts of tensors that are one number everywhere become padding.

Left out: steps, parts of part of a piece, indices that are tensors, and layouts other than row-major. For inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from drk.assistant.synth.draft import contiguous_meta, fresh_name
from drk.assistant.synth.rewrites import without_dead
from drk.gym.graph import Graph, Node, Ref, Symbol, TensorMeta, references

END = 2**63 - 1
"""How a graph writes that a slice goes to the end."""
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FULL = {"full": 1, "full_like": 1, "new_full": 2}
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})
_SHOWING = frozenset(
    {
        *("slice", "select", "view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "transpose"),
        *("lift_fresh", "lift_fresh_copy", "detach", "detach_", "clone"),
    }
)
_SCATTERS = frozenset({"slice_scatter", "select_scatter"})
MAX_PIECES = 64


@dataclass(frozen=True)
class _Piece:
    """Elements ``start`` to ``end`` of a dimension: those of ``value``, or of ``base`` at the same place.

    ``first`` and ``last`` are the two ends as the graph writes them: counted from the end, or open.
    """

    start: int
    end: int
    value: Ref | None
    base: Ref | None = None
    first: int = 0
    last: int = END


def without_assignments(graph: Graph) -> Graph:
    """Return the graph with scatters of parts as concatenations; without any, the graph itself."""
    if not any(node.bare_op in {*_SCATTERS, "copy", "fill"} for node in graph.nodes):
        return graph
    return _Pass(graph, graph.metas(), set(graph.names())).run()


@dataclass
class _Pass:
    graph: Graph
    metas: dict[str, TensorMeta]
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, Ref] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """Tensors that are one number everywhere."""
    joined: dict[str, tuple[int, tuple[_Piece, ...]]] = field(default_factory=dict)
    """What scatters made: the dimension, and the pieces along it."""

    def run(self) -> Graph:
        leaving = {*references(self.graph.output), *self.graph.mutations.values()}
        for item in self.graph.placeholders:
            if not item.meta.shape and isinstance(item.value, int | float) and item.kind == "constant":
                self.numbers[item.name] = item.value
        for original in self.graph.nodes:
            node = replace(
                original,
                args=tuple(self._resolved(arg) for arg in original.args),
                kwargs={key: self._resolved(value) for key, value in original.kwargs.items()},
            )
            single = node.op.startswith("aten.") and len(node.metas) == 1 and node.metas[0] is not None
            made = self._written(node, kept=node.name in leaving) if single else None
            if made is None:
                self.nodes.append(node)
        return without_dead(replace(self.graph, nodes=tuple(self.nodes)))

    def _resolved(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._resolved(item) for item in value)
        return self.renamed.get(value.name, value) if isinstance(value, Ref) else value

    def _written(self, node: Node, *, kept: bool) -> bool | None:
        """Write ``node`` in another way, or note what it is and return None."""
        number = self._number(node)
        if number is not None:
            self.numbers[node.name] = number
        if node.bare_op in _SCATTERS:
            return self._scatter(node, kept=kept)
        if node.bare_op == "copy" and not kept:
            return self._copy(node)
        if node.bare_op == "fill" and number is not None:
            meta = contiguous_meta(node.meta.shape, node.meta.dtype)
            kinds = {"dtype": Symbol("dtype", meta.dtype), "device": Symbol("device", "cuda")}
            filled = replace(node, op="aten.full.default", args=(meta.shape, number), kwargs=kinds, metas=(meta,))
            self.nodes.append(filled)
            return True
        if node.bare_op == "slice" and not kept:
            return self._part_of_pieces(node)
        return None

    def _number(self, node: Node) -> float | None:
        """The number that a tensor is everywhere (any, where it has not been written), or None."""
        name, args = node.bare_op, node.args
        if name in _EMPTY:
            return 0
        value: Any = _FILLED.get(name)
        if name in _FULL and len(args) > _FULL[name]:
            value = args[_FULL[name]]
        if name == "fill":
            value = args[1]
        if (name in _SHOWING or name == "copy") and isinstance(args[0], Ref):
            value = args[1 if name == "copy" else 0]
        if isinstance(value, Ref):
            return self.numbers.get(value.name)
        return value if isinstance(value, int | float) else None

    def _emit(self, origin: Node, op: str, args: tuple[Any, ...], meta: TensorMeta, **kwargs: Any) -> Ref:
        name = fresh_name(op.split(".")[0] if op.startswith("_") else f"{op.split('.')[0]}_part", self.taken)
        self.metas[name] = meta
        self.nodes.append(replace(origin, name=name, op=f"aten.{op}", args=args, kwargs=kwargs, metas=(meta,)))
        return Ref(name)

    def _copy(self, node: Node) -> bool | None:
        """A copy into a part is what is copied, in the part's type and shape."""
        source = node.args[1]
        if not isinstance(source, Ref) or source.name not in self.metas:
            return None
        meta = self.metas[source.name]
        if meta.dtype != node.meta.dtype:
            meta = replace(meta, dtype=node.meta.dtype)
            source = self._emit(node, "_to_copy.default", (source,), meta, dtype=Symbol("dtype", meta.dtype))
        if meta.shape != node.meta.shape:
            grown = contiguous_meta(node.meta.shape, meta.dtype)
            source = self._emit(node, "expand.default", (source, node.meta.shape), grown)
        self.renamed[node.name] = source
        return True

    def _scatter(self, node: Node, *, kept: bool) -> bool | None:
        base, source = node.args[:2]
        meta = self.metas.get(source.name) if isinstance(source, Ref) else None
        if meta is None or not isinstance(base, Ref) or meta.dtype != node.meta.dtype or not _row_major(node.meta):
            return None
        ends = _ends(node, node.meta.shape)
        if ends is None:
            return None
        dim, start, end, first, last = ends
        if node.bare_op == "select_scatter":
            shape = (*meta.shape[:dim], 1, *meta.shape[dim:])
            source = self._emit(node, "unsqueeze.default", (source, dim), contiguous_meta(shape, meta.dtype))
        size = node.meta.shape[dim]
        before = self._pieces(base, dim, (0, start), (0, first)) if start else ()
        after = self._pieces(base, dim, (end, size), (last, END)) if end < size else ()
        if before is None or after is None or len(before) + len(after) >= MAX_PIECES:
            return None
        pieces = (*before, _Piece(start, end, source), *after)
        if len(pieces) == 1 and not kept:
            self.renamed[node.name] = source
            return True
        self.numbers.pop(node.name, None)
        self.joined[node.name] = (dim, pieces)
        node = replace(node, metas=(contiguous_meta(node.meta.shape, node.meta.dtype),))
        self.metas[node.name] = node.meta
        self.nodes.append(self._padded(node, dim, pieces) or self._joined(node, dim, pieces))
        return True

    def _pieces(
        self, base: Ref, dim: int, ends: tuple[int, int], written: tuple[int, int]
    ) -> tuple[_Piece, ...] | None:
        """What ``base`` is between two places along ``dim``; None where a place is inside of an assigned piece."""
        known = self.joined.get(base.name)
        if known is None or known[0] != dim:
            return (_Piece(*ends, None, base, *written),)
        found = []
        for piece in known[1]:
            low, high = max(piece.start, ends[0]), min(piece.end, ends[1])
            if low >= high:
                continue
            if (low, high) == (piece.start, piece.end):
                found.append(piece)
                continue
            if piece.value is not None:
                return None
            first = piece.first if low == piece.start else written[0]
            last = piece.last if high == piece.end else written[1]
            found.append(_Piece(low, high, None, piece.base, first, last))
        return tuple(found)

    def _joined(self, node: Node, dim: int, pieces: Sequence[_Piece]) -> Node:
        refs = [piece.value or self._shown(node, dim, piece) for piece in pieces]
        if len(refs) == 1:
            return replace(node, op="aten.clone.default", args=(refs[0],), kwargs={})
        return replace(node, op="aten.cat.default", args=(tuple(refs), dim), kwargs={})

    def _shown(self, node: Node, dim: int, piece: _Piece) -> Ref:
        assert piece.base is not None
        meta = self.metas[piece.base.name]
        shape = (*meta.shape[:dim], piece.end - piece.start, *meta.shape[dim + 1 :])
        args = (piece.base, dim, piece.first, piece.last)
        return self._emit(node, "slice.Tensor", args, replace(meta, shape=shape))

    def _padded(self, node: Node, dim: int, pieces: Sequence[_Piece]) -> Node | None:
        """One assigned piece with the same number on its sides, whose lengths the graph gives."""
        values = [piece for piece in pieces if piece.value is not None]
        others = [piece for piece in pieces if piece.base is not None]
        numbers = {self.numbers.get(piece.base.name) for piece in others if piece.base is not None}
        if len(values) != 1 or len(numbers) != 1 or None in numbers or node.meta.dtype == "bool":
            return None
        sides = [0, 0]
        for piece in others:
            after = piece.start >= values[0].end
            length = -piece.first if after else piece.last
            if length != piece.end - piece.start:
                return None  # its length follows from the whole one's
            sides[after] += length
        if sum(sides) + values[0].end - values[0].start != node.meta.shape[dim]:
            return None
        rest = len(node.meta.shape) - 1 - dim
        (number,) = numbers
        args = (values[0].value, (*(0, 0) * rest, *sides), number)
        return replace(node, op="aten.constant_pad_nd.default", args=args, kwargs={})

    def _part_of_pieces(self, node: Node) -> bool | None:
        """A slice of what scatters made that holds whole pieces."""
        source = node.args[0]
        if not isinstance(source, Ref) or source.name not in self.metas:
            return None
        known, ends = self.joined.get(source.name), _ends(node, self.metas[source.name].shape)
        if ends is not None and ends[3:] == (0, END):
            self.renamed[node.name] = source
            return True
        if known is None or ends is None or known[0] != ends[0]:
            return None
        dim, start, end, first, last = ends
        pieces = self._pieces(source, dim, (start, end), (first, last))
        if not pieces:
            return None
        meta = contiguous_meta(node.meta.shape, node.meta.dtype)
        made = self._joined(replace(node, metas=(meta,)), dim, pieces)
        bases = {self.numbers.get(piece.base.name) if piece.base is not None else None for piece in pieces}
        if len(bases) == 1 and None not in bases:
            self.numbers[node.name] = bases.pop() or 0
        if made.bare_op == "clone":
            self.renamed[node.name] = made.args[0]
            if node.name in self.numbers:
                self.numbers[made.args[0].name] = self.numbers[node.name]
        else:
            self.metas[node.name] = meta
            self.nodes.append(made)
        return True


def _row_major(meta: TensorMeta) -> bool:
    """Whether dimensions lie in memory in their order, with or without gaps."""
    steps = [stride for size, stride in zip(meta.shape, meta.strides, strict=True) if size != 1]
    return all(outer >= inner > 0 for outer, inner in pairwise(steps))


def _ends(node: Node, shape: tuple[int, ...]) -> tuple[int, int, int, int, int] | None:
    """(dimension, start, end, start and end as they may be written) of a slice or scatter of ``shape``."""
    if node.bare_op == "select_scatter":
        dim, index = node.args[2] % len(shape), node.args[3]
        start = index % shape[dim]
        return dim, start, start + 1, index, END if index == -1 else index + 1
    at = 2 if node.bare_op == "slice_scatter" else 1
    dim, first, last, step = (*node.args[at:], *(0, None, None, 1)[len(node.args) - at :])[:4]
    if step != 1 or node.kwargs or not all(item is None or type(item) is int for item in (dim, first, last)):
        return None
    dim, first, last = dim % len(shape), first or 0, END if last is None else last
    size = shape[dim]
    start, end = (min(max(item + size if item < 0 else item, 0), size) for item in (first, last))
    return (dim, start, end, first, last) if start < end else None
