"""Describes the arguments of a call as JSON, in the form of the schema's Call; standard library and torch only.

It runs inside the user's own process (a copy of this file stands in the folder that ``--capture`` puts on the path), so
it imports nothing of drk and finds torch among the modules that the user's program has imported already.

Shapes, dtypes, strides and whether a gradient is required are written down; integer, boolean and non-finite tensors
(ids, masks) also as raw bytes, up to a limit. What the schema has no form for becomes ``unsupported`` with its type.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

MAX_DATA_BYTES = 256 * 2**20
MAX_DEPTH = 6
MAX_LOOKED_AT = 2**24
"""Larger tensors are not looked into: that would take memory which the program may need."""


class ValueWriter:
    """Describes values; ``folder`` takes the raw bytes of tensors whose values carry meaning."""

    def __init__(self, folder: Path, max_data_bytes: int = MAX_DATA_BYTES) -> None:
        self.folder = folder
        self.max_data_bytes = max_data_bytes
        self.data_bytes = 0

    def call_json(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, data: bool) -> dict[str, Any]:
        """Return the arguments in the form of the schema's Call."""
        return {
            "args": [self.argument(value, data) for value in args],
            "kwargs": {name: self.argument(value, data) for name, value in kwargs.items()},
        }

    def argument(self, value: Any, data: bool, depth: int = 0) -> dict[str, Any]:
        """Return one argument; ``unsupported`` with its type where the schema has no form for it."""
        torch = sys.modules["torch"]
        if isinstance(value, torch.Tensor):
            return self.tensor(value, data)
        if value is None or type(value) in (bool, int, float, str):
            return {"kind": "scalar", "value": value}
        if depth < MAX_DEPTH and type(value) in (list, tuple):
            items = [self.argument(item, data, depth + 1) for item in value]
            return {"kind": "nested", "form": type(value).__name__, "items": items}
        if depth < MAX_DEPTH and type(value) is dict and all(isinstance(key, str) for key in value):
            items = [self.argument(item, data, depth + 1) for item in value.values()]
            return {"kind": "nested", "form": "dict", "keys": list(value), "items": items}
        return {"kind": "unsupported", "type": type(value).__qualname__}

    def tensor(self, value: Any, data: bool) -> dict[str, Any]:
        """Describe a tensor; with ``data``, write the bytes of those whose values carry meaning."""
        torch = sys.modules["torch"]
        if value.layout != torch.strided or value.device.type == "meta":
            return {"kind": "unsupported", "type": str(value.layout)}
        spec: dict[str, Any] = {
            "kind": "tensor",
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": None if value.is_contiguous() else list(value.stride()),
            "requires_grad": bool(value.requires_grad),
        }
        meaningful = not (value.is_floating_point() or value.is_complex())
        if data and value.numel():
            plain = value.detach()
            looked_at = not meaningful and plain.numel() <= MAX_LOOKED_AT
            meaningful = meaningful or (looked_at and not bool(plain.isfinite().all()))
            size = plain.numel() * plain.element_size()
            if meaningful and self.data_bytes + size <= self.max_data_bytes:
                spec["file"] = self.dump(plain)
            elif meaningful and plain.dtype != torch.bool and not plain.is_floating_point():
                spec.update(fill="integers", low=float(plain.min()), high=float(plain.max()) + 1)
        return spec

    def dump(self, tensor: Any) -> str:
        """Write a tensor's bytes in row-major order; return the file's name."""
        torch = sys.modules["torch"]
        raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = f"data-{os.getpid()}-{self.data_bytes}.bin"
        self.data_bytes += len(raw)
        (self.folder / name).write_bytes(raw)
        return name


def autocast_dtype(torch: Any) -> str | None:
    """Return the dtype of the active autocast, or None."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def value_range(tensor: Any) -> tuple[float, float] | None:
    """Return the least and the greatest finite value of a real tensor; None when there is none or it is too large."""
    torch = sys.modules["torch"]
    if (
        tensor.is_complex()
        or not 0 < tensor.numel() <= MAX_LOOKED_AT
        or tensor.layout != torch.strided
        or tensor.device.type == "meta"
    ):
        return None
    plain = tensor.detach()
    plain = plain.float() if plain.is_floating_point() else plain.to(torch.int64)
    if plain.is_floating_point():
        plain = plain[plain.isfinite()]
        if not plain.numel():
            return None
    low, high = plain.min(), plain.max()
    return float(low), float(high)
