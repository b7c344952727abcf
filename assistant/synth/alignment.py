"""How many elements of a product's factors can be loaded at once, and kernels that lay a factor out so that they can.

A load of 16 bytes needs rows that begin at multiples of 16 bytes. Triton knows that of sizes and strides that are
multiples of 16; :func:`units_of` finds those that are multiples of 8, 4 or 2 elements, which kernels are then told.
Rows of odd length have no such loads in any layout: where the arithmetic is worth it (:func:`copies_of`), their factor
is first copied with the inner dimension innermost and its rows padded with zeros (:func:`copy_parts`).

Left out: factors of convolutions over pixels, which stay as they lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from drk.assistant.synth.factors import Factor
from drk.assistant.synth.launcher import call_lines, function_source, kernel_source
from drk.assistant.synth.regions import Region
from drk.gym.graph import ITEM_BYTES

COPY_FROM = 128
"""From so many rows and columns on a copy of a factor is small beside the product,"""
COPY_FLOPS = 2**29
"""which must also be this large: a copy is a launch of its own."""
PADDED_TO = 16
"""Rows of copies are padded to a multiple of this, of which Triton knows."""
_LOAD_BYTES = 16


@dataclass(frozen=True)
class Unit:
    """``members`` (kernel arguments) are multiples of ``elements`` where the launcher's ``values`` are."""

    name: str
    elements: int
    members: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def kernel_lines(self) -> list[str]:
        """Statements that make it known to the compiler."""
        return [f"{member} = {member} // {self.name} * {self.name}" for member in self.members]

    @property
    def option(self) -> str:
        """The launcher's keyword argument."""
        joined = " | ".join(self.values)
        several = f"({joined})" if len(self.values) > 1 else joined
        return f"{self.name}={self.elements} if {several} % {self.elements} == 0 else 1"


def units_of(factors: tuple[Factor, ...], copied: frozenset[str]) -> tuple[Unit, ...]:
    """What a kernel is told for the captured sizes; nothing where Triton knows by itself."""
    left, right = factors[0], factors[1]
    sizes = {
        "INNER": ("n_inner", "n_inner", left.meta.shape[left.inner]),
        "ROWS": ("n_rows", "n_rows", left.meta.shape[left.own]),
        "COLS": ("n_cols", "n_cols", right.meta.shape[right.own]),
    }
    members = {"COLS": [sizes["COLS"]]}
    for factor in factors:
        if factor.name in copied or 1 not in (factor.meta.strides[factor.own], factor.meta.strides[factor.inner]):
            continue
        group, other = ("INNER", factor.own) if factor.inner_last else (_own(factor), factor.inner)
        entries = members.setdefault(group, [])
        entries += [sizes[group], factor.stride(other)]
        for argument, axis in factor.batch:
            if axis is not None:
                entries.append((argument, factor.stride(axis)[1], factor.meta.strides[axis]))
    limit = _LOAD_BYTES // ITEM_BYTES[left.meta.dtype]
    made = (_unit(f"{group}_UNIT", entries, limit) for group, entries in sorted(members.items()))
    return tuple(item for item in made if item is not None)


def _own(factor: Factor) -> str:
    return "ROWS" if factor.left else "COLS"


def _unit(name: str, entries: list[tuple[str, str, int]], limit: int) -> Unit | None:
    sizes = [size for _, _, size in entries]
    elements = math.gcd(limit, *sizes)
    if elements < 2 or all(size % PADDED_TO == 0 for size in sizes):
        return None
    arguments = dict.fromkeys(argument for argument, _, _ in entries)
    values = dict.fromkeys(value for _, value, _ in entries)
    return Unit(name, elements, tuple(arguments), tuple(values))


# --- Copies --------------------------------------------------------------------------------------------------


def copies_of(factors: tuple[Factor, ...]) -> frozenset[str]:
    """Names of the factors whose rows allow no loads of 8 bytes."""
    wide = 8 // ITEM_BYTES[factors[0].meta.dtype]
    found = set()
    for factor in factors:
        along, other = (factor.inner, factor.own) if factor.inner_last else (factor.own, factor.inner)
        meta = factor.meta
        if meta.strides[along] != 1 or math.gcd(wide, meta.strides[other], meta.shape[along]) < wide:
            found.add(factor.name)
    return frozenset(found)


def worth_copying(region: Region, inner: int) -> bool:
    """Whether a copy of a factor is small beside the product, which sums over ``inner``."""
    rows, columns = region.shape[-2], region.shape[-1]
    if not region.products[0].batched:
        rows = math.prod(region.shape[:-1])
    return min(rows, columns) >= COPY_FROM and 2 * math.prod(region.shape) * inner >= COPY_FLOPS


def copy_parts(name: str) -> tuple[str, str]:
    """Kernel and launcher of a copy with the last dimension innermost and padded with zeros, called ``name``."""
    lines = [
        "tiles = tl.cdiv(n_padded, BLOCK)",
        "row_tiles = tl.cdiv(n_rows, BLOCK)",
        "pid = tl.program_id(0)",
        "batch = (pid // (tiles * row_tiles)).to(tl.int64)",
        "rows = (pid // tiles % row_tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "inner = (pid % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)",
        "source_ptr += batch // inner_batches * stride_outer + batch % inner_batches * stride_batch",
        "source_ptrs = source_ptr + rows[:, None] * stride_row + inner[None, :] * stride_inner",
        "row_mask = rows[:, None] < n_rows",
        "values = tl.load(source_ptrs, mask=row_mask & (inner[None, :] < n_inner), other=0.0)",
        "target_ptrs = target_ptr + (batch * n_rows + rows[:, None]) * n_padded + inner[None, :]",
        "tl.store(target_ptrs, values, mask=row_mask & (inner[None, :] < n_padded))",
    ]
    sizes = ["n_rows", "n_inner", "n_padded", "inner_batches"]
    strides = ["stride_outer", "stride_batch", "stride_row", "stride_inner"]
    parameters = ["source_ptr", "target_ptr", *sizes, *strides, "BLOCK: tl.constexpr"]
    doc = ["target[batch, row, inner] = source[batch, row, inner], with zeros up to n_padded"]
    kernel = kernel_source(f"{name}_kernel", parameters, doc, lines)
    launch = [
        "n_rows, n_inner = factor.shape[-2:]",
        f"n_padded = triton.cdiv(n_inner, {PADDED_TO}) * {PADDED_TO}",
        "padded = factor.new_empty((*factor.shape[:-1], n_padded))",
        "source = factor[(None,) * (4 - factor.dim())]",
        "outer_batches, inner_batches = source.shape[:2]",
        "programs = outer_batches * inner_batches * triton.cdiv(n_rows, 64) * triton.cdiv(n_padded, 64)",
        *call_lines(
            f"{name}_kernel",
            "(programs,)",
            ["source", "padded", *sizes, *(f"source.stride({axis})" for axis in range(4))],
            ["BLOCK=64", "num_warps=8"],
        ),
        "return padded",
    ]
    text = "The factor with its last dimension innermost, padded with zeros: rows that load 16 bytes at once."
    return kernel, function_source(name, ["factor"], text, launch, 1)
