"""Concatenations in front of reductions: a row kernel loads each piece where it lies, the whole is never written.

A piece is addressed like a table that is picked from (:mod:`drk.assistant.synth.gathers`): along the joined dimension
by the row's or column's own index, less what stands before the piece. Its loads are masked where the index is another
piece's, so that each element is loaded once. How long the joined dimension is, the pieces tell together.

Left out: pieces that the region itself makes, joins in front of elementwise operators alone
(:mod:`drk.assistant.synth.mapped_region` has these), and rows in pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drk.assistant.synth.cat_maps import is_join, join_dim
from drk.assistant.synth.domain import Operand, offset
from drk.assistant.synth.expression import FUSIBLE_DTYPES, kind_of
from drk.assistant.synth.gathers import Gather
from drk.gym.graph import Node, TensorMeta

if TYPE_CHECKING:
    from drk.assistant.synth.body import Body

MAX_PIECES = 8


@dataclass(frozen=True)
class Joined(Gather):
    """A concatenation of ``pieces`` along ``dim``; ``place`` walks that dimension, once there is a region."""

    pieces: tuple[str, ...] = ()
    dim: int = 0
    place: Operand | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """What is loaded where the concatenation is wanted."""
        return self.pieces


def joined_of(node: Node, metas: Mapping[str, TensorMeta]) -> Joined | None:
    """Read a concatenation of tensors of one type, none of them empty, or return None."""
    if node.bare_op not in {"cat", "concat", "concatenate"} or not is_join(node):
        return None
    pieces = tuple(item.name for item in node.args[0])
    found = [metas.get(name) for name in pieces]
    if not 2 <= len(pieces) <= MAX_PIECES or node.meta.dtype not in FUSIBLE_DTYPES - {"bool"}:
        return None
    rank, dim = len(node.meta.shape), join_dim(node)
    if any(m is None or m.dtype != node.meta.dtype or not m.numel or len(m.shape) != rank for m in found):
        return None
    axes = tuple(None if at == dim else at for at in range(rank))
    return Joined(node, "", (), axes, pieces=pieces, dim=dim)


def place_operand(item: Joined, lead: int) -> Operand:
    """What walks the joined dimension alone and tells its size; ``lead`` dimensions stand before the node's own."""
    rank = len(item.axes)
    axes = (*(None,) * lead, *(at - rank if at == item.dim else None for at in range(rank)))
    varies = tuple(axis is not None for axis in axes)
    meta = TensorMeta(item.node.meta.shape, "joined", item.node.meta.strides)
    return Operand(item.node.name, meta, varies, axes, strided=True, pieces=item.pieces)


# --- Kernel text ---------------------------------------------------------------------------------------------


def join_lines(body: Body, item: Joined) -> list[str]:
    """Statements that load each piece where it lies and choose between them."""
    name, whole, place = body.names[item.node.name], item.whole, item.place
    assert whole is not None and place is not None
    row, column = body.suffixes
    groups = [(group, row) for group in body.domain.rows] + [(group, column) for group in body.domain.cols]
    at = next(f"{group.index}{suffix}" for group, suffix in groups if place.varies[group.dims[-1]])
    kind, mask = kind_of(item.node.meta.dtype), body.mask(whole)
    other, cast = ("0.0", ".to(tl.float32)") if kind == "float" else ("0", "")
    lines: list[str] = []
    last = len(item.pieces) - 1
    for number, piece in enumerate(item.pieces):
        operand = next(one for one in body.region.inputs if one.value == piece)
        inner = offset(operand, body.names[piece], body.domain, f"{row}.to(tl.int64)", f"{column}.to(tl.int64)")
        tests = [f"({at} >= {name}_end_{number - 1})"] if number else []
        tests += [f"({at} < {name}_end_{number})"] if number < last else []
        lines.append(f"{name}_has_{number} = {' & '.join(tests)}")
        index = f"({at} - {name}_end_{number - 1})" if number else at
        terms = [body.pointer(piece), f"{index}.to(tl.int64) * {body.names[piece]}_stride_of_{item.dim}"]
        masks = [*([mask] if mask else []), f"{name}_has_{number}"]
        address = " + ".join([*terms, *([inner] if inner else [])])
        lines.append(f"{name}_piece_{number} = tl.load({address}, mask={' & '.join(masks)}, other={other}){cast}")
    text = f"{name}_piece_{last}"
    for number in reversed(range(last)):
        text = f"tl.where({name}_has_{number}, {name}_piece_{number}, {text})"
    return [*lines, f"{name} = {text}"]


def join_arguments(body: Body, item: Joined) -> dict[str, str]:
    """Launcher expressions by kernel argument: where pieces end, and how far their neighbours are apart."""
    name, dim = body.names[item.node.name], item.dim
    pieces = [body.names[piece] for piece in item.pieces]
    sizes = [f"{piece}.shape[{dim}]" for piece in pieces]
    ends = {f"{name}_end_{number}": " + ".join(sizes[: number + 1]) for number in range(len(sizes) - 1)}
    return ends | {f"{piece}_stride_of_{dim}": f"{piece}.stride({dim})" for piece in pieces}
