"""Which kernels ran, whose they are, and which were declared but never launched.

:func:`launch_census` installs Triton's hooks for the length of a block (about 11 us a launch, so never around timed
runs) and counts launches by *function handle*. A handle leads to the compiled kernel, the kernel to its Python
function, the function to its source file: that, not the name, says whether a kernel is the candidate's own. Inductor
fires the same hooks; its kernels come from its cache and are not owned.

Evidence, not proof: the hooks live in the candidate's process. Honest limits: replays of a CUDA graph are not seen
(only the launches at capture); launches through Inductor's static launcher have no grid and no resources here; device
time is the profiler's business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from drk.gym import triton_adapter
from drk.gym.runner.stub_driver import function_facts, kernel_figures


@dataclass
class LaunchCount:
    """Launches of one function handle; ``grid`` is the last one seen."""

    name: str
    launches: int = 0
    kernel: Any = None
    grid: tuple[int, ...] | None = None


@dataclass
class LaunchCensus:
    """The running count. ``compiles`` lets a warm-up loop see that nothing was compiled any more."""

    owned_files: frozenset[str]
    compiles: int = 0
    _counts: dict[int, LaunchCount] = field(default_factory=dict)
    _kernels: list[Any] = field(default_factory=list)
    _pending: tuple[Any, tuple[int, ...]] | None = None

    @property
    def launches(self) -> int:
        """All launches so far, owned or not."""
        return sum(count.launches for count in self._counts.values())

    def note_compile(self, _function: Any, kernel: Any) -> None:
        """Count a compile and keep the kernel alive, so that its handle can be resolved later."""
        self.compiles += 1
        self._kernels.append(kernel)

    def note_grid(self, kernel: Any, grid: tuple[int, ...]) -> None:
        """Remember what is about to be launched; its handle is not loaded before the first launch."""
        self._pending = (kernel, grid)

    def note_launch(self, handle: int, name: str) -> None:
        """Count a launch of ``handle``."""
        count = self._counts.setdefault(handle, LaunchCount(name))
        count.launches += 1
        if self._pending is not None:
            kernel, grid = self._pending
            self._pending = None
            if kernel.function == handle:
                count.kernel, count.grid = kernel, grid

    def rows(self) -> list[dict[str, Any]]:
        """Return one JSON-able row for each handle, most launches first; unknown figures are ``None``."""
        known = {kernel.function: kernel for kernel in (*triton_adapter.compiled_kernels(), *self._kernels)}
        rows = [self._row(handle, count, count.kernel or known.get(handle)) for handle, count in self._counts.items()]
        return sorted(rows, key=lambda row: -row["launches"])

    def owned_launches(self) -> int:
        """Launches of kernels whose source is owned."""
        return sum(row["launches"] for row in self.rows() if row["owned"])

    def decoys(self) -> list[dict[str, Any]]:
        """Return owned functions that were declared and neither launched nor compiled into a launched kernel.

        A function that only other kernels call is not a decoy: its source is part of theirs.
        """
        launched = [row["identity"] for row in self.rows()]
        functions = triton_adapter.jit_functions(self.owned_files)
        used = triton_adapter.reachable([f for f in functions if _identity(f) in launched])
        return [
            {"name": function.__name__, **function_facts(function, self.owned_files)}
            for function in functions
            if _identity(function) not in launched and id(function) not in used
        ]

    def _row(self, handle: int, count: LaunchCount, kernel: Any) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": count.name,
            "num_warps": None,
            "num_stages": None,
            "num_ctas": None,
            "shared_bytes": None,
            "registers": None,
            "spill_bytes": None,
        }
        if kernel is not None:
            row |= kernel_figures(kernel)
        function = getattr(getattr(kernel, "src", None), "fn", None)
        return {
            **row,
            **function_facts(function, self.owned_files),
            "handle": handle,
            "launches": count.launches,
            "grid": list(count.grid) if count.grid is not None else None,
        }


def _identity(function: Any) -> str:
    identity: str = function_facts(function, frozenset())["identity"]
    return identity


@contextlib.contextmanager
def launch_census(owned_files: Iterable[str]) -> Iterator[LaunchCensus]:
    """Count launches inside the block; ``owned_files`` are paths as Python's code objects name them.

    The hooks are removed at the end; the census stays readable.
    """
    census = LaunchCensus(frozenset(owned_files))
    with (
        triton_adapter.watch_compiles(census.note_compile),
        triton_adapter.watch_grids(census.note_grid),
        triton_adapter.watch_launches(census.note_launch),
    ):
        yield census
