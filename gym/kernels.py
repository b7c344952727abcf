"""Kernel tables: what offline compilation, the interpreter and the profiler each know, in one list.

Rows about a candidate are the schema's :class:`KernelRow`; a reference's kernels, which nobody is judged by, are
:class:`ReferenceKernel` and say where in the user's code they are launched. Both are read from the JSON of a Runner,
or of a gym server, where anything may stand: what is malformed is left out, and unknown figures are null.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from drk.gym.schema import KernelRow

MAX_ROWS = 1000
MAX_FIGURE = 1e300  # beyond are infinities, and integers that no float holds


@dataclass(frozen=True)
class ReferenceKernel:
    """One kernel at one place of a reference, per call: ``share`` is of the device time of all kernels.

    ``module`` is the path of the innermost part that launched it (empty for the module itself), ``source`` the user's
    line as ``file.py:12``; both are empty where unknown.
    """

    name: str
    launches: int
    time_us: float
    share: float | None = None
    module: str = ""
    source: str = ""


@dataclass(frozen=True)
class ReferenceProfile:
    """The measured kernels of a reference, most time first, and the GPU's name; empty where there is no GPU."""

    gpu: str = ""
    kernels: tuple[ReferenceKernel, ...] = ()


def reference_profile(data: Any) -> ReferenceProfile:
    """Return the profile that ``data`` describes: an object with ``gpu`` and ``kernels``."""
    if not isinstance(data, dict):
        return ReferenceProfile()
    rows = data.get("kernels")
    found = [_reference_kernel(row) for row in rows] if isinstance(rows, list | tuple) else []
    kernels = sorted((row for row in found if row is not None), key=lambda row: -row.time_us)
    return ReferenceProfile(_text(data.get("gpu")), tuple(kernels))


def _reference_kernel(row: Any) -> ReferenceKernel | None:
    if not isinstance(row, dict):
        return None
    time_us, launches = _figure(row.get("time_us")), _figure(row.get("launches"))
    if time_us is None:
        return None
    return ReferenceKernel(
        _text(row.get("name")) or "?",
        max(int(launches or 1), 1),
        time_us,
        _figure(row.get("share")),
        _text(row.get("module")),
        _text(row.get("source")),
    )


def _figure(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_FIGURE
    return float(value) if known else None


def _text(value: Any) -> str:
    """Return ``value`` as one short line of printable characters; it may go into a prompt."""
    return "".join(char for char in str(value or "")[:400] if char.isprintable())[:200]


def kernel_rows(rows: Any) -> list[KernelRow]:
    """Return the kernel rows that ``rows``, from a Runner, describes; at most :data:`MAX_ROWS`."""
    found = map(kernel_row, rows[:MAX_ROWS]) if isinstance(rows, list) else []
    return [row for row in found if row is not None]


def merge_kernels(compiled: list[KernelRow], launched: Any) -> list[KernelRow]:
    """Return the compiled rows with launch counts and grids as seen at run time; unknown kernels are appended."""
    rows = kernel_rows(launched)
    by_name = {row.name: row for row in rows}
    merged = []
    for row in compiled:
        seen = by_name.pop(row.name, None)
        merged.append(replace(row, launches=seen.launches, grid=seen.grid or row.grid) if seen else row)
    return merged + list(by_name.values())


def kernel_row(row: Any) -> KernelRow | None:
    """Return a kernel row from a Runner's JSON, or None when it is malformed."""
    if not isinstance(row, dict):
        return None

    def whole(key: str) -> int | None:
        value = row.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def number(key: str) -> float | None:
        return _figure(row.get(key))

    grid = row.get("grid")
    sizes = grid[:3] if isinstance(grid, list) else None
    if sizes is not None and any(type(size) is not int for size in sizes):
        sizes = None
    return KernelRow(
        name=str(row.get("name", "?"))[:200],
        owned=bool(row.get("owned", True)),
        launches=whole("launches") or 0,
        grid=tuple(sizes) if sizes is not None else None,
        time_us=number("time_us"),
        share=number("share"),
        num_warps=whole("num_warps"),
        num_stages=whole("num_stages"),
        registers=whole("registers"),
        spill_bytes=whole("spill_bytes"),
        shared_bytes=whole("shared_bytes"),
    )
