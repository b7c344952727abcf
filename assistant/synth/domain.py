"""Iteration domains: how a tile's row and column indices address each operand of a fused region.

A region computes over a shape ``S``; its last ``columns`` dimensions are a tile's columns (what row reductions run
over, or the columns of a matrix product), the others its rows; pointwise regions have rows only. Every operand is
aligned to ``S`` from the right and either varies along a dimension or is broadcast there. Neighbouring dimensions along
which all operands agree are folded into one *group*, so that most kernels need a single row and a single column index;
only what is left needs division and remainder. Sizes and strides are read from the tensors at run time.

The order of ``S``'s dimensions is the region's choice (its *frame*): reduced ones last, channels last where most
operands have them innermost. Left out: negative strides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class Operand:
    """A tensor that a region reads or writes. ``varies`` has one entry per dimension of the region's shape.

    ``axes`` maps those dimensions to the tensor's own axes (negative indices), None where it has none. ``order`` lists
    the tensor's axes from the outermost in memory, where the launcher can make sure of that order, else None.
    ``strided`` operands are addressed by run-time strides, since memory does not follow the region's dimensions.
    """

    value: str
    meta: TensorMeta
    varies: tuple[bool, ...]
    axes: tuple[int | None, ...]
    strided: bool = False
    fixed: bool = False
    order: tuple[int, ...] | None = None
    pieces: tuple[str, ...] = ()
    """Names of tensors that are as long together as this is along the one dimension in which it varies."""

    def framed(self, frame: tuple[int, ...]) -> Operand:
        """The same operand, seen from a region whose dimensions are ``frame`` of the present one's."""
        varies, axes = tuple(self.varies[dim] for dim in frame), tuple(self.axes[dim] for dim in frame)
        return replace(self, varies=varies, axes=axes, strided=not _straight(varies, axes, self.order))

    @property
    def channels_last(self) -> bool:
        """Whether channels are innermost in memory, as ``torch.channels_last`` has it."""
        return self.order is not None and self.order != tuple(range(-len(self.order), 0))


def memory_order(meta: TensorMeta) -> tuple[int, ...] | None:
    """Axes (negative) from the outermost in memory, for row-major and channels-last tensors; None for others."""
    rank = len(meta.shape)
    if meta.contiguous:
        return tuple(range(-rank, 0))
    last = (0, *range(2, rank), 1)
    if rank not in (4, 5):
        return None
    shape, strides = tuple(meta.shape[axis] for axis in last), tuple(meta.strides[axis] for axis in last)
    moved = TensorMeta(shape, meta.dtype, strides)
    return tuple(axis - rank for axis in last) if moved.contiguous else None


def _straight(varies: tuple[bool, ...], axes: tuple[int | None, ...], order: tuple[int, ...] | None) -> bool:
    """Whether memory follows the region's dimensions."""
    if order is None:
        return False
    places = [order.index(axis) for moves, axis in zip(varies, axes, strict=True) if moves and axis is not None]
    return places == sorted(places)


@lru_cache(maxsize=8192)
def align(
    value: str, meta: TensorMeta, shape: tuple[int, ...], *, dropped: int = 0, fixed: bool = False
) -> Operand | None:
    """Align a tensor to ``shape`` from the right, or return None when it does not broadcast to it.

    ``dropped`` trailing dimensions of size 1 are missing in the tensor (a reduction without ``keepdim``). ``fixed``
    tensors (parameters) keep their captured sizes: where such a size is 1 it stays broadcast.
    """
    rank = len(shape)
    if len(meta.shape) + dropped > rank:
        return None
    varies: list[bool] = []
    axes: list[int | None] = []
    for dim in range(rank):
        own = dim - rank + dropped
        if own >= 0 or -own > len(meta.shape):
            varies.append(False)
            axes.append(None)
            continue
        size = meta.shape[own]
        if size not in (1, shape[dim]):
            return None
        varies.append(size != 1 or (shape[dim] == 1 and not fixed))
        axes.append(own)
    order = memory_order(meta)
    strided = not _straight(tuple(varies), tuple(axes), order)
    return Operand(value, meta, tuple(varies), tuple(axes), strided, fixed, order)


def unaligned(value: str, meta: TensorMeta, *, fixed: bool = False) -> Operand:
    """A tensor as it is, for kernels that follow no region's dimensions."""
    rank = len(meta.shape)
    return Operand(value, meta, (True,) * rank, tuple(range(-rank, 0)), False, fixed, memory_order(meta))


@dataclass(frozen=True)
class Group:
    """Folded neighbouring dimensions. ``index`` and ``size`` are the names that the kernel uses."""

    dims: tuple[int, ...]
    index: str
    size: str


@dataclass(frozen=True)
class Domain:
    """The folded iteration space of one region."""

    shape: tuple[int, ...]
    columns: int
    rows: tuple[Group, ...]
    cols: tuple[Group, ...]

    @property
    def n_rows(self) -> int:
        """Captured number of rows."""
        return _product(self.shape[: len(self.shape) - self.columns])

    @property
    def n_cols(self) -> int:
        """Captured number of columns (1 for pointwise regions)."""
        return _product(self.shape[len(self.shape) - self.columns :])


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def fold(shape: tuple[int, ...], columns: int, operands: list[Operand]) -> Domain:
    """Fold ``shape`` into as few row and column groups as the operands allow."""
    edge = len(shape) - columns
    row_dims = _fold_range(range(edge), operands)
    col_dims = _fold_range(range(edge, len(shape)), operands)
    if columns == 0:
        return Domain(shape, columns, _name_groups(row_dims, "axis", "index", "n_elements"), ())
    rows = _name_groups(row_dims, "row", "rows", "n_rows")
    return Domain(shape, columns, rows, _name_groups(col_dims, "col", "cols", "n_cols"))


def _fold_range(dims: range, operands: list[Operand]) -> list[tuple[int, ...]]:
    groups: list[list[int]] = []
    previous: tuple[object, ...] | None = None
    for dim in dims:
        pattern = tuple((item.varies[dim], item.strided and _jump(item, dim)) for item in operands)
        if groups and pattern == previous:
            groups[-1].append(dim)
        else:
            groups.append([dim])
        previous = pattern
    return [tuple(group) for group in groups]


def _jump(item: Operand, dim: int) -> object:
    """Equal for neighbouring dimensions that are also neighbours in a strided operand's memory."""
    axis = item.axes[dim]
    return ("alone", dim) if item.order is None or axis is None else item.order.index(axis) - dim


def _name_groups(dims: list[tuple[int, ...]], one: str, flat: str, total: str) -> tuple[Group, ...]:
    if len(dims) == 1:
        return (Group(dims[0], flat, total),)
    return tuple(Group(group, f"{one}_{index}", f"{one}_size_{index}") for index, group in enumerate(dims))


# --- Kernel text ---------------------------------------------------------------------------------------------


def index_lines(groups: tuple[Group, ...], flat: str) -> list[str]:
    """Statements that split the flat index ``flat`` into the groups' indices (none for a single group)."""
    if len(groups) < 2:
        return []
    lines: list[str] = []
    rest = flat
    for group in reversed(groups[1:]):
        lines.append(f"{group.index} = {rest} % {group.size}")
        rest = f"{rest} // {group.size}"
    lines.append(f"{groups[0].index} = {rest}")
    return lines


def size_arguments(domain: Domain) -> list[str]:
    """Names of the inner group sizes a kernel needs beside ``n_rows`` and ``n_cols``."""
    rows = [group.size for group in domain.rows[1:]]
    return rows + ([group.size for group in domain.cols] if len(domain.cols) > 1 else [])


def stride_arguments(operand: Operand, name: str, domain: Domain) -> list[tuple[str, str]]:
    """Pairs (kernel argument, launcher expression) of the strides of a strided operand."""
    if not operand.strided:
        return []
    groups = [*domain.rows, *domain.cols]
    return [
        (f"stride_{name}_{group.dims[-1]}", f"{name}.stride({operand.axes[group.dims[-1]]})")
        for group in groups
        if operand.varies[group.dims[-1]]
    ]


def offset(
    operand: Operand,
    name: str,
    domain: Domain,
    row: str = "",
    column: str = "",
    steady: frozenset[str] = frozenset(),
) -> str:
    """Offset expression of ``operand``; ``row``, ``column`` are index suffixes (``[:, None]``, ``[None, :]``).

    Indices in ``steady`` are the same for a whole tile and take no suffix.
    """
    terms: list[str] = []
    inner: list[str] = []
    whole_rows = len(domain.cols) > 1 and all(operand.varies[group.dims[-1]] for group in domain.cols)
    for groups, suffix in ((domain.cols, column), (domain.rows, row)):
        if groups is domain.rows and whole_rows:
            inner = ["n_cols"]
        for group in reversed(groups):
            if not operand.varies[group.dims[-1]]:
                continue
            index = group.index if group.index in steady else f"{group.index}{suffix}"
            if operand.strided:
                terms.append(f"{index} * stride_{name}_{group.dims[-1]}")
                continue
            terms.append(" * ".join([index, *inner]))
            inner = [*inner, group.size]
    return " + ".join(reversed(terms))


# --- Launcher text -------------------------------------------------------------------------------------------


def size_text(dim: int, operands: list[Operand], names: dict[str, str]) -> str:
    """Launcher expression for the run-time size of one dimension."""
    sources = [item for item in operands if item.varies[dim] and item.axes[dim] is not None]
    if not sources:
        return "1"
    best = min(sources, key=lambda item: (item.fixed, -sum(item.varies)))
    axis = best.axes[dim]
    assert axis is not None
    if best.pieces:
        axis += len(best.meta.shape)
        return f"({' + '.join(f'{names[piece]}.shape[{axis}]' for piece in best.pieces)})"
    axis = axis + len(best.meta.shape) if axis != -1 else axis
    return f"{names[best.value]}.shape[{axis}]"


def group_size_text(group: Group, operands: list[Operand], names: dict[str, str]) -> str:
    """Launcher expression for the run-time size of a group."""
    sizes = [size_text(dim, operands, names) for dim in group.dims]
    return " * ".join(size for size in sizes if size != "1") or "1"
