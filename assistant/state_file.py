"""Reads a state dict file into a task's tensors, without unpickling anything here.

A safetensors file is a length, a JSON header and raw bytes: its keys are renamed to ``state.<key>`` in the header, the
data are copied as they are. Pickled files (``.pt``, ``.pth``, ``.bin``) are turned into safetensors by a converter that
runs in a sandboxed process (:mod:`drk.gym.runner.state_conversion`); without one the error says what to type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from drk.assistant.errors import TargetError
from drk.gym.wire import MAX_TENSOR_BYTES

StateConverter = Callable[[Path], bytes]
MAX_HEADER_BYTES = 100 * 2**20
PREFIX = "state."
SAFETENSORS_TYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "int16": ("I16", 2),
    "int32": ("I32", 4),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
}
"""Torch dtype name -> safetensors name and width in bytes."""


def _malformed(name: str, why: str) -> TargetError:
    return TargetError(f"{name} is no valid safetensors file: {why}", kind="state-dict", file=name)


def _split(data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise _malformed(name, "its header is cut off")
    try:
        header = json.loads(data[8 : 8 + size])
    except ValueError as error:
        raise _malformed(name, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _malformed(name, "its header is no JSON object")
    body = data[8 + size :]
    for key, row in header.items():
        if key == "__metadata__":
            continue
        offsets = row.get("data_offsets") if isinstance(row, dict) else None
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(end, int) for end in offsets)):
            raise _malformed(name, f"{key!r} has no data_offsets")
        if not 0 <= offsets[0] <= offsets[1] <= len(body):
            raise _malformed(name, f"{key!r} lies outside of the file")
    return header, body


def prefix_keys(data: bytes, name: str, prefix: str = PREFIX) -> bytes:
    """Return the safetensors blob ``data`` with ``prefix`` before each key.

    Raises:
        TargetError: kind ``state-dict``, when ``data`` is malformed; ``name`` is for the message.
    """
    header, body = _split(data, name)
    renamed = {f"{prefix}{key}": row for key, row in header.items() if key != "__metadata__"}
    return _join(renamed, body)


def _join(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def build_blob(rows: Iterable[tuple[str, str, Sequence[int], bytes]]) -> bytes:
    """Return a safetensors blob of ``(key, torch dtype name, shape, row-major bytes)`` rows.

    Raises:
        TargetError: kind ``state-dict``, when a dtype has no safetensors name or the bytes do not fit the shape.
    """
    header: dict[str, Any] = {}
    body = bytearray()
    for key, dtype, shape, data in rows:
        if dtype not in SAFETENSORS_TYPES:
            raise TargetError(f"{key}: {dtype} tensors cannot travel", kind="state-dict")
        code, width = SAFETENSORS_TYPES[dtype]
        if len(data) != math.prod(shape) * width:
            raise TargetError(f"{key}: {len(data)} bytes do not fit {dtype}{list(shape)}", kind="state-dict")
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    return _join(header, bytes(body))


def merge_blobs(first: bytes | None, second: bytes | None) -> bytes | None:
    """Return one safetensors blob with the keys of both; None when there is nothing.

    Raises:
        TargetError: kind ``state-dict``, when one is malformed.
    """
    if first is None or second is None:
        return first if second is None else second
    header, body = _split(first, "the first blob")
    other_header, other_body = _split(second, "the second blob")
    merged = {key: row for key, row in header.items() if key != "__metadata__"}
    for key, row in other_header.items():
        if key != "__metadata__":
            merged[key] = {**row, "data_offsets": [end + len(body) for end in row["data_offsets"]]}
    return _join(merged, body + other_body)


def read_state(path: Path, cwd: Path | None = None, convert: StateConverter | None = None) -> bytes:
    """Return the tensors blob for the state dict at ``path``, keys ``state.<key>``.

    Raises:
        TargetError: kind ``state-dict``: missing, malformed, too large, or pickled without a converter.
    """
    file = (cwd or Path.cwd()) / path
    name = str(path)
    if not file.is_file():
        raise TargetError(f"--state-dict: {name} does not exist", kind="state-dict", file=name)
    if file.stat().st_size > MAX_TENSOR_BYTES:
        raise TargetError(f"--state-dict: {name} is larger than {MAX_TENSOR_BYTES} bytes", kind="state-dict", file=name)
    if file.suffix != ".safetensors":
        if convert is None:
            script = "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
            raise TargetError(
                f"--state-dict: {name} is no .safetensors file",
                kind="state-dict",
                file=name,
                cause="a pickled file can run code when it is read",
                help=f"save the weights with {script}",
            )
        return prefix_keys(convert(file), name)
    try:
        return prefix_keys(file.read_bytes(), name)
    except OSError as error:
        raise TargetError(f"cannot read {name}: {error.strerror}", kind="state-dict", file=name) from error
