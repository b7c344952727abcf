"""Real compilation to a GPU's machine code on a machine without one, from the candidate's own launches.

:func:`compile_for` (or :func:`install` for the rest of the process) makes a driver active that stands for a compile
target: every launch in the candidate's ``forward`` is specialised on its real arguments and compiled to a cubin, all
autotune configurations included, and then does nothing. The :class:`CompileLog` says what was built with which
registers, spills and shared memory, and whether it fits the target; a launch that does not fit raises Triton's
``OutOfResources`` as it would on the device.

Use it together with :func:`drk.gym.runner.remap.device_remap` for the same target, in a process where
``TRITON_INTERPRET`` is unset. Honest limits: outputs are garbage, so host code that looks at values may fail for that
reason alone: once ``log.launches > 0`` a host exception means "unknown", see :meth:`CompileLog.means_unknown`. Nothing
is said about speed, races or results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from drk.gym import triton_adapter, triton_driver
from drk.gym.devices import device_facts
from drk.gym.triton_adapter import ErrorFacts

FAULTS_OF_THE_CANDIDATE = frozenset({"compile", "out_of_resources", "ptxas"})
MAX_CONSTANT_CHARS = 80


@dataclass
class Build:
    """One compiled kernel: a function specialised on types, constants and options."""

    function: Any
    kernel: Any
    launches: int = 0
    grid: tuple[int, ...] | None = None


@dataclass
class CompileLog:
    """What was compiled for ``target``; ``shared_limit_bytes`` is the target's opt-in limit for one block."""

    target: str
    shared_limit_bytes: int
    launches: int = 0
    _builds: dict[int, Build] = field(default_factory=dict)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def note_compile(self, function: Any, kernel: Any) -> None:
        """Remember a compiled kernel; it is kept alive, so that its identity stays its own."""
        self._builds.setdefault(id(kernel), Build(function, kernel))

    def note_launch(self, kernel: Any, grid: tuple[int, ...]) -> None:
        """Count a launch of ``kernel``."""
        self.launches += 1
        build = self._builds.setdefault(id(kernel), Build(getattr(kernel.src, "fn", None), kernel))
        build.launches += 1
        build.grid = grid

    @property
    def compiles(self) -> int:
        """How many kernels were compiled."""
        return len(self._builds)

    def rows(self, owned_files: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
        """Return one JSON-able row for each compiled kernel, in the order of compilation.

        Figures that could not be read are ``None``. ``owned`` says that the source lies in ``owned_files``; ``fits``
        that the shared memory is within the target's limit.
        """
        return [self._row(build, owned_files) for build in self._builds.values()]

    def describe(self, error: BaseException, owned_files: frozenset[str] = frozenset()) -> ErrorFacts:
        """Classify an exception from the candidate; a host error after a launch gets kind ``unknown``."""
        facts = triton_adapter.describe_error(error, owned_files)
        if self.means_unknown(facts.kind):
            return ErrorFacts("unknown", f"after a launch that did nothing: {facts.kind}: {facts.message}", facts.line)
        return facts

    def means_unknown(self, kind: str) -> bool:
        """Say whether an error of ``kind`` now proves nothing, since values seen by the host are garbage."""
        return self.launches > 0 and kind not in FAULTS_OF_THE_CANDIDATE

    def uninstall(self) -> None:
        """Give Triton its own driver back."""
        self._stack.close()

    def _row(self, build: Build, owned_files: frozenset[str]) -> dict[str, Any]:
        metadata = build.kernel.metadata
        shared_bytes = int(metadata.shared)
        return {
            **kernel_figures(build.kernel),
            **function_facts(build.function, owned_files),
            "target": self.target,
            "fits": shared_bytes <= self.shared_limit_bytes,
            "launches": build.launches,
            "grid": list(build.grid) if build.grid is not None else None,
            "constants": _constants(build.kernel),
        }


def kernel_figures(kernel: Any) -> dict[str, Any]:
    """Return name, options and resources of a compiled kernel; registers and spills are read where not yet known."""
    metadata = kernel.metadata
    registers, spill_bytes = getattr(kernel, "n_regs", None), None
    if registers:
        spill_bytes = int(kernel.n_spills) * 4
    else:
        cubin = kernel.asm.get("cubin")
        found = triton_driver.kernel_resources(cubin) if cubin else None
        registers, spill_bytes = (found.registers, found.spill_bytes) if found else (None, None)
    return {
        "name": str(kernel.name),
        "num_warps": int(metadata.num_warps),
        "num_stages": int(metadata.num_stages),
        "num_ctas": int(getattr(metadata, "num_ctas", 1)),
        "shared_bytes": int(metadata.shared),
        "registers": registers,
        "spill_bytes": spill_bytes,
    }


def function_facts(function: Any, owned_files: frozenset[str]) -> dict[str, Any]:
    """Return file, line and identity of the function behind a kernel, and whether its file is owned."""
    if function is None:
        return {"file": None, "line": None, "identity": None, "owned": False}
    file, qualified_name, line = triton_adapter.source_of(function)
    return {
        "file": file,
        "line": line,
        "identity": f"{file}:{line}:{qualified_name}",
        "owned": file in owned_files,
    }


def _constants(kernel: Any) -> dict[str, Any]:
    source = kernel.src
    names = getattr(getattr(source, "fn", None), "arg_names", [])
    constants: dict[str, Any] = {}
    for path, value in getattr(source, "constants", {}).items():
        index = path[0] if isinstance(path, tuple) else path
        name = names[index] if isinstance(index, int) and index < len(names) else str(index)
        plain = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
        constants[name] = plain[:MAX_CONSTANT_CHARS] if isinstance(plain, str) else plain
    return constants


def install(target: str = "sm_90") -> CompileLog:
    """Compile for ``target`` from now on; :meth:`CompileLog.uninstall` ends it.

    Raises:
        DeviceError: the target is unknown.
    """
    facts = device_facts(target)
    log = CompileLog(target=facts.target, shared_limit_bytes=facts.shared_bytes)
    log._stack.enter_context(triton_driver.active_driver(triton_driver.TargetDriver(facts, torch.cuda)))
    log._stack.enter_context(triton_adapter.watch_compiles(log.note_compile))
    log._stack.enter_context(triton_adapter.watch_grids(log.note_launch))
    return log


@contextlib.contextmanager
def compile_for(target: str = "sm_90") -> Iterator[CompileLog]:
    """Compile for ``target`` inside the block. Raises as :func:`install`."""
    log = install(target)
    try:
        yield log
    finally:
        log.uninstall()
