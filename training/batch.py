"""From scored turns to a batch: padding, mismatch rejection, PRS, advantages, and the step's metrics.

Two halves. :func:`row_tensors` lays one process's rows out as tensors. :func:`decide` looks at the small records of
*all* processes' rows together, so that groups need not lie on one process, and says what each row is worth. Rows that
only fill the batch up, rows of trajectories that broke off and rejected rows carry no token into the loss.

Order, as in the paper's recipe: MRS, then PRS, then advantages. A rejected row's reward still counts in the return of
the turns before it; whether it stays in the baseline is a setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drk.gym.metrics import THRESHOLDS, Outcome, fast_at_p
from drk.training.advantages import AdvantageOptions, group_sizes, turn_advantages
from drk.training.config import TrainConfig
from drk.training.mismatch import mrs_keep
from drk.training.rejection import (
    BatchRules,
    batch_mask,
    effective_rows,
    prs_draw,
    prs_keep_probability,
    soft_advantages,
)
from drk.training.rollout import TurnSample

Metrics = dict[str, float]
LAZY_COVERAGE = 0.5
"""A right answer whose own kernels do less of the work than this is lazy."""


def lazy_share(coverages: Sequence[float]) -> float:
    """Return which share of right answers with these coverages is lazy; there is at least one."""
    return sum(one < LAZY_COVERAGE for one in coverages) / len(coverages)


@dataclass(frozen=True)
class RowTensors:
    """Rows of one process, ``R`` with filling rows. Prompts are padded on the left, completions on the right."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    sampling_logps: Tensor

    @property
    def input_ids(self) -> Tensor:
        """Prompts and completions, ``[R, P + C]``."""
        return torch.cat([self.prompt_ids, self.completion_ids], dim=1)

    @property
    def attention_mask(self) -> Tensor:
        """Where there are tokens, ``[R, P + C]``."""
        return torch.cat([self.prompt_mask, self.completion_mask], dim=1)


@dataclass(frozen=True)
class RowRecord:
    """What :func:`decide` needs of one row; ``turn`` -1 marks a filling row."""

    prompt: int
    sample: int
    turn: int
    reward: float = 0.0
    coverage: float = math.nan
    speedup: float = math.nan
    correct: bool = False
    hacked: bool = False
    aborted: bool = False
    matched: bool = True
    tokens: int = 0


@dataclass(frozen=True)
class Decision:
    """One advantage a row, which rows reach the loss, how many tokens that are, and metrics of the step."""

    advantages: Tensor
    keep: Tensor
    tokens: int
    metrics: Metrics


def row_tensors(rows: Sequence[TurnSample], *, count: int, pad_id: int) -> RowTensors:
    """Lay rows out, with filling rows up to ``count``: one prompt and one completion token, which do not count.

    The filling rows' completion mask is 1 on that token, since a row without any would make attention over nothing.
    """
    prompts = [list(row.prompt_ids) for row in rows] + [[pad_id]] * (count - len(rows))
    answers = [list(row.completion_ids) for row in rows] + [[pad_id]] * (count - len(rows))
    scores = [list(row.sampling_logps) for row in rows] + [[0.0]] * (count - len(rows))
    wide, long = max(map(len, prompts)), max(map(len, answers))
    return RowTensors(
        prompt_ids=torch.tensor([[pad_id] * (wide - len(ids)) + ids for ids in prompts]),
        prompt_mask=torch.tensor([[0] * (wide - len(ids)) + [1] * len(ids) for ids in prompts]),
        completion_ids=torch.tensor([ids + [pad_id] * (long - len(ids)) for ids in answers]),
        completion_mask=torch.tensor([[1] * len(ids) + [0] * (long - len(ids)) for ids in answers]),
        sampling_logps=torch.tensor([row + [0.0] * (long - len(row)) for row in scores], dtype=torch.float32),
    )


def row_records(rows: Sequence[TurnSample], matched: Sequence[bool], *, count: int) -> list[RowRecord]:
    """Return the records of one process's rows, with filling rows up to ``count``."""
    records = [
        RowRecord(
            prompt=row.prompt,
            sample=row.sample,
            turn=row.turn,
            reward=row.score.reward,
            coverage=row.score.coverage,
            speedup=row.score.speedup,
            correct=row.score.correct,
            hacked=row.score.hacked,
            aborted=row.aborted,
            matched=match,
            tokens=len(row.completion_ids),
        )
        for row, match in zip(rows, matched, strict=True)
    ]
    return records + [RowRecord(-1, -1, -1)] * (count - len(rows))


def matched_rows(
    train_logp: Tensor, tensors: RowTensors, rows: Sequence[TurnSample], config: TrainConfig
) -> list[bool]:
    """Return which rows pass MRS; all where it is off. ``train_logp`` is ``[R, C]``."""
    section = config.rejection
    if not section.mrs or not rows:
        return [True] * len(rows)
    count = len(rows)
    keep = mrs_keep(
        train_logp[:count],
        tensors.sampling_logps[:count].to(train_logp.device),
        tensors.completion_mask[:count].to(train_logp.device),
        sample=[row.sample for row in rows],
        level=section.level,
        low=section.low,
        high=section.high,
        token_veto=section.token_veto,
    )
    found: list[bool] = keep.tolist()
    return found


def decide(records: Sequence[RowRecord], config: TrainConfig, *, seed: int) -> Decision:
    """Return what each row of the whole step is worth. Every process that is given the same records agrees.

    Raises:
        NotFiniteError: a live row's reward is NaN or infinite.
    """
    rewards = torch.tensor([record.reward for record in records], dtype=torch.float64)
    prompt, sample = [record.prompt for record in records], [record.sample for record in records]
    turn = torch.tensor([record.turn for record in records])
    section, estimator = config.rejection, config.advantage
    rules = BatchRules(void_turns=section.void_turns, last_turn_std=section.last_turn_std or None)
    aborted = torch.tensor([record.aborted for record in records])
    mask = batch_mask(rewards, prompt=prompt, sample=sample, turn=turn, aborted=aborted, rules=rules)
    matched = torch.tensor([record.matched for record in records])
    probability = _keep_probability(records, config)
    drawn = torch.ones_like(matched)
    if section.prs == "draw":
        drawn = prs_draw(probability, generator=torch.Generator().manual_seed(seed))
    keep = matched & drawn
    options = AdvantageOptions(estimator.singleton, estimator.rejected_in_baseline, None, estimator.scale)
    advantages = turn_advantages(
        rewards,
        prompt=prompt,
        sample=sample,
        turn=turn,
        mask=mask,
        estimator=estimator.estimator,
        gamma=estimator.gamma,
        keep=keep,
        options=options,
    )
    if section.prs == "soft":
        advantages = soft_advantages(advantages, probability.double())
    live = mask & keep
    tokens = sum(record.tokens for record, alive in zip(records, live.tolist(), strict=True) if alive)
    metrics = _reward_metrics(records, config)
    metrics |= _keep_metrics(records, mask, matched, drawn, probability)
    sizes = group_sizes(prompt=prompt, turn=turn, mask=mask)
    if bool(mask.any()):
        metrics["group/size_mean"] = float(sizes[mask].double().mean())
        metrics["group/alone_share"] = float((sizes[mask] == 1).double().mean())
    metrics["advantage/abs_mean"] = float(advantages[live].abs().mean()) if bool(live.any()) else 0.0
    return Decision(advantages.to(torch.float32), live, tokens, metrics)


def _keep_probability(records: Sequence[RowRecord], config: TrainConfig) -> Tensor:
    section = config.rejection
    if section.prs == "off":
        return torch.ones(len(records))
    return prs_keep_probability(
        torch.tensor([record.coverage for record in records]),
        torch.tensor([record.correct for record in records]),
        threshold=section.threshold,
        width=section.width,
        pooling=section.pooling,
        sample=[record.sample for record in records],
    )


def _reward_metrics(records: Sequence[RowRecord], config: TrainConfig) -> Metrics:
    real = [record for record in records if record.turn >= 0 and not record.aborted]
    metrics: Metrics = {}
    for turn in range(config.rollout.turns):
        rows = [record for record in real if record.turn == turn]
        if not rows:
            continue
        metrics[f"reward/turn_{turn + 1}"] = sum(row.reward for row in rows) / len(rows)
        metrics[f"correct/turn_{turn + 1}"] = sum(row.correct for row in rows) / len(rows)
        if any(not math.isnan(row.speedup) for row in rows):
            for p in THRESHOLDS[:3]:
                metrics[f"fast@{p:g}/turn_{turn + 1}"] = fast_at_p([_outcome(row) for row in rows], p)
    if real:
        metrics["reward/mean"] = sum(row.reward for row in real) / len(real)
        metrics["hack_rate"] = sum(row.hacked for row in real) / len(real)
        metrics["tokens/completion_mean"] = sum(row.tokens for row in real) / len(real)
        covered = [row.coverage for row in real if not math.isnan(row.coverage)]
        if covered:
            metrics["coverage/mean"] = sum(covered) / len(covered)
        right = [row.coverage for row in real if row.correct and not math.isnan(row.coverage)]
        if right:
            metrics["lazy_share"] = lazy_share(right)
        speeds = [row.speedup for row in real if row.correct and not math.isnan(row.speedup)]
        if speeds:
            metrics["speedup/mean"] = sum(speeds) / len(speeds)
    return metrics


def _outcome(row: RowRecord) -> Outcome:
    speed = None if math.isnan(row.speedup) else row.speedup
    return Outcome(str(row.prompt), row.sample, row.turn + 1, row.correct, speed, row.hacked)


def _keep_metrics(
    records: Sequence[RowRecord], mask: Tensor, matched: Tensor, drawn: Tensor, probability: Tensor
) -> Metrics:
    real = torch.tensor([record.turn >= 0 for record in records])
    counted, live = int(real.sum()), int(mask.sum())
    return {
        "rows/counted": float(counted),
        "rows/live": float(live),
        "rows/live_share": live / counted if counted else 0.0,
        "keep/mrs": float((matched & mask).sum()) / live if live else 0.0,
        "keep/prs": float((drawn & mask).sum()) / live if live else 0.0,
        "keep/all": float((matched & drawn & mask).sum()) / live if live else 0.0,
        "keep/prs_effective_rows": effective_rows(probability, mask),
    }
