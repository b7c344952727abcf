"""Rewards from verdicts: golden numbers, the rule that faults are never rewarded, and each form's steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from drk.gym.errors import HostError
from drk.gym.reward import NotRewardable, RewardFormError, RewardOptions, measured_speedup, reward, reward_parts
from drk.gym.schema import Failure, Flag, Interval, Speedups, Verdict

CASES = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]
FRAUD = Flag("decoy", "no-work", "fraud", "ablation")


def exactly(value):
    return Interval(value, value, value, 20)


def accepted(speedup=2.0, coverage=0.6, **changes):
    speedups = None if speedup is None else Speedups(eager=exactly(speedup))
    verdict = Verdict("accepted", "gpu", "measured", True, True, speedups=speedups, headline="eager", coverage=coverage)
    return replace(verdict, **changes)


WRONG = Verdict("rejected", "gpu", "ran", False, None, coverage=0.9, speedups=Speedups(eager=exactly(2.0)))
HACKED = accepted(status="rejected", honest=False, reached="correct", flags=(FRAUD,))
UNCOMPILED = Verdict("failed", "gpu", "loaded", False, None, error=Failure("compile", "compile", "no", 3))
UNPARSED = Verdict("failed", "gpu", None, False, None, error=Failure("parse", "syntax", "no", 3))
CRASHED = Verdict("failed", "gpu", "compiled", False, None, error=Failure("run", "exception", "no", 3))
TIMED_OUT = Verdict("failed", "gpu", "compiled", False, None, error=Failure("run", "timeout", "no"))
FAULT = Verdict("error", "gpu", None, False, None, error=Failure("host", "device", "the GPU fell off"))
FAILURES = [WRONG, HACKED, UNCOMPILED, UNPARSED, CRASHED, TIMED_OUT]


def verdict_of(result, share):
    """The verdict that says what a released server's reply says."""
    if result["status"] != "completed":
        return UNPARSED
    own, total = (result["metadata"][key] for key in share)
    found = accepted(result["speedup"], own / total if total else 0.0)
    if result["decoy_kernel"]:
        return replace(found, status="rejected", honest=False, flags=(FRAUD,))
    return found if result["correctness"] else replace(found, status="rejected", correct=False, reached="ran")


TIME = ("custom_kernel_cuda_time_in_profiling_us", "total_kernel_run_time_in_profiling_us")
NUMBER = ("num_custom_kernels", "num_total_kernels")


@pytest.mark.parametrize("row", CASES["rewards"]["rows"], ids=range(len(CASES["rewards"]["rows"])))
def test_rewards_equal_the_golden_numbers(row):
    wanted = row["reward"]
    verdict, by_number = verdict_of(row["result"], TIME), verdict_of(row["result"], NUMBER)
    forms = {
        "calculate_reward_speedup|enable=True": reward(verdict, form="recipe"),
        "calculate_reward_speedup|enable=False": reward(replace(verdict, coverage=None), form="recipe"),
        "calculate_reward_speedup|enable=True,lo=1.0": reward(verdict, form="recipe", options=RewardOptions(floor=1.0)),
        "calculate_reward_speedup|enable=True,typ=number_coverage": reward(by_number, form="recipe"),
        "calculate_reward_weighted|enable=True": reward(verdict, form="weighted"),
        "calculate_reward_like_kernel|enable=True": reward(verdict, form="ladder"),
    }
    assert wanted.keys() == forms.keys()
    for name, value in forms.items():
        if not isinstance(wanted[name], str):  # the released ladder breaks without a speed-up
            assert value == pytest.approx(wanted[name], abs=1e-6), name
    assert reward(verdict) == pytest.approx(2 * reward(verdict, form="recipe"))


@pytest.mark.parametrize("form", ["paper", "recipe", "weighted", "ladder"])
def test_a_fault_of_the_host_is_never_rewarded(form):
    with pytest.raises(NotRewardable, match="the GPU fell off") as caught:
        reward(FAULT, form=form)
    assert caught.value.kind == "host"
    assert isinstance(caught.value, HostError)


@pytest.mark.parametrize("form", ["paper", "recipe", "weighted"])
@pytest.mark.parametrize("verdict", FAILURES)
def test_whatever_fails_earns_nothing(verdict, form):
    assert reward(verdict, form=form) == 0.0


def test_the_ladder_orders_failures():
    steps = [reward(verdict, form="ladder") for verdict in (HACKED, UNPARSED, TIMED_OUT, UNCOMPILED, CRASHED, WRONG)]
    assert steps == [-1.0, -1.0, -1.0, -0.5, -0.3, -0.3]


@pytest.mark.parametrize(
    ("speedup", "wanted"), [(0.9, -0.1), (1.0, 0.2), (1.2, 0.4), (1.5, 0.6), (2.0, 0.8), (3.0, 1.0), (9.0, 1.0)]
)
def test_the_ladder_orders_successes(speedup, wanted):
    assert reward(accepted(speedup), form="ladder") == wanted


def test_parts_say_what_was_paid_for():
    parts = reward_parts(accepted(7.0, 0.25))
    assert (parts.correct, parts.speedup, parts.coverage, parts.total) == (1.0, 3.0, 0.25, 4.25)


def test_speed_is_paid_by_the_lower_end_of_its_interval():
    verdict = accepted(speedups=Speedups(eager=Interval(2.0, 1.5, 2.5, 40)), coverage=None)
    assert reward(verdict) == 2.5
    assert reward(verdict, options=RewardOptions(bound="value")) == 3.0


def test_parts_of_a_failure_are_nothing():
    for verdict in FAILURES:
        parts = reward_parts(verdict)
        assert (parts.correct, parts.speedup, parts.coverage, parts.total) == (0.0, 0.0, 0.0, 0.0)


def test_shares_beyond_their_range_are_clamped_and_floors_include_their_bound():
    assert reward(accepted(1.0, 1.25)) == 3.0
    assert reward(accepted(1.0, -0.25)) == 2.0
    assert reward(accepted(1.0, 0.0), options=RewardOptions(floor=1.0)) == 2.0
    assert reward(accepted(0.0, 0.0)) == 1.0


def test_the_baseline_is_the_one_named():
    speedups = Speedups(eager=exactly(2.0), compile=exactly(1.25))
    verdict = accepted(speedups=speedups, headline="compile", coverage=0.0)
    assert reward(verdict) == 3.0
    assert reward(verdict, baseline="compile") == reward(verdict, baseline="headline") == 2.25
    with pytest.raises(NotRewardable) as caught:
        reward(verdict, baseline="cuda_graph")
    assert caught.value.kind == "baseline"


def test_missing_timing_counts_as_no_speed_or_is_refused():
    verdict = accepted(None, 0.5)
    assert reward(verdict) == 1.5
    with pytest.raises(NotRewardable):
        reward(verdict, options=RewardOptions(untimed="raise"))


def test_speed_and_coverage_are_paid_on_gpu_evidence_only():
    simulated = accepted(5.0, 1.0, evidence="interpreter", coverage_estimate=0.75)
    assert reward(simulated) == 1.0
    assert reward(simulated, options=RewardOptions(proxy=True)) == 1.75
    assert measured_speedup(simulated) is None


def test_what_was_only_compiled_is_not_judged():
    compiled = Verdict("accepted", "compile-only", "compiled", False, None)
    with pytest.raises(NotRewardable) as caught:
        reward(compiled)
    assert caught.value.kind == "evidence"
    assert reward(replace(UNCOMPILED, evidence="compile-only")) == 0.0  # that it does not compile is proven


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_broken_numbers_are_refused(value):
    with pytest.raises(NotRewardable):
        reward(accepted(value))
    if not math.isfinite(value):
        with pytest.raises(NotRewardable):
            reward(accepted(1.0, value))


def test_labels_cost_nothing_and_fraud_flags_do():
    label = Flag("torch-call", "delegation", "label", "census")
    assert reward(accepted(flags=(label,))) == reward(accepted())
    assert reward(accepted(flags=(FRAUD,))) == 0.0
    either = (accepted(honest=False), accepted(flags=(label, FRAUD)))
    assert [reward(verdict) for verdict in either] == [0.0, 0.0]
    assert [reward(verdict, form="ladder") for verdict in either] == [-1.0, -1.0]
    assert reward(accepted(honest=None)) == reward(accepted())  # not judged is not dishonest


def test_unknown_names_are_refused():
    with pytest.raises(RewardFormError):
        reward(accepted(), form="best")
    with pytest.raises(RewardFormError):
        reward(accepted(), baseline="numpy")
