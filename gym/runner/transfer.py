"""Tensors into and out of the Judge's memory, by name, shape and dtype; runs in Runners and in the Judge.

A *layout* is a list of ``{"name", "shape", "dtype", "offset", "bytes"}``. The data are contiguous, in row-major order;
strides are part of the output's description, not of the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from drk.gym.arena import aligned, read_exactly, write_exactly
from drk.gym.errors import ProtocolError
from drk.gym.runner.structure import dtype_name

MAX_RANK = 64


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype named ``name``.

    Raises:
        ProtocolError: there is no such dtype.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"{name!r} is not a dtype")
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
            shape = [int(size) for size in row["shape"]]
            offset, count = int(row["offset"]), int(row["bytes"])
            expected = torch.empty((), dtype=dtype_of(str(row["dtype"]))).element_size()
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("a layout row is malformed") from error
        for size in shape:
            expected *= size
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
