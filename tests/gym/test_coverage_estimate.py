"""The coverage estimate: what is left of the reference's own work."""

from __future__ import annotations

import pytest

from drk.gym.coverage_estimate import coverage_estimate, times_us

BIG = [[4096, 4096], "float32"]
SMALL = [[4096], "float32"]
RELU = {"op": "relu", "operands": [BIG], "results": [BIG]}
MM = {"op": "mm", "operands": [BIG, BIG], "results": [BIG]}
CLONE = {"op": "clone", "operands": [BIG], "results": [BIG]}
SUM = {"op": "sum", "operands": [BIG], "results": [SMALL]}


def test_nothing_left_is_all() -> None:
    assert coverage_estimate([RELU, MM], [], "sm_90") == 1.0


def test_everything_left_is_none() -> None:
    assert coverage_estimate([RELU, MM], [RELU, MM], "sm_90") == 0.0


def test_a_product_weighs_more_than_a_pass() -> None:
    share = coverage_estimate([RELU, MM], [MM], "sm_90")
    assert share is not None and 0.0 < share < 0.2


def test_extra_copies_are_not_the_references_work() -> None:
    assert coverage_estimate([RELU, MM], [CLONE, CLONE], "sm_90") == 1.0
    assert coverage_estimate([CLONE, RELU], [CLONE], "sm_90") == pytest.approx(0.5)


def test_in_place_forms_count_alike() -> None:
    assert times_us([{**RELU, "op": "relu_"}], "sm_90") == times_us([RELU], "sm_90")


@pytest.mark.parametrize("rows", [[{}], [{"op": "x", "operands": [[["a"], 1]], "results": []}], [3]])
def test_malformed_rows_give_no_estimate(rows: list[object]) -> None:
    assert coverage_estimate([RELU], rows, "sm_90") is None


def test_a_reference_without_cost_gives_no_estimate() -> None:
    assert coverage_estimate([{"op": "view", "operands": [BIG], "results": [BIG]}], [SUM], "sm_90") is None
