"""Tensors into and out of the Judge's memory, by name, shape and dtype; runs in Runners and in the Judge.

A *layout* is a list of ``{"name", "shape", "dtype", "offset", "bytes"}``. The data are contiguous, in row-major order;
strides are part of the output's description, not of the transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from drk.gym.arena import aligned, map_read_only, read_exactly, write_exactly
from drk.gym.errors import ProtocolError
from drk.gym.runner.structure import dtype_name

MAX_RANK = 64
DTYPES = frozenset(
    """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
    complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
    """.split()  # noqa: SIM905 - reads better than twenty quoted words
)
"""What may travel: the bytes of a quantised tensor alone crash whoever reads them, of others nothing can be said."""


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype named ``name``.

    Raises:
        ProtocolError: there is no such dtype, or it does not travel.
    """
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{name[:80]!r} is not a dtype")
    return dtype


def plan_layout(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[dict[str, Any]], int]:
    """Return the layout of the named tensors and its total size in bytes."""
    rows: list[dict[str, Any]] = []
    offset = 0
    for name, tensor in named:
        count = tensor.numel() * tensor.element_size()
        rows.append(
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": dtype_name(tensor.dtype),
                "offset": offset,
                "bytes": count,
            }
        )
        offset = aligned(offset + count)
    return rows, offset


def write_tensors(fd: int, named: Iterable[tuple[str, torch.Tensor]], layout: list[dict[str, Any]]) -> None:
    """Write tensors (any device, any strides) to the offsets of ``layout``."""
    for (_name, tensor), row in zip(named, layout, strict=True):
        if row["bytes"]:
            write_exactly(fd, row["offset"], _raw(tensor))


def _raw(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
    return plain.reshape(-1).view(torch.uint8).numpy()


def check_layout(layout: Any, limit_bytes: int) -> int:
    """Validate a layout that a Runner sent; return the bytes it needs.

    Raises:
        ProtocolError: inconsistent sizes, negative numbers, or more than ``limit_bytes``.
    """
    if not isinstance(layout, list):
        raise ProtocolError("a layout is not a list")
    end = 0
    for row in layout:
        try:
            shape, offset, count, dtype = row["shape"], row["offset"], row["bytes"], row["dtype"]
        except (KeyError, TypeError, IndexError) as error:
            raise ProtocolError("a layout row is malformed") from error
        if not isinstance(shape, list) or any(type(size) is not int for size in (*shape, offset, count)):
            raise ProtocolError("a layout row is malformed")
        expected = dtype_of(str(dtype)).itemsize * math.prod(shape)
        if len(shape) > MAX_RANK or offset < 0 or any(size < 0 for size in shape) or count != expected:
            raise ProtocolError("a layout row is inconsistent")
        end = max(end, offset + count)
    if end > limit_bytes:
        raise ProtocolError(f"the tensors need {end} bytes, the limit is {limit_bytes}")
    return end


def read_tensor(fd: int, row: dict[str, Any], device: torch.device | str = "cpu") -> torch.Tensor:
    """Copy one tensor out of a memfd (the Judge's side).

    Raises:
        ProtocolError: the memory is shorter than the layout says.
    """
    dtype = dtype_of(row["dtype"])
    if not row["bytes"]:
        return torch.empty(row["shape"], dtype=dtype, device=device)
    buffer = read_exactly(fd, row["offset"], row["bytes"])
    return torch.frombuffer(buffer, dtype=dtype).reshape(row["shape"]).to(device)


def read_state(fd: int, layout: list[dict[str, Any]], size_bytes: int) -> dict[str, torch.Tensor]:
    """Copy a state out of sealed memory; the Judge made the layout."""
    if not size_bytes:
        return {}
    view = memoryview(map_read_only(fd, size_bytes))
    state = {}
    for row in layout:
        raw = bytearray(view[row["offset"] : row["offset"] + row["bytes"]])
        dtype = dtype_of(row["dtype"])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        state[row["name"]] = flat.reshape(row["shape"])
    return state
