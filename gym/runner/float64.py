"""Run a module in float64: the truth against which the reference's and a candidate's errors are measured.

The module's parameters and buffers are converted by ``module.double()``. Code inside ``forward`` can still name a
narrower type (``x.float()``, ``torch.zeros(..., dtype=torch.float32)``, ``.to(torch.bfloat16)``, autocast); the
function mode below turns every floating type into float64 and every complex type into complex128, so that rounding
steps that the user's code takes are absent from the truth. Limits: custom C++ or Triton kernels inside the reference
that accept only narrow types fail here, and values that a narrow type would overflow stay finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_NARROWING = {"float", "half", "bfloat16", "double"}
_TYPED_CLASSES = {torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor}


def widened(value: Any) -> Any:
    """Return float64 for a floating dtype, complex128 for a complex one, anything else unchanged."""
    if isinstance(value, torch.dtype):
        if value in _FLOATS:
            return torch.float64
        if value == torch.complex64:
            return torch.complex128
    if isinstance(value, type) and value in _TYPED_CLASSES:
        return torch.DoubleTensor
    return value


class Float64Mode(TorchFunctionMode):
    """Rewrites dtypes in every torch call made under it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with widened types."""
        name = getattr(func, "__name__", "")
        if name in _NARROWING and args and isinstance(args[0], torch.Tensor):
            return args[0].to(torch.float64)
        new_args = tuple(self._widen_argument(value) for value in args)
        new_kwargs = {key: self._widen_argument(value) for key, value in (kwargs or {}).items()}
        return func(*new_args, **new_kwargs)

    @staticmethod
    def _widen_argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float64) if value.dtype in _FLOATS and value.dim() == 0 else value
        return widened(value)


def to_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as float64 (complex128, or unchanged for integers and bools), strides kept."""
    dtype = widened(tensor.dtype)
    if dtype == tensor.dtype:
        return tensor
    return tensor.to(dtype=dtype, memory_format=torch.preserve_format)


@contextmanager
def float64() -> Iterator[None]:
    """Run what is inside in float64, default dtype included; autocast is off."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Mode():
            yield
    finally:
        torch.set_default_dtype(before)
