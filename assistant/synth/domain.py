"""Iteration domains: how a tile's row and column indices address each operand of a fused region.

A region computes over a shape ``S``; its last ``columns`` dimensions are a tile's columns (what row reductions run
over, or the columns of a matrix product), the others its rows; pointwise regions have rows only. Every operand is
aligned to ``S`` from the right and either varies along a dimension or is broadcast there. Neighbouring dimensions along
which all operands agree are folded into one *group*, so that most kernels need a single row and a single column index;
only what is left needs division and remainder. Sizes and strides are read from the tensors at run time.

Left out: operands whose dimensions are permuted relative to ``S`` beyond plain strides; negative strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class Operand:
    """A tensor that a region reads or writes. ``varies`` has one entry per dimension of the region's shape.

    ``axes`` maps those dimensions to the tensor's own axes (negative indices), None where it has none. ``strided``
    operands are addressed by run-time strides, others must be contiguous.
    """

    value: str
    meta: TensorMeta
    varies: tuple[bool, ...]
    axes: tuple[int | None, ...]
    strided: bool = False
    fixed: bool = False


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
    return Operand(value, meta, tuple(varies), tuple(axes), strided=not meta.contiguous, fixed=fixed)


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
        pattern = tuple((item.varies[dim], item.strided and dim) for item in operands)
        if groups and pattern == previous:
            groups[-1].append(dim)
        else:
            groups.append([dim])
        previous = pattern
    return [tuple(group) for group in groups]


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


def offset(operand: Operand, name: str, domain: Domain, row: str = "", column: str = "") -> str:
    """Offset expression of ``operand``; ``row``, ``column`` are index suffixes (``[:, None]``, ``[None, :]``)."""
    terms: list[str] = []
    inner: list[str] = []
    whole_rows = len(domain.cols) > 1 and all(operand.varies[group.dims[-1]] for group in domain.cols)
    for groups, suffix in ((domain.cols, column), (domain.rows, row)):
        if groups is domain.rows and whole_rows:
            inner = ["n_cols"]
        for group in reversed(groups):
            if not operand.varies[group.dims[-1]]:
                continue
            index = f"{group.index}{suffix}"
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
    axis = axis + len(best.meta.shape) if axis != -1 else axis
    return f"{names[best.value]}.shape[{axis}]"


def group_size_text(group: Group, operands: list[Operand], names: dict[str, str]) -> str:
    """Launcher expression for the run-time size of a group."""
    sizes = [size_text(dim, operands, names) for dim in group.dims]
    return " * ".join(size for size in sizes if size != "1") or "1"
