"""Intervals of paired ratios: coverage by simulation, drift, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drk.gym.statistics import BIRGE_RATIO, latency, ratio_interval, resolution, settled


def test_drift_cancels_in_pairs() -> None:
    drift = np.linspace(1.0, 1.5, 100)
    interval = ratio_interval(list(2.0 * drift), list(1.0 * drift))
    assert interval.value == pytest.approx(2.0) and interval.low == pytest.approx(2.0) and interval.pairs == 100


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(7)
    hits = 0
    for trial in range(200):
        base = generator.normal(1.0, 0.02, 60)
        mine = generator.normal(1.0, 0.02, 60)
        interval = ratio_interval(list(base), list(mine), seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 175 <= hits <= 200


def test_settled_needs_both_sides() -> None:
    tight = ratio_interval([2.0] * 20, [1.0] * 20)
    assert settled(tight, 0.01)
    wide = ratio_interval([1.0, 3.0] * 10, [1.0] * 20)
    assert not settled(wide, 0.01)


@pytest.mark.parametrize(("base", "mine"), [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0]), ([-1.0], [1.0])])
def test_bad_times_are_refused(base: list[float], mine: list[float]) -> None:
    with pytest.raises(ValueError, match="times"):
        ratio_interval(base, mine)


def test_latency_orders_its_bounds() -> None:
    found = latency([1.0, 1.1, 0.9, 1.0, 5.0])
    assert found.low <= found.median <= found.high and found.median == 1.0


def test_intervals_are_stretched_for_what_differs_between_runs() -> None:
    generator = np.random.default_rng(5)
    ratios = np.exp(generator.normal(0.1, 0.02, size=60))
    interval = ratio_interval(ratios, np.ones(60), seed=3)
    medians = np.median(ratios[np.random.default_rng(3).integers(0, 60, size=(400, 60))], axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    for bound, plain in ((interval.low, low), (interval.high, high)):
        assert math.log(bound / interval.value) == pytest.approx(BIRGE_RATIO * math.log(plain / interval.value))


def test_two_processes_with_the_same_code_are_not_told_apart() -> None:
    exact = ratio_interval([1.002] * 20, [1.0] * 20)
    assert exact.low == pytest.approx(1.002)
    floored = ratio_interval([1.002] * 20, [1.0] * 20, floor=resolution(0.1))
    assert floored.low < 1.0 < floored.high
    assert floored.low == pytest.approx(1.002 * math.exp(-0.004))
    assert resolution(0.01) == resolution(0.1) == 0.004
    assert resolution(5.0) == pytest.approx(0.00109, rel=0.01)
