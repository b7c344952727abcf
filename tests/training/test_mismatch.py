"""Mismatch rejection, importance weights and diagnostics against golden numbers and hand-made rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drk.training.errors import OptionError, ShapeError
from drk.training.mismatch import (
    diagnostics,
    geometric_ratio,
    importance_weights,
    mrs_keep,
    ratio_statistics,
    rejected_fractions,
)

CASES = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]
GOLDEN = [name for name, case in CASES.items() if case["kind"] == "mismatch"]
DIAGNOSTICS = {
    "mismatch_training_ppl": "training_ppl",
    "mismatch_training_log_ppl": "training_log_ppl",
    "mismatch_rollout_ppl": "rollout_ppl",
    "mismatch_rollout_log_ppl": "rollout_log_ppl",
    "mismatch_kl": "k1_kl",
    "mismatch_k3_kl": "k3_kl",
    "mismatch_log_ppl_diff": "log_ppl_diff",
    "mismatch_log_ppl_abs_diff": "log_ppl_abs_diff",
    "mismatch_log_ppl_diff_max": "log_ppl_diff_max",
    "mismatch_log_ppl_diff_min": "log_ppl_diff_min",
    "mismatch_ppl_ratio": "ppl_ratio",
    "mismatch_chi2_token": "chi2_token",
    "mismatch_chi2_seq": "chi2_turn",
    "rollout_is_veto_fraction": "veto_fraction",
    "rollout_is_catastrophic_token_fraction": "veto_token_fraction",
}
BY_ROW = {
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_turn",
    "veto_fraction",
}
STATISTICS = {
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "ratio_fraction_low": "fraction_low",
    "ratio_fraction_high": "fraction_high",
    "eff_sample_size": "effective_share",
    "seq_mean": "turn_mean",
    "seq_std": "turn_std",
    "seq_min": "turn_min",
    "seq_max": "turn_max",
    "seq_max_deviation": "turn_max_deviation",
    "seq_fraction_low": "turn_fraction_low",
    "seq_fraction_high": "turn_fraction_high",
}


def load(name):
    inputs, outputs = CASES[name]["inputs"], CASES[name]["outputs"]
    train, rollout = torch.tensor(inputs["train_log_prob"]), torch.tensor(inputs["rollout_log_prob"])
    mask = torch.tensor(inputs["response_mask"])
    sample = [row // inputs["max_turns"] for row in range(len(mask))]
    metrics = {key.removeprefix("mismatch/"): value for key, value in outputs["metrics"].items()}
    return train, rollout, mask, sample, inputs, outputs, metrics


@pytest.mark.parametrize("name", GOLDEN)
def test_diagnostics_equal_the_golden_numbers(name):
    train, rollout, mask, _, _, _, metrics = load(name)
    found = diagnostics(train, rollout, mask)
    # The released code counts rows without tokens, as if their perplexity were 1; drk leaves them out.
    share = float((mask.sum(1) > 0).float().mean())
    for theirs, ours in DIAGNOSTICS.items():
        value = found[ours]
        if ours in BY_ROW:
            value = share * value + (1 - share) * (
                1.0 if ours.endswith(("_ppl", "ratio")) and "log" not in ours else 0.0
            )
        assert value == pytest.approx(metrics[theirs], abs=1e-5, rel=1e-5), ours


@pytest.mark.parametrize("name", GOLDEN)
def test_kept_rows_equal_the_golden_ones(name):
    train, rollout, mask, sample, inputs, outputs, _ = load(name)
    banded = "rollout_rs" in inputs
    keep = mrs_keep(
        train,
        rollout,
        mask,
        sample=sample,
        low=inputs.get("rollout_rs_threshold_lower") if banded else 0.0,
        high=inputs["rollout_rs_threshold"] if banded else math.inf,
        token_veto=inputs.get("rollout_token_veto_threshold"),
    )
    assert torch.equal(mask * keep[:, None], torch.tensor(outputs["new_mask"]))


@pytest.mark.parametrize("name", ["mrs_geo_3turns", "rs_geo_single_turn"])
def test_statistics_of_ratios_equal_the_golden_numbers(name):
    train, rollout, mask, sample, inputs, _, metrics = load(name)
    low, high = inputs.get("rollout_rs_threshold_lower"), inputs["rollout_rs_threshold"]
    ratio = geometric_ratio(train, rollout, mask, sample=sample)
    found = ratio_statistics(ratio, mask, low=low, high=high)
    for theirs, ours in STATISTICS.items():
        # The golden deviation is a float32 difference of squares: it resolves no better than sqrt(2^-23) around 1.
        loose = 3.5e-4 if ours == "std" else 1e-5
        assert found[ours] == pytest.approx(metrics[f"rollout_rs_{theirs}"], abs=loose, rel=1e-5), ours
    gone = rejected_fractions(mrs_keep(train, rollout, mask, sample=sample, low=low, high=high, token_veto=None), mask)
    assert gone["token_fraction"] == pytest.approx(metrics["rollout_rs_masked_fraction"], abs=1e-6)
    assert gone["turn_fraction"] == pytest.approx(metrics["rollout_rs_seq_masked_fraction"], abs=1e-6)


def test_importance_weights_equal_the_golden_numbers():
    train, rollout, mask, _, inputs, outputs, metrics = load("is_token")
    found = importance_weights(train, rollout, mask, cap=inputs["rollout_is_threshold"])
    torch.testing.assert_close(found, torch.tensor(outputs["is_weights"]), atol=1e-5, rtol=1e-5)
    statistics = ratio_statistics(found, mask, low=None, high=inputs["rollout_is_threshold"])
    for theirs, ours in STATISTICS.items():
        assert statistics[ours] == pytest.approx(metrics[f"rollout_is_{theirs}"], abs=1e-5, rel=1e-5), ours


def rows(*deltas):
    """Log-probabilities whose differences are ``deltas``; None is no token, hidden under a NaN."""
    rollout = torch.full((len(deltas), len(deltas[0])), -1.0)
    delta = torch.tensor([[math.nan if one is None else one for one in row] for row in deltas])
    mask = torch.tensor([[0.0 if one is None else 1.0 for one in row] for row in deltas])
    return rollout + delta, rollout, mask


def test_one_ratio_for_a_trajectory_or_one_for_each_turn():
    train, rollout, mask = rows([0.01, 0.01, 0.01], [-0.02, None, None], [0.0, 0.0, 0.0])
    ids = {"sample": [5, 5, 9], "low": 0.99, "high": 1.005}
    # Trajectory 5: (3 x 0.01 - 0.02) / 4 = 0.0025; its turns alone: +0.01 and -0.02.
    assert mrs_keep(train, rollout, mask, **ids).tolist() == [True, True, True]
    assert mrs_keep(train, rollout, mask, **ids, level="turn").tolist() == [False, False, True]


def test_a_vetoed_token_drops_its_turn_and_not_its_trajectory():
    train, rollout, mask = rows([-9.5, 9.5], [0.0, 0.0])  # the mean is 0; e^-9.5 < 1e-4
    assert mrs_keep(train, rollout, mask, sample=[0, 0]).tolist() == [False, True]
    assert mrs_keep(train, rollout, mask, sample=[0, 0], token_veto=None).tolist() == [True, True]


def test_a_nan_on_a_token_rejects_and_one_off_the_mask_does_not():
    train, rollout, mask = rows([math.nan, 0.0], [0.0, None])
    mask[0] = 1.0
    assert mrs_keep(train, rollout, mask, sample=[0, 1]).tolist() == [False, True]


def test_infinite_differences_reject_instead_of_overflowing():
    train, rollout, mask = rows([-math.inf, 0.0], [math.inf, 0.0])
    assert mrs_keep(train, rollout, mask, sample=[0, 1], token_veto=None).tolist() == [False, False]


def test_weights_of_turns_and_trajectories_are_capped_products():
    train, rollout, mask = rows([0.1, 0.2], [0.4, None])
    by_turn = importance_weights(train, rollout, mask, level="turn", cap=5.0)
    torch.testing.assert_close(by_turn, torch.tensor([[math.exp(0.3)] * 2, [math.exp(0.4), 0.0]]))
    by_sample = importance_weights(train, rollout, mask, sample=[0, 0], level="trajectory", cap=2.0)
    torch.testing.assert_close(by_sample, torch.tensor([[2.0, 2.0], [2.0, 0.0]]))  # e^0.7 = 2.01


def test_signed_means_cancel_where_absolute_ones_do_not():
    found = diagnostics(*rows([0.5, -0.5]))
    assert found["k1_kl"] == pytest.approx(0.0, abs=1e-6)
    assert found["abs_delta"] == pytest.approx(0.5)
    assert found["k3_kl"] > 0.1


def test_nothing_is_said_of_a_batch_without_tokens():
    train, rollout, mask = rows([None, None])
    assert diagnostics(train, rollout, mask) == {}
    assert ratio_statistics(torch.ones(1), mask) == {}
    assert rejected_fractions(torch.tensor([True]), mask) == {}


def test_misfits_are_named():
    train, rollout, mask = rows([0.0, 0.0])
    with pytest.raises(ShapeError):
        mrs_keep(train, rollout, mask[0], sample=[0])
    with pytest.raises(ShapeError):
        mrs_keep(train, rollout, mask, sample=[0, 1])
    with pytest.raises(ShapeError):
        ratio_statistics(torch.ones(3), mask)
    with pytest.raises(OptionError):
        mrs_keep(train, rollout, mask, sample=[0], level="token")
    with pytest.raises(OptionError):
        mrs_keep(train, rollout, mask, sample=[0], low=1.1, high=1.0)
    with pytest.raises(OptionError):
        importance_weights(train, rollout, mask, level="trajectory")
    with pytest.raises(OptionError):
        importance_weights(train, rollout, mask, cap=0.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-0.0078125, 0.0078125, width=32), min_size=3, max_size=3), min_size=2, max_size=6))
def test_equal_shifts_move_the_geometric_ratio_by_their_exponential(deltas):
    train, rollout, mask = rows(*deltas)
    sample = [row % 2 for row in range(len(deltas))]
    before = geometric_ratio(train, rollout, mask, sample=sample)
    after = geometric_ratio(train + 0.25, rollout, mask, sample=sample)
    torch.testing.assert_close(after, before * math.exp(0.25), atol=1e-5, rtol=1e-5)
    assert len({round(value, 6) for value in before.tolist()[::2]}) == 1  # one value a trajectory
