"""Kernel tables: what offline compilation, the interpreter and the profiler each know, in one list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drk.gym.schema import KernelRow


def merge_kernels(compiled: list[KernelRow], launched: list[Any]) -> list[KernelRow]:
    """Return the compiled rows with launch counts and grids as seen at run time; unknown kernels are appended."""
    rows = [row for row in map(kernel_row, launched) if row is not None]
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
        value = row.get(key)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    grid = row.get("grid")
    return KernelRow(
        name=str(row.get("name", "?"))[:200],
        owned=bool(row.get("owned", True)),
        launches=whole("launches") or 0,
        grid=tuple(int(size) for size in grid[:3]) if isinstance(grid, list) else None,
        time_us=number("time_us"),
        share=number("share"),
        num_warps=whole("num_warps"),
        num_stages=whole("num_stages"),
        registers=whole("registers"),
        spill_bytes=whole("spill_bytes"),
        shared_bytes=whole("shared_bytes"),
    )
