"""Triton's driver interface for a GPU that is not there, and its active-driver slot (part of ``triton_adapter``).

:class:`TargetDriver` answers for a compile target: Triton then compiles launches for it as it would on the device, and
launches nothing. Used to compile without a GPU (:mod:`drk.gym.runner.stub_driver`) and to answer host code that asks
for SM counts or shared memory under the interpreter. Written against Triton 3.6 and 3.7.

Registers and local memory are read from the real cubin by the ``cuobjdump`` that Triton ships. Left out: TMA descriptor
objects and occupancy queries, which get placeholders.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.testing
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import compiler as triton_compiler
from triton.runtime import driver as driver_slot

from drk.gym.devices import DeviceFacts, target_arch

WARP_SIZE = 32
RESOURCE_TOOL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class KernelResources:
    """Registers per thread and local memory (spills and private arrays) per thread in bytes."""

    registers: int
    spill_bytes: int


def kernel_resources(cubin: bytes) -> KernelResources | None:
    """Read a cubin's resource usage by the bundled ``cuobjdump`` (about 20 ms); ``None`` when that is not possible."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=RESOURCE_TOOL_TIMEOUT_S, check=True
            )
        except (OSError, RuntimeError, subprocess.SubprocessError):
            return None
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", answer.stdout)
    return KernelResources(int(found[1]), max(int(found[2]), int(found[3]))) if found else None


class TargetUtils:
    """The driver's ``utils`` for a device that is not there: properties are known, loading yields made-up handles."""

    def __init__(self, facts: DeviceFacts, resources: Callable[[bytes], KernelResources | None]) -> None:
        self._facts = facts
        self._resources = resources
        self._handles = 0

    def get_device_properties(self, device: int) -> dict[str, int]:  # noqa: ARG002 - the driver's signature
        """Return the properties under the driver's names; clocks are unknown and given as 0."""
        return {
            "max_shared_mem": self._facts.shared_bytes,
            "max_num_regs": 65536,
            "multiprocessor_count": self._facts.sm_count,
            "warpSize": WARP_SIZE,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:  # noqa: ARG002
        """Return (module, function, registers, spills in words, threads) with handles that are never reused."""
        self._handles += 2
        found = self._resources(kernel)
        registers, spill_bytes = (found.registers, found.spill_bytes) if found else (0, 0)
        return self._handles, self._handles + 1, registers, spill_bytes // 4, 1024

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: 1


class TargetLauncher:
    """Launches nothing, but calls the launch hooks as the real launcher does."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.src, self.metadata = src, metadata

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *rest: Any) -> None:  # noqa: ARG002
        """See ``CudaLauncher.__call__``: packed metadata, launch metadata, enter hook, exit hook, arguments."""
        _, launch_metadata, enter, leave, *_ = rest
        for hook in (enter, leave):
            if hook is not None:
                hook(launch_metadata)


class TargetDriver(DriverBase):  # type: ignore[misc]
    """A driver for compile target ``facts.target`` whose launches are no-ops (Triton's ``DriverBase``)."""

    def __init__(self, facts: DeviceFacts, device_interface: Any) -> None:
        super().__init__()
        self.facts = facts
        self.utils = TargetUtils(facts, kernel_resources)
        self.launcher_cls = TargetLauncher
        self._interface = device_interface

    @classmethod
    def is_active(cls) -> bool:
        """Never chosen by default: it is set."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return a placeholder: no launcher is built."""
        return ty

    def get_current_target(self) -> Any:
        """Return the target that is compiled for."""
        return GPUTarget("cuda", target_arch(self.facts.target), WARP_SIZE)

    def get_current_device(self) -> int:
        """Return the one device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is one device."""

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        """Return the default stream."""
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """Return the target's capability."""
        return self.facts.capability

    def get_active_torch_device(self) -> Any:
        """Return ``cuda:0``, which the device re-map understands."""
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        """Return ``torch.cuda`` (stood in for by the device re-map)."""
        return self._interface

    def get_benchmarker(self) -> Callable[..., Any]:
        """Return a benchmark that runs its argument once and calls every configuration equally fast."""
        return run_once

    def get_empty_cache_for_benchmark(self) -> None:
        """There is no cache to flush."""

    def clear_cache(self, cache: Any) -> None:
        """There is no cache to flush."""


def run_once(function: Callable[[], Any], *_args: Any, quantiles: Sequence[float] | None = None, **options: Any) -> Any:
    """Stand in for ``do_bench`` and ``do_bench_cudagraph``: call ``function`` once, answer 1 ms in the form asked."""
    function()
    if quantiles is not None:
        return [1.0] * len(quantiles) if len(quantiles) > 1 else 1.0
    return [1.0] if options.get("return_mode") == "all" else 1.0


@contextlib.contextmanager
def active_driver(driver: Any) -> Iterator[None]:
    """Make ``driver`` Triton's active one, and benchmarks harmless, until the block ends."""
    before, benchmarks = driver_slot._active, (triton.testing.do_bench, triton.testing.do_bench_cudagraph)
    cached_limit = getattr(triton_compiler.max_shared_mem, "cache_clear", lambda: None)
    driver_slot.set_active(driver)
    cached_limit()
    triton.testing.do_bench = triton.testing.do_bench_cudagraph = run_once
    try:
        yield
    finally:
        driver_slot._active = before
        cached_limit()
        triton.testing.do_bench, triton.testing.do_bench_cudagraph = benchmarks
