"""Narrow floating-point formats as raw bits in numpy: bfloat16, float8, TF32 truncation.

Numpy has no bfloat16 or float8, so Triton's interpreter keeps them as ``uint16`` and ``uint8`` and computes on the bits
as if they were integers. :func:`widen` turns the bits into float32 values, :func:`narrow` rounds values back to nearest
even as the hardware's conversions do. Float8 goes through torch's conversions and saturates (PTX ``cvt.rn.satfinite``).

Left out: float8 formats of other vendors and ``float8e4b15``, stochastic rounding. Intermediate results are float32,
so a chain of operations is rounded after each one, as separate instructions are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_FLOAT8 = {"fp8e4nv": (torch.float8_e4m3fn, 448.0), "fp8e5": (torch.float8_e5m2, 57344.0)}
NARROW_FORMATS = frozenset({"bf16", *_FLOAT8})
"""Triton's names of the formats that are stored as bits."""

_BF16_QUIET_NAN = np.uint16(0x7FC0)


def widen(bits: Array, name: str) -> Array:
    """Return the float32 values of ``bits`` (uint16 or uint8) in the format ``name``."""
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    kind, _ = _FLOAT8[name]
    raw = torch.from_numpy(np.ascontiguousarray(bits))
    values: Array = raw.view(kind).to(torch.float32).numpy()
    return values


def narrow(values: Array, name: str) -> Array:
    """Return ``values`` rounded to nearest even as bits (uint16 or uint8) of the format ``name``."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if name == "bf16":
        bits = values.view(np.uint32)
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
        lost = np.isnan(values)
        return np.where(lost, _BF16_QUIET_NAN, rounded) if lost.any() else rounded
    kind, limit = _FLOAT8[name]
    # clip lets NaN through; infinities saturate with the rest.
    clipped = torch.from_numpy(np.clip(values, -limit, limit))
    raw: Array = clipped.to(kind).view(torch.uint8).numpy()
    return raw


def truncate_to_tf32(values: Array) -> Array:
    """Return float32 ``values`` with the 13 low bits of the mantissa cleared.

    Triton hands float32 operands to the tensor cores as they are, and these ignore the low bits. That this is
    truncation shows in the error of a large product on an H200: 7.8e-4 relative, where rounding to nearest, as cuBLAS
    does first, gives 2.9e-4. NaN stays NaN unless its payload is in those bits only.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    truncated: Array = (bits & np.uint32(0xFFFFE000)).view(np.float32)
    return truncated
