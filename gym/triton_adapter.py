"""Every touch point with Triton's private interfaces: driver, hooks, compiled kernels, errors, interpreter.

Triton promises none of these, so they stand in one place, written against 3.6 and 3.7 and asking for features, never
for versions. Three groups: the driver interface (:class:`TargetDriver`, :func:`active_driver`), hooks
(:func:`watch_compiles`, :func:`watch_launches`, :func:`watch_grids`), facts of kernels (:func:`jit_functions`,
:func:`kernel_resources`, :func:`describe_error`). The interpreter's patch points are in
:mod:`drk.gym.triton_interpreter`, for length only.

Policy lives elsewhere: :mod:`drk.gym.runner.interpreter`, :mod:`drk.gym.runner.stub_driver` and
:mod:`drk.gym.runner.census`. Import this module only in Runners: it imports triton. Nothing here asks Triton for its
default driver, which may initialise CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import compiler as triton_compiler
from triton.compiler.errors import CompilationError
from triton.runtime import driver as driver_slot
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from drk.gym.devices import DeviceFacts, target_arch
from drk.gym.runner.patching import replace_attribute

WARP_SIZE = 32
RESOURCE_TOOL_TIMEOUT_S = 60.0


# --- Driver ----------------------------------------------------------------------------------------------------


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
        import torch

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
    import triton.testing

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


# --- Hooks -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def watch_compiles(callback: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``callback(jit_function, compiled_kernel)`` after each compile (cache hits on disk are compiles too)."""
    before = knobs.runtime.jit_post_compile_hook

    def hook(**facts: Any) -> Any:
        function = facts["fn"].jit_function
        caches = function.device_caches.get(facts["compile"]["device"])
        kernel = caches[0].get(facts["compile"]["key"]) if caches else None
        if kernel is not None:
            callback(function, kernel)
        return before(**facts) if before is not None else None

    knobs.runtime.jit_post_compile_hook = hook
    try:
        yield
    finally:
        knobs.runtime.jit_post_compile_hook = before


@contextlib.contextmanager
def watch_launches(callback: Callable[[int, str], None]) -> Iterator[None]:
    """Call ``callback(function_handle, kernel_name)`` before each launch, Inductor's launches included."""

    def hook(metadata: Any) -> None:
        facts = metadata.data if hasattr(metadata, "data") else {}
        callback(int(facts.get("function") or 0), str(facts.get("name", "")))

    with _hooked("launch_enter_hook", hook):
        yield


@contextlib.contextmanager
def watch_launch_ends(callback: Callable[[], None]) -> Iterator[None]:
    """Call ``callback()`` after each launch was issued."""
    with _hooked("launch_exit_hook", lambda _metadata: callback()):
        yield


@contextlib.contextmanager
def _hooked(name: str, hook: Callable[[Any], None]) -> Iterator[None]:
    chain = getattr(knobs.runtime, name)
    if hasattr(chain, "add"):
        chain.add(hook)
    else:  # one slot in older releases
        setattr(knobs.runtime, name, hook)
    try:
        yield
    finally:
        if hasattr(chain, "remove"):
            chain.remove(hook)
        else:
            setattr(knobs.runtime, name, chain)


@contextlib.contextmanager
def watch_grids(callback: Callable[[Any, tuple[int, ...]], None]) -> Iterator[None]:
    """Call ``callback(compiled_kernel, grid)`` before each launch that goes through Triton's own launcher."""
    before = triton_compiler.CompiledKernel.launch_metadata

    def launch_metadata(self: Any, grid: Any, stream: Any, *args: Any) -> Any:
        callback(self, tuple(operator.index(size) for size in grid))
        return before(self, grid, stream, *args)

    triton_compiler.CompiledKernel.launch_metadata = launch_metadata
    try:
        yield
    finally:
        triton_compiler.CompiledKernel.launch_metadata = before


# --- Kernels ---------------------------------------------------------------------------------------------------


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


def unwrap(kernel: Any) -> Any:
    """Return the object that holds the Python function, below any ``@autotune`` and ``@heuristics``."""
    while isinstance(kernel, (Autotuner, Heuristics)):
        kernel = kernel.fn
    return kernel


def source_of(function: Any) -> tuple[str, str, int]:
    """Return (file, qualified name, first line) of a jitted function."""
    python = unwrap(function).fn
    return python.__code__.co_filename, python.__qualname__, python.__code__.co_firstlineno


def jit_functions(files: frozenset[str]) -> list[Any]:
    """Return the live JIT functions whose source lies in ``files``.

    Found by walking the heap, since Triton's own registry goes by name and a name can be defined twice.
    """
    found = (thing for thing in gc.get_objects() if type(thing) is JITFunction)
    return sorted((f for f in found if f.fn.__code__.co_filename in files), key=source_of)


def reachable(functions: list[Any]) -> set[int]:
    """Return the ids of the JIT functions that ``functions`` call, themselves included (by globals and closures)."""
    seen: dict[int, Any] = {}
    waiting = list(functions)
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen[id(function)] = function
        python = function.fn
        cells = [cell.cell_contents for cell in python.__closure__ or ()]
        named = [python.__globals__.get(name) for name in python.__code__.co_names]
        waiting += [unwrap(value) for value in (*cells, *named) if isinstance(unwrap(value), JITFunction)]
    return set(seen)


def compiled_kernels() -> list[Any]:
    """Return the live compiled kernels."""
    # By type(): isinstance would ask foreign objects for __class__, which some answer with a warning.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), triton_compiler.CompiledKernel)]


# --- Errors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorFacts:
    """What an exception from Triton means; ``line`` is in one of the files asked about, where known."""

    kind: str
    message: str
    line: int | None


def describe_error(error: BaseException, files: frozenset[str] = frozenset()) -> ErrorFacts:
    """Classify ``error``, looking through the interpreter's and the compiler's wrappers.

    Kinds: an exception's own ``kind`` attribute (``unsupported``, ``program_budget``), ``compile``,
    ``out_of_resources``, ``ptxas``, else the class's name.
    """
    chain = [error]
    while chain[-1].__cause__ is not None and chain[-1].__cause__ not in chain:
        chain.append(chain[-1].__cause__)
    stated = next((e for e in chain if isinstance(getattr(e, "kind", None), str)), None)
    if stated is not None:
        return ErrorFacts(str(stated.kind), str(stated), _traceback_line(chain, files))  # type: ignore[attr-defined]
    for kind, classes in _KINDS:
        matches = [e for e in chain if isinstance(e, classes)]
        if matches:
            line = _compile_line(matches, files) or _traceback_line(chain, files)
            return ErrorFacts(kind, str(matches[-1]), line)
    root = next((e for e in reversed(chain) if not isinstance(e, InterpreterError)), chain[-1])
    return ErrorFacts(type(root).__name__, str(root), _traceback_line(chain, files))


_KINDS: tuple[tuple[str, Any], ...] = (
    ("compile", CompilationError),
    ("out_of_resources", OutOfResources),
    ("ptxas", PTXASError),
)


def _compile_line(errors: list[Any], files: frozenset[str]) -> int | None:
    """The node's line counts from ``def``; the function is found by its source text."""
    functions = jit_functions(files)
    for error in reversed(errors):
        node_line = getattr(getattr(error, "node", None), "lineno", None)
        owner = next((f for f in functions if f.src == getattr(error, "src", None)), None)
        if owner is not None and node_line is not None:
            return first_body_line(owner) + int(node_line) - 1
    return None


def first_body_line(function: Any) -> int:
    """Return the line of ``def`` in the file, below the decorators."""
    offset = next((i for i, text in enumerate(function.raw_src) if text.lstrip().startswith("def ")), 0)
    return int(function.starting_line_number) + offset


def _traceback_line(chain: list[BaseException], files: frozenset[str]) -> int | None:
    for error in reversed(chain):
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in files:
                line = trace.tb_lineno
            trace = trace.tb_next
        if line is not None:
            return line
    return None


def skip_benchmarks(stack: contextlib.ExitStack) -> None:
    """Let ``@autotune`` take its first configuration unmeasured, after the author's own pruning."""
    replace_attribute(stack, Autotuner, "_bench", lambda *_args, **_kwargs: [1.0, 1.0, 1.0])


def interpreting() -> bool:
    """Say whether ``@triton.jit`` makes interpreted functions in this process (``TRITON_INTERPRET``)."""
    return bool(knobs.runtime.interpret)


def triton_version() -> str:
    """Return Triton's version for the verdict's environment."""
    return str(triton.__version__)


def warm_cache_key() -> None:
    """Hash the Triton package now (0.4 s), so that forked children inherit the result."""
    key = getattr(triton.runtime.cache, "triton_key", None) or getattr(triton.compiler.compiler, "triton_key", None)
    if callable(key):
        key()
