"""Patch points of Triton's interpreter: rewriting of kernels, launches, libdevice (part of ``triton_adapter``).

Triton's interpreter (``TRITON_INTERPRET=1``) runs a kernel once per program in numpy. As released in 3.6 and 3.7 it
computes on the *bits* of bfloat16 operands (see :mod:`drk.gym.triton_operations`), knows no libdevice, patches the
language anew at each call of a device function, fails on constants derived from constexprs, and leaks its own imports
into the kernel's module. :func:`patch_interpreter` mends these and calls an
:class:`~drk.gym.triton_operations.Observer` before each launch.

Left out, and reported as unsupported: inline assembly, ``tl.dot_scaled``, atomics on bfloat16, Gluon. Nothing here
models shared memory, races, alignment or the order of programs.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice as portable_libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as ti

from drk.gym.runner.patching import replace_attribute
from drk.gym.triton_adapter import skip_benchmarks
from drk.gym.triton_operations import Observer, builder_patches, numpy_dtype, reduction_patches, refused

_DOT_PRECISIONS = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")


# --- Rewriting -------------------------------------------------------------------------------------------------


class _KeepConstants(ast.NodeTransformer):
    """Turn assigned values into tensors as Triton does, but leave constants built from constexprs alone.

    ``HALF = BLOCK // 2`` stays a number, as it stays a constexpr in the compiler, when ``HALF`` is assigned once and
    everything in it is a constant.
    """

    def __init__(self, tree: ast.Module) -> None:
        function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
        stores = [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self._once = {name for name in stores if stores.count(name) == 1}
        arguments = [*function.args.args, *function.args.kwonlyargs]
        self._constant = {a.arg for a in arguments if a.annotation and "constexpr" in ast.unparse(a.annotation)}
        self._local = {a.arg for a in arguments} | set(stores)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Wrap the value unless it is a constant."""
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self._once and self._is_constant(node.value):
            self._constant.add(target.id)
            return node
        convert = ast.Attribute(ast.Name("interpreter_semantic", ast.Load()), "to_tensor", ast.Load())
        node.value = ast.Call(convert, [node.value, ast.Constant(False)], [])
        return node

    def _is_constant(self, value: ast.expr) -> bool:
        names = [node for node in ast.walk(value) if isinstance(node, ast.Name)]
        known = (ast.BinOp, ast.UnaryOp, ast.Name, ast.Constant, ast.IfExp, ast.Compare, ast.operator, ast.unaryop)
        plain = all(
            isinstance(n, (*known, ast.cmpop, ast.expr_context, ast.BoolOp, ast.boolop)) for n in ast.walk(value)
        )
        uses = [node for node in names if node.id in self._constant]
        return plain and bool(uses) and all(n.id in self._constant or n.id not in self._local for n in names)


def _transform(self: Any, src: str) -> ast.Module:
    tree: ast.Module = ast.parse(src)
    tree = _KeepConstants(tree).visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, self.def_file_lineno - 1)
    return tree


def _execute(self: Any, tree: ast.Module) -> Any:
    """Define the rewritten function without leaking the interpreter's imports (``np``, ``math``) into its module."""
    scope = self.fn.__globals__
    scope.setdefault("interpreter_semantic", ti.interpreter_semantic)
    if not any(value is tl or value is tl.core for value in list(scope.values())):
        scope["__triton_language__"] = tl
    local: dict[str, Any] = dict(self.kwargs)
    exec(compile(tree, filename=self.filename, mode="exec"), scope, local)
    return local[self.fn.__name__]


# --- Launching -------------------------------------------------------------------------------------------------


class _LanguageScope:
    """Patches ``triton.language`` once per launch, where Triton does it again at each call of a device function."""

    def __init__(self, patch_lang: Callable[[Any], Any]) -> None:
        self._patch_lang = patch_lang
        self._inside = False
        self._scope: Any = None
        self._patched: set[int] = set()

    def patch(self, function: Any) -> Any:
        """Stand in for ``_patch_lang``: the outermost scope restores everything."""
        languages = {id(value) for value in list(function.__globals__.values()) if value is tl or value is tl.core}
        if not self._inside:
            return self._patch_lang(function)
        if self._scope is not None and languages <= self._patched:
            return self._scope
        scope = self._patch_lang(function)
        # As in 3.7; 3.6 converts an array of one element, which numpy no longer does.
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        self._patched |= languages
        if self._scope is None:
            self._scope = scope
        else:
            self._scope._changes.extend(scope._changes)
        return self._scope

    def wrap(self, call: Any) -> Any:
        """Wrap ``GridExecutor.__call__``; numpy's warnings are the GPU's silent infinities."""

        def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside, self._scope, self._patched = True, None, set()
            try:
                with np.errstate(all="ignore"):
                    return call(executor, *args, **kwargs)
            finally:
                self._inside, self._scope = False, None

        return launch


@dataclasses.dataclass(frozen=True)
class InterpretedKernel:
    """What ``kernel.warmup(...)`` returns in place of a compiled kernel; resources are unknown and given as 0."""

    function: Any
    metadata: Any
    n_regs: int = 0
    n_spills: int = 0
    n_max_threads: int = 1024

    def _init_handles(self) -> None:
        """Nothing is loaded."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return functools.partial(self.function.run, grid=grid, warmup=False)


@dataclasses.dataclass(frozen=True)
class InterpretedMetadata:
    """Options of a launch under the names of compiled metadata."""

    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    shared: int = 0


_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas")


def _observed_run(before: Any, observer: Observer) -> Any:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        options = {name: kwargs[name] for name in _LAUNCH_OPTIONS if name in kwargs}
        if warmup:
            return InterpretedKernel(self, InterpretedMetadata(**options))

        def observed_grid(arguments: dict[str, Any]) -> tuple[int, ...]:
            asked = grid(arguments) if callable(grid) else grid
            sizes = tuple(operator.index(size) for size in asked)
            padded = (*sizes, 1, 1, 1)[:3]
            constants = {
                name: value.value if isinstance(value, tl.constexpr) else value for name, value in arguments.items()
            }
            plain = {name: value for name, value in constants.items() if isinstance(value, (bool, int, float, str))}
            observer.before_launch(self.fn, (padded[0], padded[1], padded[2]), plain | options)
            return sizes

        return before(self, *args, grid=observed_grid, warmup=False, **kwargs)

    return run


def _executor_init(before: Any) -> Any:
    """Know a constexpr by its annotation as the compiler does, ``"L.constexpr"`` as a string included."""

    def init(self: Any, fn: Any, arg_names: Any, *args: Any, **kwargs: Any) -> None:
        before(self, fn, arg_names, *args, **kwargs)
        self.constexprs = [name for name in arg_names if "constexpr" in str(fn.__annotations__.get(name))]

    return init


@contextlib.contextmanager
def patch_interpreter(observer: Observer, *, emulate_tf32: bool = False) -> Iterator[None]:
    """Mend the interpreter and report launches to ``observer`` until the block ends.

    With ``emulate_tf32``, float32 operands of a ``tl.dot`` that asks for TF32 (the default) are truncated to it first;
    without, they are taken as they are.
    """
    with contextlib.ExitStack() as stack:
        for name, wrap in builder_patches(observer, emulate_tf32).items():
            before = getattr(ti.InterpreterBuilder, name, None)
            replace_attribute(stack, ti.InterpreterBuilder, name, wrap(before))
        # Triton computes an overflow check in int64 after each integer operation and then drops it, debug being off.
        options = dataclasses.replace(
            ti.interpreter_builder.options, allowed_dot_input_precisions=_DOT_PRECISIONS, sanitize_overflow=False
        )
        replace_attribute(stack, ti.interpreter_builder, "options", options)
        # Its own checks of the formats already fail in the interpreter.
        replace_attribute(stack, type(ti.interpreter_semantic), "dot_scaled", refused("tl.dot_scaled"))
        replace_attribute(stack, ti, "_get_np_dtype", numpy_dtype)
        for owner, name, replacement in reduction_patches():
            replace_attribute(stack, owner, name, replacement)
        replace_attribute(stack, ti.FunctionRewriter, "_transform_ast", _transform)
        replace_attribute(stack, ti.FunctionRewriter, "_compile_and_exec", _execute)
        language = _LanguageScope(ti._patch_lang)
        replace_attribute(stack, ti, "_patch_lang", language.patch)
        replace_attribute(stack, ti.GridExecutor, "__init__", _executor_init(ti.GridExecutor.__init__))
        replace_attribute(stack, ti.GridExecutor, "__call__", language.wrap(ti.GridExecutor.__call__))
        replace_attribute(stack, ti.InterpretedFunction, "run", _observed_run(ti.InterpretedFunction.run, observer))
        _open_libdevice(stack)
        skip_benchmarks(stack)
        yield


def _open_libdevice(stack: contextlib.ExitStack) -> None:
    """Give ``libdevice`` functions the interpreter's semantics, under both import paths."""

    def interpreted(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{**kwargs, "_semantic": ti.interpreter_semantic})

        return call

    for name, function in list(vars(cuda_libdevice).items()):
        if tl.core.is_builtin(function):
            replace_attribute(stack, cuda_libdevice, name, interpreted(function))
            replace_attribute(stack, portable_libdevice, name, vars(cuda_libdevice)[name])
