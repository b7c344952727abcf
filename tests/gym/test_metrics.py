"""Figures of merit against golden numbers, brute force and the intervals' own promises."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drk.gym import metrics
from drk.gym.errors import HostError
from drk.gym.metrics import Outcome, fast_at_p
from drk.gym.schema import Flag, Interval, Speedups, Verdict

CASE = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]["fast_at_p"]


def golden_outcomes():
    given_ = CASE["inputs"]
    columns = (given_[name] for name in ("sample", "turn_index", "correct", "speedup", "decoy"))
    return [
        Outcome("p", int(sample[1:]), turn, bool(correct) and not decoy, speedup, bool(decoy))
        for sample, turn, correct, speedup, decoy in zip(*columns, strict=True)
        if turn > 0
    ]


@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.parametrize(("name", "choose"), [("turn", metrics.at_turn), ("best_by_turn", metrics.best_of_history)])
def test_fast_at_p_equals_the_golden_numbers(turn, name, choose):
    chosen, wanted = choose(golden_outcomes(), turn), CASE["outputs"]
    assert metrics.correct_rate(chosen) == pytest.approx(wanted[f"{name}_{turn}/correctness_rate"])
    for p in CASE["inputs"]["thresholds"]:
        share, among_correct = (wanted[f"{name}_{turn}/fast@{p:g}{end}"] for end in ("_in_all", ""))
        assert fast_at_p(chosen, p) == pytest.approx(share)
        assert fast_at_p(chosen, p, among="correct") == pytest.approx(among_correct)


def test_last_turn_and_improvement_equal_the_golden_numbers():
    outcomes, wanted = golden_outcomes(), CASE["outputs"]
    assert metrics.correct_rate(metrics.last_turn(outcomes)) == pytest.approx(wanted["final/correctness_rate"])
    found = metrics.improvement(outcomes)
    assert found["first"] == pytest.approx(wanted["improvement/first_turn_correct_rate"])
    assert found["last"] == pytest.approx(wanted["improvement/last_turn_correct_rate"])
    assert found["improved"] == wanted["improvement/improved_samples"]
    assert found["regressed"] == wanted["improvement/regressed_samples"]


def test_the_threshold_counts_unless_strict():
    exact = [Outcome("p", 0, 1, True, 1.5)]
    assert fast_at_p(exact, 1.5) == 1.0
    assert fast_at_p(exact, 1.5, strict=True) == 0.0


def test_wrong_hacked_and_unmeasured_are_never_fast():
    outcomes = [
        Outcome("p", 0, 1, False, 9.0),
        Outcome("p", 1, 1, True, 9.0, hacked=True),
        Outcome("p", 2, 1, True, None),
        Outcome("p", 3, 1, True, 9.0),
    ]
    assert fast_at_p(outcomes, 1.0) == 0.25
    assert fast_at_p(outcomes, 1.0, among="correct") == 0.5
    assert metrics.hack_rate(outcomes) == 0.25
    assert fast_at_p(outcomes[:1], 1.0, among="correct") == 0.0


def test_best_of_history_prefers_right_over_fast_and_measured_over_not():
    turns = [Outcome("p", 0, 1, False, 9.0), Outcome("p", 0, 2, True, None), Outcome("p", 0, 3, True, 1.1)]
    assert metrics.best_of_history(turns) == [turns[2]]
    assert metrics.best_of_history(turns, 2) == [turns[1]]
    assert metrics.last_turn(turns, 1) == [turns[0]]


def test_outcomes_come_from_verdicts():
    speedups = Speedups(eager=Interval(2.0, 1.8, 2.2, 30))
    good = Verdict("accepted", "gpu", "measured", True, True, speedups=speedups)
    assert metrics.outcome(good, problem="p") == Outcome("p", 0, 1, True, 2.0)
    assert metrics.outcome(good, problem="p", bound="low").speedup == 1.8
    fraud = Flag("decoy", "no-work", "fraud", "ablation")
    hacked = Verdict("rejected", "gpu", "correct", True, False, speedups=speedups, flags=(fraud,))
    assert metrics.outcome(hacked, problem="p", sample=3, turn=2) == Outcome("p", 3, 2, False, None, True)
    with pytest.raises(HostError):
        metrics.outcome(Verdict("error", "gpu", None, False, None), problem="p")


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_pass(samples, data):
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    subsets = list(itertools.combinations(range(samples), k))
    wanted = sum(any(one < passed for one in subset) for subset in subsets) / len(subsets)
    assert metrics.pass_at_k(samples, passed, k) == pytest.approx(wanted)


def test_best_of_k_averages_over_problems():
    outcomes = [Outcome("a", number, 1, True, 2.0 if number == 0 else 1.0) for number in range(4)]
    outcomes += [Outcome("b", number, 1, False) for number in range(2)]
    assert metrics.fast_at_p_of_k(outcomes, 1.5, 1) == pytest.approx((0.25 + 0) / 2)
    assert metrics.fast_at_p_of_k(outcomes, 1.5, 2) == pytest.approx((0.5 + 0) / 2)
    assert fast_at_p(outcomes, 1.5) == pytest.approx(1 / 6)
    with pytest.raises(ValueError, match="1 <= k <= samples"):
        metrics.fast_at_p_of_k(outcomes, 1.5, 3)
    with pytest.raises(ValueError, match="two outcomes of sample 0"):
        metrics.fast_at_p_of_k([*outcomes, outcomes[0]], 1.5, 1)


def test_geometric_mean_and_median():
    assert metrics.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert metrics.geometric_mean([1.0, 2.0, 4.0]) == pytest.approx(2.0)
    assert metrics.median([3.0, 1.0, 2.0]) == 2.0
    assert metrics.median([1.0, 2.0]) == 1.5
    for bad in ([], [0.0, 1.0], [math.inf], [math.nan]):
        with pytest.raises(ValueError, match="positive and finite"):
            metrics.geometric_mean(bad)
    for bad in ([], [math.nan]):
        with pytest.raises(ValueError, match="median"):
            metrics.median(bad)


@given(st.lists(st.floats(0.125, 8), min_size=1, max_size=20))
def test_inverting_every_ratio_inverts_their_geometric_mean(ratios):
    inverse = metrics.geometric_mean([1 / ratio for ratio in ratios])
    assert metrics.geometric_mean(ratios) * inverse == pytest.approx(1.0)


def test_bootstrap_intervals_cover_as_promised():
    draw = random.Random(11)
    hits = 0
    for trial in range(100):
        found = metrics.bootstrap(
            [draw.gauss(1.0, 0.5) for _ in range(40)],
            lambda values: sum(values) / len(values),
            resamples=300,
            seed=trial,
        )
        assert found.low <= found.value <= found.high
        hits += found.low <= 1.0 <= found.high
    assert hits >= 85  # 95 expected; 85 is more than four deviations off


def test_bootstrap_repeats_by_seed_and_draws_whole_units():
    values = [(problem, float(problem)) for problem in range(10) for _ in range(8)]

    def mean(items):
        return sum(value for _, value in items) / len(items)

    alone = metrics.bootstrap(values, mean, resamples=500)
    assert alone == metrics.bootstrap(values, mean, resamples=500)
    together = metrics.bootstrap(values, mean, unit=lambda item: item[0], resamples=500)
    assert (alone.count, together.count) == (80, 10)
    # Eight copies of each value are worth one: the honest interval is about sqrt(8) times as wide.
    assert 2.0 < (together.high - together.low) / (alone.high - alone.low) < 4.0


def test_fast_at_p_intervals_are_over_problems():
    outcomes = [
        Outcome(f"p{number}", sample, 1, True, 1.0 + (number % 2)) for number in range(20) for sample in range(4)
    ]
    found = metrics.fast_at_p_interval(outcomes, 1.5, resamples=500)
    assert (found.value, found.count) == (0.5, 20)
    assert 0.2 < found.low < 0.4 < 0.6 < found.high < 0.8
    best = metrics.fast_at_p_interval(outcomes, 1.5, k=4, resamples=500)
    assert (best.value, best.count) == (0.5, 20)
    general = metrics.bootstrap(
        outcomes, lambda some: fast_at_p(some, 1.5), unit=lambda one: one.problem, resamples=500
    )
    assert (general.low, general.high) == pytest.approx((found.low, found.high))


def test_wilson_says_something_at_the_ends():
    none, every = metrics.wilson(0, 10), metrics.wilson(10, 10)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.2775, abs=1e-4)  # z^2 / (n + z^2)
    assert every.high == 1.0
    assert every.low == pytest.approx(1 - none.high)
    assert metrics.wilson(1, 1).low == pytest.approx(0.2065, abs=1e-4)  # 1 / (1 + z^2)
    one = metrics.wilson(1, 10)
    assert (one.low, one.high) == pytest.approx((0.0179, 0.4042), abs=1e-4)
    half = metrics.wilson(50, 100)
    assert (half.low, half.high) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_nothing_has_no_share():
    calls = [
        lambda: fast_at_p([], 1.0),
        lambda: metrics.correct_rate([]),
        lambda: metrics.hack_rate([]),
        lambda: metrics.improvement([]),
        lambda: metrics.fast_at_p_of_k([], 1.0, 1),
        lambda: metrics.fast_at_p_interval([], 1.0),
        lambda: metrics.bootstrap([], len),
        lambda: metrics.wilson(0, 0),
        lambda: metrics.pass_at_k(3, 4, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"no outcomes|needs items|need 0 <="):
            call()
