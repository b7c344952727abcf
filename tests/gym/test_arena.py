"""Memory that the Judge owns: reading, shrinking behind its back, sealing."""

from __future__ import annotations

import os

import pytest
import torch

from drk.gym.arena import Arena, read_exactly, write_exactly
from drk.gym.errors import ProtocolError
from drk.gym.runner import transfer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_tensors_round_trip_in_any_stride(dtype: torch.dtype) -> None:
    values = torch.arange(24).reshape(2, 3, 4).remainder(2 if dtype == torch.bool else 200).to(dtype)
    named = [("plain", values), ("turned", values.transpose(0, 2)), ("empty", values[:0]), ("scalar", values[0, 0, 1])]
    layout, size = transfer.plan_layout(named)
    arena = Arena("test")
    arena.reserve(size)
    transfer.write_tensors(arena.fd, named, layout)
    assert transfer.check_layout(layout, size) <= size
    for (_, tensor), row in zip(named, layout, strict=True):
        assert torch.equal(transfer.read_tensor(arena.fd, row), tensor)
    arena.close()


def test_short_file_is_an_error_not_a_crash() -> None:
    arena = Arena("test")
    arena.reserve(4096)
    os.ftruncate(arena.fd, 100)
    with pytest.raises(ProtocolError, match="ends after"):
        read_exactly(arena.fd, 0, 4096)
    arena.close()


def test_sealed_memory_cannot_be_changed() -> None:
    arena = Arena("test")
    arena.reserve(64)
    write_exactly(arena.fd, 0, b"weights")
    arena.seal()
    for attempt in (lambda: os.pwrite(arena.fd, b"other", 0), lambda: os.ftruncate(arena.fd, 0)):
        with pytest.raises(PermissionError):
            attempt()
    assert read_exactly(arena.fd, 0, 7) == b"weights"
    arena.close()


ROW = {"name": "out", "shape": [2, 2], "dtype": "float32", "offset": 0, "bytes": 16}


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 12},
        {"shape": [-2, -2]},
        {"shape": [2.5, "x"]},
        {"offset": -64},
        {"dtype": "Tensor"},
        {"dtype": "__class__"},
        {"shape": [2**40, 2**40], "bytes": 2**82},
        {"shape": [1] * 100},
    ],
)
def test_hostile_layouts_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        transfer.check_layout([{**ROW, **change}], 2**30)


@pytest.mark.parametrize("layout", [None, 3, [None], [{}], [ROW, "x"]])
def test_malformed_layouts_are_refused(layout: object) -> None:
    with pytest.raises(ProtocolError):
        transfer.check_layout(layout, 2**30)
