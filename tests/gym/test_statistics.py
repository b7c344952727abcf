"""Intervals of paired ratios: coverage by simulation, drift, bad input."""

from __future__ import annotations

import numpy as np
import pytest

from drk.gym.statistics import latency, ratio_interval, settled, student_quantile


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


def test_student_quantiles() -> None:
    # Tables of Student's distribution, 97.5 %.
    for degrees, expected in ((3, 3.1824), (4, 2.7764), (9, 2.2622), (24, 2.0639), (10**6, 1.9600)):
        assert student_quantile(degrees) == pytest.approx(expected, rel=3e-3)
    with pytest.raises(ValueError, match="three degrees"):
        student_quantile(2)


def test_what_a_group_shares_widens_the_interval() -> None:
    generator = np.random.default_rng(11)
    hits = {"grouped": 0, "pairs": 0}
    for trial in range(300):
        shared = np.repeat(generator.normal(0.0, 0.01, 5), 4)
        ratios = np.exp(shared + generator.normal(0.0, 0.002, 20))
        for name, groups in (("grouped", list(np.repeat(np.arange(5), 4))), ("pairs", None)):
            interval = ratio_interval(list(ratios), [1.0] * 20, groups, seed=trial)
            hits[name] += interval.low <= 1.0 <= interval.high
    assert 270 <= hits["grouped"] <= 298
    assert hits["pairs"] < 220, "pairs of a group are not independent: the bootstrap takes them for more than they are"


def test_a_group_that_was_hardly_measured_does_not_count() -> None:
    groups = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]
    ratios = [1.0, 1.01, 0.99, 1.0] * 4 + [3.0]
    interval = ratio_interval(ratios, [1.0] * 17, groups)
    assert interval.high < 1.02
    few = ratio_interval([1.0, 1.1, 0.9, 1.0], [1.0] * 4, [0, 0, 1, 1])
    assert few == ratio_interval([1.0, 1.1, 0.9, 1.0], [1.0] * 4)
    with pytest.raises(ValueError, match="pairs"):
        ratio_interval([1.0, 1.0], [1.0, 1.0], [0])
