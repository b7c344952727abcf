"""Gathers: what integers pick from a table (``embedding``, ``index_select``, ``index``, ``gather``), read in kernels.

A kernel that gathers loads the integers as any operand and the table's element through them, so that what was gathered
never goes through memory. Integers may pick along any dimension, and along neighbouring ones together
(``x[rows, columns]``). Integers that the graph makes itself are not even loaded: ``arange`` is the index of a row or
column, ``zeros`` and ``full`` are numbers.

An index outside of its table is an error in PyTorch (an assertion on the device, results undefined after it). Kernels
never read there: such rows are zeros. ``padding_idx`` matters to gradients only.

Left out: sparse gradients, indices of dimensions that are no neighbours, and ``gather`` from a part of the table along
its other dimensions, which stay torch operators; indices that a reduction makes.
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
class Pick:
    """Integers that pick along one axis of a table; with ``wraps`` negative ones count from the end.

    Their dimensions are those of the result but for the last ``trailing`` ones.
    """

    index: str
    axis: int = 0
    trailing: int = 0
    wraps: bool = False


@dataclass(frozen=True)
class Gather:
    """One gather: ``node`` is the table at ``picks``; ``axes`` are the table's for each dimension of the result.

    They are None where the result walks along integers. ``whole`` is the node's value aligned to its region, once there
    is one.
    """

    node: Node
    table: str
    picks: tuple[Pick, ...]
    axes: tuple[int | None, ...]
    whole: Operand | None = None

    @property
    def tables(self) -> tuple[str, ...]:
        """What is loaded where the gather is wanted, in place of beforehand."""
        return (self.table,)

    @property
    def of_rows(self) -> bool:
        """Whether whole rows of the table are picked, which lie in the result's last dimensions."""
        return len(self.picks) == 1 and not self.picks[0].axis and None not in self.axes[len(self.axes) - self.behind :]

    @property
    def behind(self) -> int:
        """How many dimensions of the table lie behind those that integers pick along."""
        return sum(axis is not None and axis > self.picks[-1].axis for axis in self.axes)


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
    filled: frozenset[str] = frozenset()
    """Tensors of one number that are no views of others."""

    def __contains__(self, name: str) -> bool:
        """Whether kernels know the value ``name`` without reading it."""
        return name in self.numbers or name in self.positions


def gather_of(node: Node, metas: Mapping[str, TensorMeta]) -> Gather | None:
    """Read ``embedding``, ``index_select``, ``index`` and ``gather`` as one form, or return None."""
    found = _read(node)
    if found is None or len(node.metas) != 1 or node.metas[0] is None:
        return None
    table, indices = metas.get(found[0]), [metas.get(name) for name in found[2]]
    result = node.metas[0]
    if table is None or not table.shape or table.dtype not in FUSIBLE_DTYPES or result.dtype != table.dtype:
        return None
    if not result.numel or not table.numel or any(meta is None or meta.dtype not in INDEX_DTYPES for meta in indices):
        return None
    shapes = [meta.shape for meta in indices if meta is not None]
    name, axis, names, wraps = found
    axis, rank = axis % len(table.shape), len(table.shape)
    if node.bare_op in _ELEMENTWISE:
        (shape,) = shapes
        fits = len(shape) == rank and all(shape[at] == table.shape[at] for at in range(rank) if at != axis)
        axes = tuple(None if at == axis else at for at in range(rank))
        return Gather(node, name, (Pick(names[0], axis),), axes) if fits and result.shape == shape else None
    picked = _broadcast(shapes)
    after = axis + len(names)
    if picked is None or after > rank or result.shape != table.shape[:axis] + picked + table.shape[after:]:
        return None
    axes = (*range(axis), *(None for _ in picked), *range(after, rank))
    picks = tuple(Pick(item, axis + place, rank - after, wraps) for place, item in enumerate(names))
    return Gather(node, name, picks, axes)


_ELEMENTWISE = frozenset({"gather", "take_along_dim"})
"""Operators that pick one element for each integer, all in the integers' own dimensions."""


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape that ``shapes`` broadcast to, or None."""
    rank = max(len(shape) for shape in shapes)
    sizes = [{*column} - {1} for column in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True)]
    return None if any(len(found) > 1 for found in sizes) else tuple(next(iter(found), 1) for found in sizes)


def _read(node: Node) -> tuple[str, int, tuple[str, ...], bool] | None:
    """Table, first axis, integers for it and those behind it, and whether negative ones count from the end."""
    args = node.args
    if node.op == "aten.embedding.default" and not node.kwargs:
        table, index = args[:2]
        sparse = args[4:] and args[4] is not False
        return None if sparse or not _are_refs(table, index) else (table.name, 0, (index.name,), False)
    if node.op == "aten.index_select.default" and len(args) == 3 and type(args[1]) is int:
        table, axis, index = args
        return (table.name, axis, (index.name,), False) if _are_refs(table, index) else None
    if node.op == "aten.gather.default" and not node.kwargs and len(args) >= 3 and type(args[1]) is int:
        table, axis, index = args[:3]
        return (table.name, axis, (index.name,), False) if _are_refs(table, index) else None
    if node.op == "aten.take_along_dim.default" and len(args) == 3 and type(args[2]) is int:
        table, index, axis = args
        return (table.name, axis, (index.name,), False) if _are_refs(table, index) else None
    if node.op == "aten.index.Tensor" and isinstance(args[0], Ref) and isinstance(args[1], tuple):
        places = [place for place, item in enumerate(args[1]) if item is not None]
        together = bool(places) and places == list(range(places[0], places[0] + len(places)))
        if together and _are_refs(*(args[1][place] for place in places)):
            return args[0].name, places[0], tuple(args[1][place].name for place in places), True
    return None


def _are_refs(*values: Any) -> bool:
    return all(isinstance(value, Ref) for value in values)


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
    filled: set[str] = set()
    for node in graph.nodes:
        meta = metas.get(node.name)
        if meta is None or meta.dtype not in FUSIBLE_DTYPES - {"bool"} or not node.op.startswith("aten."):
            continue
        source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
        same = node.bare_op in _SAME and source in metas and metas[source].dtype == meta.dtype
        number = _filled_with(node, meta.dtype)
        if number is not None:
            numbers[node.name] = number
            filled.add(node.name)
        elif node.bare_op == "arange" and meta.dtype in INDEX_DTYPES:
            position = _arange(node, meta)
            positions |= {} if position is None else {node.name: position}
        elif same and source in numbers:
            numbers[node.name] = numbers[source]
        elif same and source in positions:
            axis = _moved_axis(node, metas[source], positions[source].axis)
            positions |= {} if axis is None else {node.name: Position(axis, positions[source].start)}
    return Made(numbers, positions, frozenset(filled))


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
    lines: list[str] = []
    terms, masks = [body.pointer(gather.table)], list[str]()
    for pick in gather.picks:
        statements, index, inside = _index_lines(body, gather, pick, operand)
        lines += statements
        terms += [] if index == "0" else [f"{index} * {_step_name(table, pick)}"]
        masks += [inside] if inside else []
    terms += [inner] if inner else []
    fixed = all(pick.index in body.region.scalars for pick in gather.picks)
    own = body.mask(operand if fixed else gather.whole)
    masks = [own, *masks] if own else masks
    mask = f", mask={' & '.join(masks)}, other={'0.0' if kind == 'float' else '0'}" if masks else ""
    cast = ".to(tl.float32)" if kind == "float" else ""
    return [*lines, f"{name} = tl.load({' + '.join(terms)}{mask}){cast}"]


def _step_name(table: str, pick: Pick) -> str:
    """Kernel argument: how far apart neighbours along the picked axis are."""
    return f"{table}_stride_of_{pick.axis}" if pick.axis else f"{table}_stride"


def _count_name(table: str, pick: Pick) -> str:
    """Kernel argument: the size of the picked axis."""
    return f"{table}_size_of_{pick.axis}" if pick.axis else f"{table}_rows"


def _index_lines(body: Body, gather: Gather, pick: Pick, table: Operand) -> tuple[list[str], str, str]:
    """Statements before the load, the row's text in 64 bits, and the text of the mask that keeps it in the table."""
    count = _count_name(body.names[gather.table], pick)
    if pick.index in body.region.scalars:
        return [], *_number_text(int(body.region.scalars[pick.index]), count, pick, table)
    index, known = body.text(Ref(pick.index), "int"), pick.index in body.region.positions
    loaded = any(item.value == pick.index for item in body.region.inputs)
    if not loaded or body.metas[pick.index].dtype != "int64":
        index = f"{index}.to(tl.int64)"
    row = f"{body.names[gather.node.name]}_row{f'_{pick.axis}' if pick.axis else ''}"
    if pick.wraps and not known:
        lines = [f"{row} = tl.where({index} < 0, {index} + {count}, {index})  # negative ones count from the end"]
    elif index.isidentifier():
        lines, row = [], index
    else:
        lines = [f"{row} = {index}"]
    inside = f"({row} < {count})"
    return lines, row, inside if known else f"({row} >= 0) & {inside}"


def _number_text(number: int, count: str, pick: Pick, table: Operand) -> tuple[str, str]:
    """The same row everywhere: its text and its mask, which a table of known size does not need."""
    last = table.meta.shape[pick.axis] - 1
    certain = table.fixed and -last <= number <= last
    small = certain and table.meta.numel < 2**31
    text = str(number) if small or not number else f"tl.full((), {number}, tl.int64)"
    if number < 0:
        return f"({count} + {text})", "" if certain else f"({count} >= {-number})"
    return text, "" if certain else f"({number} < {count})"


def gather_arguments(body: Body) -> list[tuple[str, str]]:
    """Pairs (kernel argument, launcher expression): sizes of picked axes, and how far neighbours along them are."""
    found: dict[str, str] = {}
    for item in body.region.gathers:
        for pick in item.picks:
            table = body.names[item.table]
            found[_count_name(table, pick)] = f"{table}.shape[{pick.axis}]"
            found[_step_name(table, pick)] = f"{table}.stride({pick.axis})"
    return list(found.items())
