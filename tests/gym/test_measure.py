"""The two clocks, kernel tables and labels: the parts of measuring that need no GPU."""

from __future__ import annotations

import pytest

from drk.gym.detectors import label_work
from drk.gym.draft import Draft
from drk.gym.kernels import kernel_row, merge_kernels
from drk.gym.measure import agree
from drk.gym.schema import KernelRow


@pytest.mark.parametrize(
    ("event_ms", "wall_ms", "fits"),
    [
        (1.0, 1.2, True),
        (1.0, 0.9, False),
        (0.0, 0.1, False),
        (1.0, 5.0, False),
        (100.0, 108.0, True),
        (-1.0, 1.0, False),
    ],
)
def test_clocks(event_ms: float, wall_ms: float, fits: bool) -> None:
    assert agree(event_ms, wall_ms) is fits


def test_rows_from_a_runner_are_checked() -> None:
    row = kernel_row({"name": "k" * 500, "owned": True, "launches": "many", "registers": True, "time_us": 3})
    assert row is not None and len(row.name) == 200
    assert (row.launches, row.registers, row.time_us) == (0, None, 3.0)
    assert kernel_row(["k"]) is None


def test_merging_keeps_what_each_side_knows() -> None:
    compiled = [KernelRow("a", owned=True, registers=32), KernelRow("b", owned=True, registers=64)]
    launched = [{"name": "b", "launches": 3, "grid": [4, 1, 1]}, {"name": "c", "launches": 1}]
    merged = merge_kernels(compiled, launched)
    assert [(row.name, row.launches, row.registers) for row in merged] == [("a", 0, 32), ("b", 3, 64), ("c", 1, None)]


def labels(draft: Draft, *, launched: bool) -> list[str]:
    label_work(draft, launched=launched)
    return [flag.kind for flag in draft.flags if flag.severity == "label"]


def test_labels() -> None:
    assert labels(Draft("gpu", coverage=0.9), launched=True) == []
    assert labels(Draft("gpu", coverage=0.001), launched=True) == ["trivial-kernel"]
    assert labels(Draft("gpu", coverage=0.0), launched=False) == ["no-own-kernel"]
    inductor = KernelRow("triton_poi_fused_relu_0", owned=False)
    assert labels(Draft("gpu", kernels=[inductor]), launched=False) == ["compile-wrap", "no-own-kernel"]
    assert labels(Draft("interpreter", coverage_estimate=0.3), launched=True) == []


def test_a_kernel_that_only_copies_is_trivial_however_long_it_takes() -> None:
    assert labels(Draft("gpu", coverage=0.5, coverage_estimate=0.0), launched=True) == ["trivial-kernel"]
    assert labels(Draft("gpu", coverage=0.5, coverage_estimate=0.01), launched=True) == []
