"""Operations of Triton's interpreter on narrow formats, dots and reductions (part of ``triton_adapter``).

As released in 3.6 and 3.7 the interpreter keeps bfloat16 and float8 as ``uint16`` and ``uint8`` and computes on those
bits: sums, products, comparisons, dots and integer conversions of such operands are silent garbage, and conversions
from float32 truncate. :func:`builder_patches` gives the methods of its builder that compute on values and round to
nearest even; :func:`reduction_patches` replaces its element-by-element loops for combine functions
of the author's own by log2(n) calls on slices.

What cannot be done raises :class:`InterpreterUnsupported`, so that it is never taken for the kernel's fault. The order
of additions inside a dot or a sum is numpy's, not the hardware's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as ti

from drk.gym.runner import libdevice, numerics


class InterpreterUnsupported(NotImplementedError):
    """The kernel uses something that the interpreter cannot do: says nothing about the kernel."""

    kind = "unsupported"


class MissingOperation(InterpreterUnsupported, AttributeError):
    """An operation of a newer Triton for which the interpreter has no method."""


class Observer(Protocol):
    """What wants to know of launches and dots."""

    def before_launch(self, function: Callable[..., Any], grid: tuple[int, int, int], meta: dict[str, Any]) -> None:
        """Called with the kernel's Python function; raising here stops the launch."""

    def saw_dot(self, operand: str, precision: str) -> None:
        """Called for each ``tl.dot`` with the operands' type (``fp32``) and the precision asked for (``TF32``)."""


# --- Values ----------------------------------------------------------------------------------------------------


_NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "int1": np.dtype(np.bool_),
        "fp16": np.dtype(np.float16),
        "fp32": np.dtype(np.float32),
        "fp64": np.dtype(np.float64),
        "bf16": np.dtype(np.uint16),
        **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
        **{f"fp8{kind}": np.dtype(np.uint8) for kind in ("e5", "e5b16", "e4nv", "e4b8", "e4b15")},
    }
)


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the numpy type that holds a Triton type's bits; Triton's own function builds its table at each call."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _NUMPY_DTYPES[scalar.name]


def _format(handle: Any) -> str | None:
    name = str(handle.dtype.scalar.name)
    return name if name in numerics.NARROW_FORMATS else None


def _values(handle: Any) -> Any:
    name = _format(handle)
    return handle.data if name is None else numerics.widen(handle.data, name)


def _handle(values: Any, dtype: Any) -> Any:
    """Put numpy values into a handle of the scalar type ``dtype``, rounding where that type is narrower."""
    dtype = dtype.scalar
    if values.dtype == np.bool_ and dtype.name in numerics.NARROW_FORMATS:
        return ti.TensorHandle(values, tl.int1)
    if dtype.name in numerics.NARROW_FORMATS:
        return ti.TensorHandle(numerics.narrow(values, dtype.name), dtype)
    return ti.TensorHandle(values, dtype)


def _binary(before: Any) -> Any:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if _format(lhs) is None and _format(rhs) is None:
            return before(self, lhs, rhs, op)
        return _handle(op(_values(lhs), _values(rhs)), lhs.dtype)

    return binary_op


def _unary(before: Any) -> Any:
    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        return before(self, arg, op) if _format(arg) is None else _handle(op(_values(arg)), arg.dtype)

    return unary_op


def _ternary(before: Any) -> Any:
    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or _format(other) is None:
            return before(self, lhs, rhs, other, op)
        return _handle(op(_values(lhs), _values(rhs), _values(other)), other.dtype)

    return ternary_op


def _fma(_before: Any) -> Any:
    return lambda _self, x, y, z: _handle(_values(x) * _values(y) + _values(z), z.dtype)


def _erf(_before: Any) -> Any:
    def create_erf(self: Any, arg: Any) -> Any:  # noqa: ARG001
        return ti.TensorHandle(libdevice.call("__nv_erf", [arg.data], arg.data.dtype), arg.dtype.scalar)

    return create_erf


def _cast(before: Any) -> Any:
    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        narrow = dst_type.scalar.name in numerics.NARROW_FORMATS
        if _format(src) is None and not narrow:
            return before(self, src, dst_type)
        values = _values(src)
        return _handle(values if narrow else values.astype(numpy_dtype(dst_type)), dst_type)

    return cast_impl


def _float_cast(before: Any) -> Any:
    nearest = (None, ti._ir.ROUNDING_MODE.RTNE)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        known = {src.dtype.scalar.name, dst_type.scalar.name} <= {*numerics.NARROW_FORMATS, "fp16", "fp32", "fp64"}
        if rounding_mode in nearest and known:
            return self.cast_impl(src, dst_type)
        return before(self, src, dst_type, rounding_mode)

    return create_fp_to_fp


def _dot(observer: Observer, emulate_tf32: bool) -> Callable[[Any], Any]:
    def operand(handle: Any, precision: str) -> Any:
        values = _values(handle)
        if values.dtype == np.float16:
            return values.astype(np.float32)
        if values.dtype.kind in "iub":
            return values.astype(np.float64)  # exact below 2**53, and by BLAS
        if emulate_tf32 and precision == "TF32" and values.dtype == np.float32:
            return numerics.truncate_to_tf32(values)
        return values

    def wrap(_before: Any) -> Any:
        def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:  # noqa: ARG001
            precision = str(getattr(input_precision, "name", input_precision))
            observer.saw_dot(str(a.dtype.scalar.name), precision)
            product = np.matmul(operand(a, precision), operand(b, precision))
            kind = _values(d).dtype
            return _handle(product.astype(kind, copy=False) + _values(d), d.dtype)

        return create_dot

    return wrap


def refused(what: str) -> Callable[..., Any]:
    """Return a function that raises :class:`InterpreterUnsupported` for ``what``."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise InterpreterUnsupported(f"{what} is not supported by Triton's interpreter")

    return refuse


def _atomic(before: Any) -> Any:
    def create_atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if _format(val) is not None:
            raise InterpreterUnsupported(f"an atomic on {val.dtype.scalar} is not supported by Triton's interpreter")
        return before(self, op, ptr, val, mask, sem, scope)

    return create_atomic_rmw


def _extern(_before: Any) -> Any:
    def create_extern(_self: Any, _lib: Any, _path: Any, symbol: str, args: Any, ret_type: Any, _pure: Any) -> Any:
        if libdevice.find(symbol) is None:
            raise InterpreterUnsupported(f"{symbol} is not supported by Triton's interpreter")
        arrays = [_values(arg) for arg in args]
        result = libdevice.call(symbol, arrays, numpy_dtype(ret_type.scalar))
        return ti.TensorHandle(result, ret_type.scalar)

    return create_extern


def _missing(_self: Any, name: str) -> Any:
    if name.startswith(("create_", "get_")):
        raise MissingOperation(f"{name} is not supported by Triton's interpreter")
    raise AttributeError(name)


def builder_patches(observer: Observer, emulate_tf32: bool) -> dict[str, Callable[[Any], Any]]:
    """Return, for each method of ``InterpreterBuilder`` to replace, a function from the old method to the new one."""
    return {
        "binary_op": _binary,
        "unary_op": _unary,
        "ternary_op": _ternary,
        "create_fma": _fma,
        "create_erf": _erf,
        "cast_impl": _cast,
        "create_fp_to_fp": _float_cast,
        "create_dot": _dot(observer, emulate_tf32),
        "create_inline_asm": lambda _before: refused("inline assembly"),
        "create_extern_elementwise": _extern,
        "create_atomic_rmw": _atomic,
        "get_bf16": lambda _before: lambda _self, value: _handle(np.array([value], dtype=np.float32), tl.bfloat16),
        "__getattr__": lambda _before: _missing,
    }


# --- Reductions ------------------------------------------------------------------------------------------------


def _combine(interface: Any, left: list[Any], right: list[Any], types: list[Any]) -> list[Any]:
    """Apply the combine function to whole slices; it is elementwise and associative by Triton's contract."""
    wrap = [interface.to_tensor(data, dtype) for data, dtype in zip((*left, *right), types * 2, strict=True)]
    result = interface.combine_fn.fn(*wrap)
    result = result if isinstance(result, tuple) else (result,)
    return [
        np.broadcast_to(_as_type(part, dtype), data.shape)
        for part, data, dtype in zip(result, left, types, strict=True)
    ]


def _as_type(part: Any, dtype: Any) -> Any:
    """Bits of a combined value in the type of the accumulator; ``tl.maximum`` widens bfloat16, for one."""
    values = _values(part.handle) if isinstance(part, tl.core.tensor) else np.asarray(part)
    return (
        numerics.narrow(values, dtype.name)
        if dtype.name in numerics.NARROW_FORMATS
        else values.astype(numpy_dtype(dtype))
    )


def generic_reduce(self: Any, input: Any) -> list[Any]:  # noqa: A002 - Triton's name
    """Reduce neighbours pairwise, in order: log2(n) calls on slices instead of one per element."""
    types = [arg.dtype for arg in input]
    axis = 0 if self.axis is None else self.axis
    data = [arg.handle.data.reshape(-1) if self.axis is None else arg.handle.data for arg in input]
    while data[0].shape[axis] > 1:
        size = data[0].shape[axis]
        left = [np.take(part, np.arange(0, size, 2), axis=axis) for part in data]
        right = [np.take(part, np.arange(1, size, 2), axis=axis) for part in data]
        data = _combine(self, left, right, types)
    data = [np.take(part, 0, axis=axis) for part in data]
    if self.keep_dims:
        rank = len(input[0].handle.data.shape)
        data = [part.reshape((1,) * rank) if self.axis is None else np.expand_dims(part, axis) for part in data]
    return [self.to_tensor(part, dtype) for part, dtype in zip(data, types, strict=True)]


def generic_scan(self: Any, input: Any) -> list[Any]:  # noqa: A002 - Triton's name
    """Scan by doubling (Hillis and Steele): log2(n) calls on whole blocks."""
    types = [arg.dtype for arg in input]
    data = [arg.handle.data for arg in input]
    size = data[0].shape[self.axis]
    place = np.arange(size).reshape([-1 if i == self.axis % data[0].ndim else 1 for i in range(data[0].ndim)])
    step = 1
    while step < size:
        shifted = [np.roll(part, step, axis=self.axis) for part in data]
        combined = _combine(self, shifted, data, types)
        data = [np.where(place >= step, new, old) for new, old in zip(combined, data, strict=True)]
        step *= 2
    return [self.to_tensor(part, dtype) for part, dtype in zip(data, types, strict=True)]


def _narrow_sum(before: Any) -> Any:
    """Sum narrow formats pairwise with rounding after each step, as hardware does; others as before."""
    return lambda self, data: generic_reduce(self, (data,))[0] if _format(data.handle) else before(self, data)


def _narrow_scan(before: Any) -> Any:
    """The same for ``cumsum`` and ``cumprod``."""
    return lambda self, data: generic_scan(self, (data,)) if _format(data.handle) else before(self, data)


def _narrow_min_max(before: Any) -> Any:
    """Compare values, not bits; the value found is exact in the narrow format."""

    def min_max(self: Any, data: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        data = data[0] if isinstance(data, tuple) else data
        if _format(data.handle) is None:
            return before(self, data, val_reduce_op, idx_reduce_op)
        kind = data.dtype
        values = tl.core.tensor(
            ti.TensorHandle(_values(data.handle), tl.float32), data.type.with_element_ty(tl.float32)
        )
        found = before(self, values, val_reduce_op, idx_reduce_op)
        value, *index = found if isinstance(found, tuple) else (found,)
        if value.dtype == tl.float32:
            value = tl.core.tensor(_handle(value.handle.data, kind), _with_element(value.type, kind))
        return (value, *index) if index else value

    return min_max


def _with_element(kind: Any, element: Any) -> Any:
    return kind.with_element_ty(element) if kind.is_block() else element


def reduction_patches() -> list[tuple[Any, str, Any]]:
    """Return (owner, name, replacement) for the interpreter's reductions and scans."""
    return [
        (ti.ReduceOps, "generic_reduce", generic_reduce),
        (ti.ScanOps, "generic_scan", generic_scan),
        (ti.ReduceOps, "sum", _narrow_sum(ti.ReduceOps.sum)),
        (ti.ReduceOps, "min_max", _narrow_min_max(ti.ReduceOps.min_max)),
        (ti.ScanOps, "cumsum", _narrow_scan(ti.ScanOps.cumsum)),
        (ti.ScanOps, "cumprod", _narrow_scan(ti.ScanOps.cumprod)),
    ]
