"""Touch points with Triton's private interfaces: hooks, compiled kernels, errors.

Triton promises none of these, so they stand in one place, written against 3.6 and 3.7 and asking for features, never
for versions. Here are hooks (:func:`watch_compiles`, :func:`watch_launches`, :func:`watch_grids`) and facts of kernels
and errors (:func:`jit_functions`, :func:`compiled_kernels`, :func:`describe_error`). For length only, the driver
interface is in :mod:`drk.gym.triton_driver`, and the interpreter's patch points in :mod:`drk.gym.triton_interpreter`
and :mod:`drk.gym.triton_operations`. No other module may touch what Triton keeps private.

Policy lives elsewhere: :mod:`drk.gym.runner.interpreter`, :mod:`drk.gym.runner.stub_driver` and
:mod:`drk.gym.runner.census`. Import this module only in Runners: it imports triton. Nothing here asks Triton for its
default driver, which may initialise CUDA.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.compiler import compiler as triton_compiler
from triton.compiler.errors import CompilationError
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import InterpreterError, OutOfResources, PTXASError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from drk.gym.runner.patching import replace_attribute

MAX_MESSAGE_CHARS = 4000
MAX_CAUSES = 20

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
def silenced_kernels(names: Mapping[int, str], callback: Callable[[str], None]) -> Iterator[None]:
    """Let compiled kernels of the JIT functions with these ids do nothing but call ``callback(name)``.

    It catches what is launched without its JIT function, by ``compiled[grid](...)``.
    """
    before = triton_compiler.CompiledKernel.run

    def run(self: Any) -> Any:
        name = names.get(id(getattr(self.src, "fn", None)))
        return before.fget(self) if name is None else lambda *_args: callback(name)

    triton_compiler.CompiledKernel.run = property(run)
    try:
        yield
    finally:
        triton_compiler.CompiledKernel.run = before


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


def launchables(files: frozenset[str]) -> list[Any]:
    """Return the live functions from ``files`` that can be launched here, compiled or interpreted."""
    kinds = (JITFunction, InterpretedFunction)
    return [thing for thing in gc.get_objects() if type(thing) in kinds and thing.fn.__code__.co_filename in files]


def names_of_their_own(files: frozenset[str]) -> set[str]:
    """Return the names of the functions from ``files`` that can be launched, but for those that Inductor's bear too.

    ``torch.compile`` names its kernels by what they do, and anybody can name theirs so.
    """
    own, compiled = set[str](), set[str]()
    for thing in gc.get_objects():
        if type(thing) in (JITFunction, InterpretedFunction):
            name, module = str(getattr(thing.fn, "__name__", "")), str(getattr(thing.fn, "__module__", ""))
            if thing.fn.__code__.co_filename in files:
                own.add(name)
            elif module.startswith("torch."):
                compiled.add(name)
    return own - compiled


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
    # By identity, and not for ever: what a cause is and equals may be the author's invention.
    while (cause := chain[-1].__cause__) is not None and all(cause is not e for e in chain) and len(chain) < MAX_CAUSES:
        chain.append(cause)
    stated = next((e for e in chain if _states_kind(e)), None)
    if stated is not None:
        return ErrorFacts(str(stated.kind), str(stated), _traceback_line(chain, files))  # type: ignore[attr-defined]
    for kind, classes in _KINDS:
        matches = [e for e in chain if isinstance(e, classes)]
        if matches:
            line = _compile_line(matches, files) or _traceback_line(chain, files)
            return ErrorFacts(kind, _brief(str(matches[-1])), line)
    failed_pass = next((e for e in chain if isinstance(e, RuntimeError) and "PassManager" in str(e)), None)
    if failed_pass is not None:
        return ErrorFacts("compile", str(failed_pass), _traceback_line(chain, files))
    root = next((e for e in reversed(chain) if not isinstance(e, InterpreterError)), chain[-1])
    return ErrorFacts(type(root).__name__, str(root), _traceback_line(chain, files))


def _states_kind(error: BaseException) -> bool:
    """Whether the error is this package's own, raised by its code: who names a limit of ours has not met it."""
    if not (type(error).__module__.startswith("drk.gym.") and isinstance(getattr(type(error), "kind", None), str)):
        return False
    file, trace = __file__, error.__traceback__
    while trace is not None:
        file, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return Path(file).is_relative_to(Path(__file__).parent)


_KINDS: tuple[tuple[str, Any], ...] = (
    ("compile", CompilationError),
    ("out_of_resources", OutOfResources),
    ("ptxas", PTXASError),
)


def _brief(message: str) -> str:
    """Keep what ptxas complained of, without its command line and the program; cut anything else that is long."""
    complaints = [line for line in message.splitlines() if line.startswith("ptxas ") and "error" in line]
    return "\n".join(complaints)[:MAX_MESSAGE_CHARS] if complaints else message[:MAX_MESSAGE_CHARS]


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


def driver_cache_files() -> dict[str, bytes]:
    """Compile Triton's C helper for CUDA once, and return it as files of a Triton cache: path below it, content.

    Each process with a cache of its own would else call the C compiler at its first launch (some 0.4 s). Nothing is
    returned where there is no CUDA driver or no compiler: the first launch then says what is missing.
    """
    try:
        from triton.backends.nvidia.driver import CudaUtils
    except ImportError:
        return {}
    with tempfile.TemporaryDirectory(prefix="drk-triton-") as folder, environment_value("TRITON_CACHE_DIR", folder):
        try:
            CudaUtils()
        except (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError):
            return {}
        found = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".lock"]
        return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@contextlib.contextmanager
def environment_value(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the length of a block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
