"""Gathers: rows of a table that integers pick (``embedding``, ``index_select``, ``index``), read inside of kernels.

A kernel that gathers loads the integers as any operand and the table's row through them, so that what was gathered
never goes through memory. Integers that the graph makes itself are not even loaded: ``arange`` is the index of a row or
column, ``zeros`` and ``full`` are numbers.

An index outside of its table is an error in PyTorch (an assertion on the device, results undefined after it). Kernels
never read there: such rows are zeros. ``padding_idx`` matters to gradients only.

Left out: sparse gradients and several index tensors, which stay torch operators; gathers along other dimensions than
the first, from lists of columns (``gather``), and by indices that a reduction makes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from drk.assistant.synth.domain import Operand, offset
from drk.assistant.synth.expression import FUSIBLE_DTYPES, kind_of
from drk.gym.graph import Graph, Node, Ref, TensorMeta

if TYPE_CHECKING:
    from drk.assistant.synth.body import Body

INDEX_DTYPES = frozenset({"int64", "int32"})
MAX_EXACT = 256
"""All integers up to this one are the same in every type of 16 bits or more."""
OUTSIDE = "Rows of a table at indices outside of it are zeros (PyTorch's are an error)."


@dataclass(frozen=True)
class Gather:
    """One gather: ``node`` is ``table[index]``; with ``wraps`` negative integers count from the end.

    ``whole`` is the node's value aligned to its region, once there is one.
    """

    node: Node
    table: str
    index: str
    wraps: bool = False
    whole: Operand | None = None


@dataclass(frozen=True)
class Position:
    """Integers ``start``, ``start + 1``, ... along one axis (negative) of a value that is the same along the others."""

    axis: int
    start: int = 0


@dataclass(frozen=True)
class Made:
    """Values that a graph makes without inputs: tensors that are one number everywhere, and positions on an axis."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    positions: Mapping[str, Position] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        """Whether kernels know the value ``name`` without reading it."""
        return name in self.numbers or name in self.positions


def gather_of(node: Node, metas: Mapping[str, TensorMeta]) -> Gather | None:
    """Read ``embedding``, ``index_select`` and ``index`` of whole rows as one form, or return None."""
    found = _read(node)
    if found is None or len(node.metas) != 1 or node.metas[0] is None:
        return None
    table, index = metas.get(found.table), metas.get(found.index)
    if table is None or index is None or index.dtype not in INDEX_DTYPES or table.dtype not in FUSIBLE_DTYPES:
        return None
    result = node.metas[0]
    whole = bool(table.shape) and result.shape == index.shape + table.shape[1:] and result.dtype == table.dtype
    return found if whole and result.numel and table.numel else None


def _read(node: Node) -> Gather | None:
    args = node.args
    if node.op == "aten.embedding.default" and not node.kwargs:
        table, index = args[:2]
        sparse = args[4:] and args[4] is not False
        return None if sparse or not _are_refs(table, index) else Gather(node, table.name, index.name)
    if node.op == "aten.index_select.default" and len(args) == 3 and args[1] == 0:
        table, _, index = args
        return Gather(node, table.name, index.name) if _are_refs(table, index) else None
    if node.op == "aten.index.Tensor" and isinstance(args[1], tuple) and args[1]:
        table, (index, *others) = args[0], args[1]
        single = _are_refs(table, index) and all(item is None for item in others)
        return Gather(node, table.name, index.name, wraps=True) if single else None
    return None


def _are_refs(*values: Any) -> bool:
    return all(isinstance(value, Ref) for value in values)


def trailing_dims(gather: Gather, metas: Mapping[str, TensorMeta]) -> int:
    """How many dimensions a row of the table has: those that the index lacks."""
    return len(metas[gather.table].shape) - 1


# --- What the graph makes without inputs ---------------------------------------------------------------------

_TAKE_NUMBERS = frozenset(
    {"add", "sub", "rsub", "mul", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum"}
)
"""Operators that kernels compute of a tensor and a number."""
_FILLED = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}
_FULL = {"full": 1, "full_like": 1, "new_full": 2}
_SAME = frozenset({"expand", "expand_as", "view", "reshape", "unsqueeze", "squeeze", "clone", "contiguous", "alias"})


def made_values(graph: Graph) -> Made:
    """Find what kernels can know without reading it."""
    metas = graph.metas()
    numbers: dict[str, float] = {}
    positions: dict[str, Position] = {}
    for node in graph.nodes:
        meta = metas.get(node.name)
        if meta is None or meta.dtype not in FUSIBLE_DTYPES - {"bool"} or not node.op.startswith("aten."):
            continue
        source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
        same = node.bare_op in _SAME and source in metas and metas[source].dtype == meta.dtype
        number = _filled_with(node, meta.dtype)
        if number is not None:
            numbers[node.name] = number
        elif node.bare_op == "arange" and meta.dtype in INDEX_DTYPES:
            position = _arange(node, meta)
            positions |= {} if position is None else {node.name: position}
        elif same and source in numbers:
            numbers[node.name] = numbers[source]
        elif same and source in positions:
            axis = _moved_axis(node, metas[source], positions[source].axis)
            positions |= {} if axis is None else {node.name: Position(axis, positions[source].start)}
    return Made(numbers, positions)


def _filled_with(node: Node, dtype: str) -> float | None:
    """The number that a tensor is filled with; None where there is none or its type rounds it."""
    place = _FULL.get(node.bare_op, len(node.args))
    number = node.args[place] if place < len(node.args) else _FILLED.get(node.bare_op)
    if not isinstance(number, bool | int | float) or dtype in {"int8", "uint8"}:
        return None
    most = 2**31 - 1 if dtype in INDEX_DTYPES else MAX_EXACT
    whole = math.isinf(number) or (abs(number) <= most and float(number).is_integer())
    return number if whole or (dtype == "float32" and math.isfinite(number)) else None


def _arange(node: Node, meta: TensorMeta) -> Position | None:
    """A walk upwards by one, of at least two steps: a single one is the same at all places, as others would not be."""
    ends = node.args[:3]
    if any(type(end) is not int for end in ends) or meta.numel < 2 or (len(ends) == 3 and ends[2] != 1):
        return None
    start = ends[0] if len(ends) > 1 else 0
    return Position(-1, start) if start >= 0 else None


def _moved_axis(node: Node, before: TensorMeta, axis: int) -> int | None:
    """Where the walked axis is behind a view, counted from the end; None where that is not plain."""
    after = node.meta.shape
    if node.bare_op in {"expand", "expand_as", "clone", "contiguous", "alias"}:
        return axis
    if before.numel != before.shape[axis]:
        return None
    places = [place - len(after) for place, size in enumerate(after) if size != 1]
    return places[0] if len(places) == 1 else None


def known_operands(
    nodes: Sequence[Node], shape: tuple[int, ...], inputs: tuple[Operand, ...], made: Made
) -> tuple[tuple[Operand, ...], dict[str, tuple[Operand, Position]], dict[str, float]]:
    """Part a region's ``inputs`` into what it reads, positions and numbers.

    All are read where the rest would not tell the region's sizes, and numbers where an operator does not take them.
    """
    positions = {
        item.value: (_along(item, made.positions[item.value]), made.positions[item.value])
        for item in inputs
        if item.value in made.positions
    }
    other = {name for node in nodes if node.bare_op not in _TAKE_NUMBERS for name in node.inputs()}
    other |= {name for node in nodes if all(name in made.numbers for name in node.inputs()) for name in node.inputs()}
    numbers = {item.value: made.numbers[item.value] for item in inputs if item.value in made.numbers.keys() - other}
    read = tuple(item for item in inputs if item.value not in positions and item.value not in numbers)
    return (read, positions, numbers) if read and tell_sizes(shape, read) else (inputs, {}, {})


def _along(operand: Operand, position: Position) -> Operand:
    """A position's operand, varying along the walked axis only."""
    return replace(operand, varies=tuple(axis == position.axis for axis in operand.axes))


def tell_sizes(shape: tuple[int, ...], inputs: Sequence[Operand]) -> bool:
    """Whether something that is read has each of the region's dimensions, so that its size is known at run time."""
    return all(size == 1 or any(item.varies[dim] for item in inputs) for dim, size in enumerate(shape))


# --- Kernel text ---------------------------------------------------------------------------------------------


def position_text(body: Body, name: str, kind: str) -> str:
    """Source of a position that is used as ``kind``: the index of the tile's rows or columns."""
    operand, position = body.region.positions[name]
    groups = [(group, "[:, None]") for group in body.domain.rows] + [(group, "[None, :]") for group in body.domain.cols]
    group, suffix = next((group, suffix) for group, suffix in groups if operand.varies[group.dims[-1]])
    text = f"{group.index}{suffix if body.two_dimensional else ''}"
    if kind == "int" and body.metas[name].dtype == "int64":
        text = f"{text}.to(tl.int64)"
    return f"({text} + {position.start})" if position.start else text


def gather_lines(body: Body, gather: Gather) -> list[str]:
    """Statements that load what ``gather`` picks, in its compute type; the table's ends are kept to."""
    name, table = body.names[gather.node.name], body.names[gather.table]
    operand = next(item for item in body.region.inputs if item.value == gather.table)
    assert gather.whole is not None
    kind = kind_of(operand.meta.dtype)
    row, column = ("[:, None]", "[None, :]") if body.two_dimensional else ("", "")
    wide = ".to(tl.int64)" if operand.strided else ""
    inner = offset(operand, table, body.domain, f"{row}{wide}", f"{column}{wide}")
    lines, index, inside = _index_lines(body, gather, operand)
    step = [] if index == "0" else [f"{index} * {table}_stride"]
    terms = [body.pointer(gather.table), *step, *([inner] if inner else [])]
    own = operand if gather.index in body.region.scalars else gather.whole
    masks = [item for item in (body.mask(own), inside) if item]
    mask = f", mask={' & '.join(masks)}, other={'0.0' if kind == 'float' else '0'}" if masks else ""
    cast = ".to(tl.float32)" if kind == "float" else ""
    return [*lines, f"{name} = tl.load({' + '.join(terms)}{mask}){cast}"]


def _index_lines(body: Body, gather: Gather, table: Operand) -> tuple[list[str], str, str]:
    """Statements before the load, the row's text in 64 bits, and the text of the mask that keeps it in the table."""
    count = f"{body.names[gather.table]}_rows"
    if gather.index in body.region.scalars:
        return [], *_number_text(int(body.region.scalars[gather.index]), count, table)
    index, known = body.text(Ref(gather.index), "int"), gather.index in body.region.positions
    loaded = any(item.value == gather.index for item in body.region.inputs)
    if not loaded or body.metas[gather.index].dtype != "int64":
        index = f"{index}.to(tl.int64)"
    row = f"{body.names[gather.node.name]}_row"
    if gather.wraps and not known:
        lines = [f"{row} = tl.where({index} < 0, {index} + {count}, {index})  # negative ones count from the end"]
    elif index.isidentifier():
        lines, row = [], index
    else:
        lines = [f"{row} = {index}"]
    inside = f"({row} < {count})"
    return lines, row, inside if known else f"({row} >= 0) & {inside}"


def _number_text(number: int, count: str, table: Operand) -> tuple[str, str]:
    """The same row everywhere: its text and its mask, which a table of known size does not need."""
    last = table.meta.shape[0] - 1
    certain = table.fixed and -last <= number <= last
    small = certain and table.meta.numel < 2**31
    text = str(number) if small or not number else f"tl.full((), {number}, tl.int64)"
    if number < 0:
        return f"({count} + {text})", "" if certain else f"({count} >= {-number})"
    return text, "" if certain else f"({number} < {count})"


def gather_arguments(body: Body) -> list[tuple[str, str]]:
    """Pairs (kernel argument, launcher expression): how many rows each table has, and how far they are apart."""
    tables = dict.fromkeys(body.names[item.table] for item in body.region.gathers)
    return [
        pair
        for table in tables
        for pair in ((f"{table}_rows", f"{table}.shape[0]"), (f"{table}_stride", f"{table}.stride(0)"))
    ]
