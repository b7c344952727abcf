"""Answers of a Runner are claims of any shape: what makes no sense is refused or left out, and nothing is raised."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from drk.gym.coverage_estimate import coverage_estimate
from drk.gym.errors import ProtocolError
from drk.gym.kernels import MAX_ROWS, kernel_row, kernel_rows, merge_kernels
from drk.gym.runner.sampling import shape_in
from drk.gym.runner.transfer import check_layout
from drk.gym.runner_handle import figure

ROW = {"name": "out", "shape": [4], "dtype": "float32", "offset": 0, "bytes": 16}
PRODUCT = {"op": "mm", "operands": [[[8, 8], "float32"]] * 2, "results": [[[8, 8], "float32"]]}


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [4.0]},
        {"shape": [math.inf]},
        {"shape": "4"},
        {"shape": [True, 4]},
        {"shape": [-4], "bytes": -16},
        {"shape": None},
        {"offset": -1},
        {"bytes": 12},
        {"bytes": 1e400},
        {"shape": [2**62, 2**62], "bytes": 2**126},
        {"dtype": "quint8", "bytes": 4},  # reading one would end the process
        {"dtype": "qint32"},
        {"dtype": "bits8", "bytes": 4},
        {"dtype": "int4", "bytes": 4},
        {"dtype": "float4_e2m1fn_x2", "bytes": 4},
        {"dtype": "Tensor"},
        {"dtype": ["float32"]},
    ],
)
def test_layouts(change: dict[str, Any]) -> None:
    assert check_layout([ROW], 2**20) == 16
    with pytest.raises(ProtocolError):
        check_layout([{**ROW, **change}], 2**20)


@pytest.mark.parametrize("layout", [None, 7, [7], [None], ["out"], [[]], [{}]])
def test_things_that_are_no_layout(layout: Any) -> None:
    with pytest.raises(ProtocolError):
        check_layout(layout, 2**20)


@pytest.mark.parametrize(
    "rows",
    [
        7,
        [7, "x", None],
        [{"op": None, "operands": [[[math.inf], 5]], "results": 3}],
        [{"op": "mm", "operands": [[[math.inf], "float32"]], "results": [[[-5], "x"]]}],
        [{**PRODUCT, "operands": [[[10**300, 10**300], "float32"]] * 2}],
        [{**PRODUCT, "results": [[10**400, "float32"]]}],
        [{"op": "mm"}],
        [[]],
        [{**PRODUCT, "operands": {"a": 1}}],
    ],
)
def test_operators(rows: Any) -> None:
    assert coverage_estimate([PRODUCT], [PRODUCT], "sm_90") == 0.0
    found = coverage_estimate([PRODUCT], rows, "sm_90")
    assert found is None or 0.0 <= found <= 1.0


@pytest.mark.parametrize(
    "row",
    [
        {"grid": ["x", None], "name": 5, "share": 1e400, "launches": 10**30},
        {"grid": 5, "time_us": math.nan, "num_warps": True},
        {"grid": [1.5], "share": 10**400, "time_us": -1},
        {"name": {"a": 1}},
    ],
)
def test_kernels(row: dict[str, Any]) -> None:
    found = kernel_row(row)
    assert found is not None
    assert found.grid is None and found.share is None and found.time_us is None and found.num_warps is None


def test_lists_of_kernels() -> None:
    assert kernel_rows(5) == kernel_rows(None) == kernel_rows([7, None, "x"]) == merge_kernels([], {"a": 1}) == []
    assert len(kernel_rows([{"name": "k"}] * (2 * MAX_ROWS))) == MAX_ROWS


@pytest.mark.parametrize("value", [None, "1", True, [1], 10**400, math.inf, -math.inf])
def test_things_that_are_no_figure(value: Any) -> None:
    with pytest.raises(ProtocolError):
        figure({"event_ms": value}, "event_ms")


def test_figures() -> None:
    assert figure({"event_ms": 3}, "event_ms") == 3.0
    assert math.isnan(figure({"event_ms": math.nan}, "event_ms"))


@pytest.mark.parametrize("shape", [torch.tensor([math.nan]), torch.zeros(0), torch.tensor([True])])
def test_a_claimed_shape(shape: torch.Tensor) -> None:
    assert shape_in({"out": torch.zeros(4), "out~shape": shape}, "out") == ()
    assert shape_in({"out": torch.zeros(4), "out~shape": torch.tensor([8, 2])}, "out") == (8, 2)
