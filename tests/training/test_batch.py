from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from drk.training.batch import RowRecord, decide, matched_rows, row_records, row_tensors
from drk.training.config import load_config
from drk.training.rollout import TurnSample
from drk.training.scoring import Score


def row(sample: int, turn: int, ids: tuple[int, ...] = (5, 6), **changes: object) -> TurnSample:
    score = Score(float(sample), correct=True, hacked=False, coverage=math.nan, speedup=math.nan)
    made = TurnSample(0, sample, turn, (1, 2, 3)[: turn + 1], ids, (-1.0,) * len(ids), score, "", "accepted", "", False)
    return replace(made, **changes)


def record(sample: int, reward: float, **changes: object) -> RowRecord:
    return replace(RowRecord(0, sample, 0, reward, correct=reward > 0, tokens=3), **changes)


def test_rows_are_laid_out_and_filled_up() -> None:
    tensors = row_tensors([row(0, 0), row(0, 2, (7, 8, 9))], count=3, pad_id=0)
    assert tensors.prompt_ids.tolist() == [[0, 0, 1], [1, 2, 3], [0, 0, 0]]
    assert tensors.prompt_mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 1]]
    assert tensors.completion_ids.tolist() == [[5, 6, 0], [7, 8, 9], [0, 0, 0]]
    assert tensors.completion_mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert tensors.input_ids.shape == tensors.attention_mask.shape == (3, 6)
    records = row_records([row(0, 0), row(0, 1)], [True, False], count=3)
    assert [one.turn for one in records] == [0, 1, -1]
    assert [one.matched for one in records] == [True, False, True]
    assert records[2].tokens == 0


def test_advantages_leave_one_out_and_filling_rows_get_none() -> None:
    config = load_config("nano-cpu")
    records = [record(0, 1.0), record(1, 0.0), record(2, 2.0), RowRecord(-1, -1, -1)]
    decision = decide(records, config, seed=0)
    assert decision.advantages.tolist() == pytest.approx([1.0 - 1.0, 0.0 - 1.5, 2.0 - 0.5, 0.0])
    assert decision.keep.tolist() == [True, True, True, False]
    assert decision.tokens == 9


def test_an_aborted_trajectory_leaves_the_baseline() -> None:
    config = load_config("nano-cpu")
    records = [record(0, 1.0), record(1, 0.0), record(2, 50.0, aborted=True)]
    decision = decide(records, config, seed=0)
    assert decision.advantages.tolist() == [1.0, -1.0, 0.0]
    assert decision.metrics["reward/mean"] == 0.5
    assert decision.metrics["rows/live"] == 2


def test_low_coverage_is_rejected_and_repeatably_so() -> None:
    config = load_config("nano-cpu", ["rejection.threshold=0.3", "rejection.width=0.1"])
    records = [record(i, 1.0 + i, coverage=0.1 if i % 2 else 0.9) for i in range(6)]
    decision = decide(records, config, seed=3)
    assert decision.keep.tolist() == [True, False] * 3
    assert decision.metrics["keep/prs"] == 0.5
    half = [replace(one, coverage=0.35) for one in records] * 4
    half = [replace(one, sample=i) for i, one in enumerate(half)]
    keeps = [decide(half, config, seed=seed).keep.tolist() for seed in (1, 1, 2)]
    assert keeps[0] == keeps[1] != keeps[2]


def test_soft_prs_weighs_instead_of_dropping() -> None:
    config = load_config("nano-cpu", ["advantage.rejected_in_baseline=true", "rejection.prs=soft"])
    records = [record(0, 1.0, coverage=0.35), record(1, 3.0, coverage=0.9)]
    decision = decide(records, config, seed=0)
    assert decision.advantages.tolist() == pytest.approx([-2.0 * 0.5, 2.0], abs=1e-5)
    assert decision.keep.tolist() == [True, True]


def test_what_the_sampler_and_the_trainer_see_differently_is_rejected() -> None:
    config = load_config("nano-cpu")
    rows = [row(0, 0), row(1, 0)]
    tensors = row_tensors(rows, count=2, pad_id=0)
    train = torch.tensor([[-1.0, -1.0005], [-1.0, -1.3]])
    assert matched_rows(train, tensors, rows, config) == [True, False]
    assert matched_rows(train, tensors, rows, load_config("nano-cpu", ["rejection.mrs=false"])) == [True, True]


def test_metrics_by_turn_and_fast_at_p() -> None:
    config = load_config("nano-cpu")
    records = [
        record(0, 2.0, speedup=1.5, hacked=False),
        record(1, 0.0, hacked=True),
        record(0, 3.0, turn=1, speedup=2.5),
    ]
    metrics = decide(records, config, seed=0).metrics
    assert (metrics["reward/turn_1"], metrics["reward/turn_2"], metrics["correct/turn_1"]) == (1.0, 3.0, 0.5)
    assert (metrics["fast@1.2/turn_1"], metrics["fast@1.2/turn_2"]) == (0.5, 1.0)
    assert metrics["hack_rate"] == pytest.approx(1 / 3)
    assert metrics["group/alone_share"] == pytest.approx(1 / 3)
