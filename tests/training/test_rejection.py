"""PRS, void turns, the last-turn filter and padding against golden numbers and their stated meaning."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drk.training import rejection
from drk.training.advantages import turn_advantages
from drk.training.errors import OptionError, ShapeError
from drk.training.rejection import (
    batch_mask,
    effective_rows,
    last_turn_filter,
    pad_rows,
    prs_draw,
    prs_keep_probability,
    soft_advantages,
    turn_mask,
)

CASES = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "prs_keep_probability"])
def test_keep_probabilities_equal_the_golden_numbers(name):
    inputs = CASES[name]["inputs"]
    found = prs_keep_probability(
        torch.tensor(inputs[inputs["coverage_rs_key"]]),
        torch.tensor(inputs["correct"]),
        threshold=inputs["coverage_rs_threshold"],
        width=inputs["coverage_rs_factor"],
        pooling=inputs["coverage_rs"],
    )
    wanted = torch.tensor(CASES[name]["outputs"]["expected_mask"])
    torch.testing.assert_close(found[:, None] * torch.tensor(inputs["response_mask"]), wanted, atol=1e-5, rtol=1e-5)


def test_turn_masks_equal_the_golden_ones():
    rows = CASES["turn_loss_mask"]["rows"]
    rewards, sample, turn, aborted, wanted = [], [], [], [], []
    for number, row in enumerate(rows):
        for index, reward in enumerate(row["turn_rewards"]):
            rewards.append(reward)
            sample.append(number)
            turn.append(index + 1)
            aborted.append(row["finish_reason"] == "error")
            wanted.append(bool(row["loss_mask"][index]))
    found = turn_mask(torch.tensor(rewards), sample=sample, turn=turn, aborted=torch.tensor(aborted))
    assert found.tolist() == wanted
    without = turn_mask(torch.tensor(rewards), sample=sample, turn=turn, void=False)
    assert without.all()


def test_padding_is_masked_and_an_error_on_one_row_takes_its_whole_sample():
    found = turn_mask(
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        sample=["a", "a", "b", "b"],
        turn=[-1, 1, 1, 2],
        aborted=torch.tensor([0, 0, 0, 1]),
    )
    assert found.tolist() == [False, True, False, False]


def test_unmeasured_coverage_is_kept():
    coverage = torch.tensor([math.nan, 0.0])
    correct = torch.ones(2, dtype=torch.bool)
    assert prs_keep_probability(coverage, correct).tolist() == [1.0, 0.0]
    pooled = prs_keep_probability(coverage, correct, pooling="geometric", sample=[0, 1])
    assert pooled.tolist() == [1.0, 0.0]


def test_geometric_pooling_shares_one_probability_in_a_sample():
    coverage = torch.tensor([0.16, 0.81, math.nan, 0.32], dtype=torch.float64)
    correct = torch.tensor([1, 1, 1, 0])
    found = prs_keep_probability(coverage, correct, pooling="geometric", sample=[0, 0, 0, 1])
    mean = math.sqrt(0.16 * 0.81)  # 0.36
    assert found.tolist() == pytest.approx([(mean - 0.3) / 0.1] * 3 + [1.0])


def test_a_fast_turn_can_be_kept_whatever_its_coverage():
    coverage, correct = torch.tensor([0.0, 0.0]), torch.tensor([True, True])
    speedup = torch.tensor([2.0, 1.1])
    found = prs_keep_probability(coverage, correct, speedup=speedup, speedup_threshold=1.5)
    assert found.tolist() == [1.0, 0.0]
    off = prs_keep_probability(coverage, correct, speedup=speedup, speedup_threshold=-1.0)
    assert off.tolist() == [0.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=2, max_size=8),
    st.floats(0, 0.875, width=32),
    st.floats(0, 0.5, width=32),
)
def test_probabilities_rise_with_coverage_within_zero_and_one(coverage, threshold, width):
    ordered = torch.tensor(sorted(coverage))
    found = prs_keep_probability(ordered, torch.ones(len(coverage)), threshold=threshold, width=width)
    assert bool(((found >= 0) & (found <= 1)).all())
    assert bool((found.diff() >= 0).all())


def test_draws_repeat_by_seed_and_average_to_the_probability():
    probability = torch.tensor([0.0, 0.25, 1.0]).repeat(4000)
    first = prs_draw(probability, generator=torch.Generator().manual_seed(5))
    again = prs_draw(probability, generator=torch.Generator().manual_seed(5))
    assert torch.equal(first, again)
    share = first.float().reshape(-1, 3).mean(0)
    assert share[0] == 0.0
    assert share[2] == 1.0
    assert abs(float(share[1]) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)


def test_soft_advantages_are_the_mean_of_drawn_ones():
    rewards = torch.tensor([2.0, 0.0, 1.0], dtype=torch.float64)
    ids = {"prompt": [0] * 3, "sample": [0, 1, 2], "turn": [1] * 3, "mask": torch.ones(3)}
    probability = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)
    mean = torch.zeros(3, dtype=torch.float64)
    for first in (True, False):
        for third in (True, False):
            chance = 0.5 * (0.25 if third else 0.75)
            mean += chance * turn_advantages(rewards, **ids, keep=torch.tensor([first, True, third]))
    torch.testing.assert_close(soft_advantages(turn_advantages(rewards, **ids), probability), mean)


def test_effective_rows_run_from_one_to_all():
    assert effective_rows(torch.tensor([0.5, 0.5, 0.5]), torch.ones(3)) == pytest.approx(3.0)
    assert effective_rows(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1, 1, 0])) == pytest.approx(1.0)
    assert effective_rows(torch.zeros(2), torch.ones(2)) == 0.0


def test_prompts_whose_last_turns_agree_are_dropped_whole():
    ids = {
        "prompt": ["same"] * 4 + ["apart"] * 4 + ["lone"],
        "sample": [0, 0, 1, 1, 0, 0, 1, 1, 0],
        "turn": [1, 2, 1, 2, 1, 2, 2, 1, 1],
    }
    rewards = torch.tensor([0.0, 1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 9.0])
    found = last_turn_filter(rewards, **ids, mask=torch.ones(9))
    assert found.tolist() == [False] * 4 + [True] * 4 + [False]
    masked = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 1])  # the last live turns now are 1 and 3, and 1 and 1
    assert last_turn_filter(rewards, **ids, mask=masked).tolist() == [True] * 4 + [False] * 5
    few = last_turn_filter(rewards, **ids, mask=torch.ones(9), min_samples=3)
    assert not few.any()


def test_batch_masks_follow_the_recipe():
    ids = {"prompt": [0] * 4 + [1] * 4, "sample": [0, 0, 1, 1] * 2, "turn": [1, 2] * 4}
    rewards = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0, 2.0, 0.0, 2.0])
    assert batch_mask(rewards, **ids).all()
    # Row 1 is a regression, so that prompt 0's samples end in 1 and 2; those of prompt 1 both end in 2.
    released = batch_mask(rewards, **ids, rules=rejection.RELEASED)
    assert released.tolist() == [True, False, True, True, False, False, False, False]
    aborted = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0])
    assert batch_mask(rewards, **ids, aborted=aborted).tolist() == [True, True, False, False] + [True] * 4


def test_padding_rows_count_only_when_asked_to():
    index, live = pad_rows(3, multiple=4)
    assert index.tolist() == [0, 1, 2, 0]
    assert live.tolist() == [True, True, True, False]
    index, live = pad_rows(2, multiple=5, how="duplicate")
    assert index.tolist() == [0, 1, 0, 1, 0]
    assert live.all()
    assert pad_rows(1, multiple=2)[0].tolist() == [0, 0]
    index, live = pad_rows(4, multiple=4)
    assert index.tolist() == [0, 1, 2, 3]
    assert live.all()


def test_recipes_differ_where_paper_and_released_code_do():
    assert not rejection.PAPER.void_turns
    assert rejection.RELEASED.void_turns
    assert rejection.PAPER.last_turn_std is None
    assert rejection.RELEASED.last_turn_std == 1e-3
    assert rejection.RELEASED.padding == "duplicate"
    assert not rejection.CAUTIOUS.advantages.rejected_in_baseline


def test_misfits_are_named():
    ones = torch.ones(2)
    for change in ({"pooling": "mean"}, {"width": -0.1}, {"pooling": "geometric"}, {"speedup_threshold": 1.0}):
        with pytest.raises(OptionError):
            prs_keep_probability(ones, ones, **change)
    with pytest.raises(ShapeError):
        prs_keep_probability(ones, torch.ones(3))
    with pytest.raises(ShapeError):
        prs_keep_probability(ones, ones, speedup=torch.ones(3), speedup_threshold=1.0)
    with pytest.raises(ShapeError):
        soft_advantages(ones, torch.ones(3))
    with pytest.raises(ShapeError):
        turn_mask(ones, sample=[0, 1], turn=[1, 1], aborted=torch.ones(3))
    with pytest.raises(ShapeError):
        last_turn_filter(ones, prompt=[0, 0], sample=[0, 1], turn=[1, 1], mask=torch.ones(3))
    with pytest.raises(OptionError):
        pad_rows(2, multiple=0)
    with pytest.raises(ShapeError):
        pad_rows(0, multiple=2)
