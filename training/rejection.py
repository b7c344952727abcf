"""What leaves the batch: profiling-based rejection (PRS), void turns, the last-turn filter, padding.

PRS (arXiv 2602.05885, section on lazy optimisation) keeps a correct turn with a probability that rises with its
*coverage*, the share of device time spent in the candidate's own kernels. It depends on the outcome, so it changes the
objective: the expected gradient is that of ``A x p_keep``. :func:`soft_advantages` takes this expectation itself,
without the noise of a draw. Coverage that was not measured (NaN; no GPU) is never held against a turn.

The other rules stand in the released code and not in the paper; each is a function and an option of
:class:`BatchRules`, whose constants :data:`PAPER`, :data:`RELEASED` and :data:`CAUTIOUS` name the recipes. Row ids and
shapes are those of :mod:`drk.training.advantages`. Left out: the released code's dropping of a whole prompt because one
rollout returned nothing; here such rows are masked alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from drk.training import advantages as adv
from drk.training.advantages import AdvantageOptions, Ids, id_codes, turn_numbers
from drk.training.errors import OptionError, ShapeError

Pooling = Literal["turn", "geometric"]

COVERAGE_FLOOR = 1e-8
"""Coverage below it counts as it in a geometric mean (released code)."""


@dataclass(frozen=True)
class BatchRules:
    """Rules beyond the published formulas.

    Attributes:
        void_turns: mask a turn without reward that comes after a rewarded one (a regression after a success).
        last_turn_std: drop a prompt whose samples' last rewards have an unbiased deviation below this; None: keep.
        soft_prs: multiply advantages by the keep probability instead of drawing.
        padding: how rows are filled up to a multiple: ``masked`` rows, or ``duplicate`` ones (which get double weight).
        advantages: options of :func:`drk.training.advantages.turn_advantages`.
    """

    void_turns: bool = False
    last_turn_std: float | None = None
    soft_prs: bool = False
    padding: Literal["masked", "duplicate"] = "masked"
    advantages: AdvantageOptions = adv.RELEASED


PAPER = BatchRules()
"""The published formulas and nothing else (N = 1 and rejected rows, on which they are silent, as released)."""
RELEASED = BatchRules(void_turns=True, last_turn_std=1e-3, padding="duplicate")
"""The released code with its recipe."""
CAUTIOUS = BatchRules(soft_prs=True, advantages=adv.CAUTIOUS)
"""drk's own: no draw, regressions keep their negative advantage, rejected rows leave the baseline."""


def prs_keep_probability(
    coverage: Tensor,
    correct: Tensor,
    *,
    threshold: float = 0.3,
    width: float = 0.1,
    pooling: Pooling = "turn",
    sample: Ids | None = None,
    speedup: Tensor | None = None,
    speedup_threshold: float | None = None,
) -> Tensor:
    """Return ``clip((coverage - threshold) / width, 0, 1)`` for correct turns, 1 for all others: ``[R]``.

    Args:
        coverage: ``[R]``, 0..1; NaN where it was not measured (kept). Exact, where the released code rounds to two
            decimals first.
        correct: ``[R]``, true for turns that are correct and honest.
        threshold: coverage at which keeping starts.
        width: rise from 0 to 1; 0 is a hard cut at ``coverage >= threshold``.
        pooling: ``turn``: each turn by its own coverage (recipe); ``geometric``: by the geometric mean over all of its
            sample's turns with a measured coverage (set padding and masked rows to NaN).
        sample: ``[R]`` ids unique over the batch; needed for ``geometric``.
        speedup: ``[R]``, needed with ``speedup_threshold``.
        speedup_threshold: a turn at least this fast is kept whatever its coverage. None or negative: off (recipe).

    Raises:
        ShapeError: lengths differ.
        OptionError: an unknown pooling, a negative width, or a companion argument is missing.
    """
    if pooling not in get_args(Pooling):
        raise OptionError(f"unknown pooling {pooling!r}", help=f"one of {', '.join(get_args(Pooling))}")
    if width < 0:
        raise OptionError(f"width must be >= 0, got {width}")
    if coverage.dim() != 1 or coverage.shape != correct.shape:
        raise ShapeError(f"coverage and correct must share a shape [R]: {coverage.shape}, {correct.shape}")
    pooled = coverage.detach() if coverage.is_floating_point() else coverage.to(torch.float32)
    if pooling == "geometric":
        if sample is None:
            raise OptionError("pooling='geometric' needs sample ids")
        pooled = _geometric_mean(pooled, sample)
    keep = (pooled >= threshold).to(pooled.dtype) if width == 0 else ((pooled - threshold) / width).clamp(0.0, 1.0)
    judged = (correct > 0) & ~pooled.isnan()
    if speedup_threshold is not None and speedup_threshold >= 0:
        if speedup is None:
            raise OptionError("speedup_threshold needs speedup")
        if speedup.shape != coverage.shape:
            raise ShapeError(f"speedup must have shape {list(coverage.shape)}, got {list(speedup.shape)}")
        judged &= ~(speedup >= speedup_threshold)
    return torch.where(judged, keep, torch.ones_like(keep))


def prs_draw(probability: Tensor, *, generator: torch.Generator) -> Tensor:
    """Draw which rows stay, bool ``[R]``, from an own generator, so that a run can be repeated.

    The draw is made on the generator's device, whose stream it advances by one number a row.
    """
    uniform = torch.rand(probability.shape, generator=generator, device=generator.device, dtype=torch.float32)
    return uniform.to(probability.device) < probability


def soft_advantages(advantages: Tensor, probability: Tensor) -> Tensor:
    """Return ``A x p_keep``: the expected gradient of a drawn PRS without its noise. Shapes ``[R]``.

    ``advantages`` must come from groups in which rejected rows count (no ``keep`` given): every row stays.

    Raises:
        ShapeError: shapes differ.
    """
    if advantages.shape != probability.shape:
        raise ShapeError(f"advantages {list(advantages.shape)} and probability {list(probability.shape)} differ")
    return advantages * probability


def effective_rows(probability: Tensor, mask: Tensor) -> float:
    """Return ``(sum p)^2 / sum p^2`` over live rows: how many full rows the soft weights are worth (Kish)."""
    weight = probability.detach().double() * (mask > 0)
    squares = float(weight.square().sum())
    return float(weight.sum()) ** 2 / squares if squares > 0 else 0.0


def turn_mask(rewards: Tensor, *, sample: Ids, turn: Ids, aborted: Tensor | None = None, void: bool = True) -> Tensor:
    """Return which turns count, bool ``[R]``: no padding, no sample that broke off, no void turn.

    A turn is void when its reward is <= 0 and an earlier turn of its sample had one > 0 (released code, not in the
    paper). Masked this way it leaves both the loss and the baseline.

    Args:
        rewards: ``[R]``.
        sample: ``[R]`` ids unique over the batch.
        turn: ``[R]``, -1 for padding.
        aborted: ``[R]``, true on any row of a sample that ended in an error or a timeout of ours: all its rows go.
        void: apply the void-turn rule.

    Raises:
        ShapeError: lengths differ.
    """
    rows = rewards.shape[0]
    codes, turns = id_codes(sample, rows=rows, name="sample"), turn_numbers(turn, rows=rows)
    values = rewards.detach().cpu()
    live = turns >= 0
    if aborted is not None:
        if aborted.shape != rewards.shape:
            raise ShapeError(f"aborted must have shape {list(rewards.shape)}, got {list(aborted.shape)}")
        broken = torch.zeros(rows, dtype=torch.int64).index_add_(0, codes, (aborted.cpu() > 0).to(torch.int64))
        live &= broken[codes] == 0
    if void:
        never = torch.iinfo(torch.int64).max
        first = torch.full((rows,), never, dtype=torch.int64)
        won = torch.where((values > 0) & (turns >= 0), turns, torch.full_like(turns, never))
        first = first.scatter_reduce(0, codes, won, reduce="amin")
        live &= ~((values <= 0) & (first[codes] < turns))
    return live.to(rewards.device)


def last_turn_filter(
    rewards: Tensor, *, prompt: Ids, sample: Ids, turn: Ids, mask: Tensor, min_std: float = 1e-3, min_samples: int = 2
) -> Tensor:
    """Return which rows belong to prompts that can teach, bool ``[R]`` (released code; like DAPO's filter).

    A prompt is dropped whole when its samples' last live turns have rewards with an unbiased deviation below
    ``min_std``, or when fewer than ``min_samples`` samples are live (released code: n/2 + 1 of n).
    Honest limit: it looks at last turns only, so it drops prompts whose earlier turns differ.

    Raises:
        ShapeError: lengths differ.
    """
    rows = rewards.shape[0]
    prompts, turns = id_codes(prompt, rows=rows, name="prompt").tolist(), turn_numbers(turn, rows=rows).tolist()
    samples = id_codes(sample, rows=rows, name="sample").tolist()
    if mask.shape != rewards.shape:
        raise ShapeError(f"mask must have shape {list(rewards.shape)}, got {list(mask.shape)}")
    live, values = (mask.detach().cpu() > 0).tolist(), rewards.detach().double().cpu().tolist()
    last: dict[int, dict[int, tuple[int, float]]] = {}
    for row in range(rows):
        if live[row] and turns[row] >= 0:
            ends = last.setdefault(prompts[row], {})
            ends[samples[row]] = max(ends.get(samples[row], (-1, 0.0)), (turns[row], values[row]))
    teaches = {
        name: _spread([value for _, value in ends.values()], min_samples) >= min_std for name, ends in last.items()
    }
    return torch.tensor([teaches.get(name, False) for name in prompts], dtype=torch.bool, device=rewards.device)


def batch_mask(
    rewards: Tensor,
    *,
    prompt: Ids,
    sample: Ids,
    turn: Ids,
    aborted: Tensor | None = None,
    min_samples: int = 2,
    rules: BatchRules = PAPER,
) -> Tensor:
    """Return the ``mask`` for :func:`drk.training.advantages.turn_advantages` under ``rules``, bool ``[R]``.

    :func:`turn_mask`, then :func:`last_turn_filter` over what it leaves, each where ``rules`` ask for it. Here
    ``sample`` need be unique within its prompt only.

    Raises:
        ShapeError: lengths differ.
    """
    rows = rewards.shape[0]
    pairs = zip(
        id_codes(prompt, rows=rows, name="prompt").tolist(),
        id_codes(sample, rows=rows, name="sample").tolist(),
        strict=True,
    )
    live = turn_mask(rewards, sample=list(pairs), turn=turn, aborted=aborted, void=rules.void_turns)
    if rules.last_turn_std is None:
        return live
    return live & last_turn_filter(
        rewards,
        prompt=prompt,
        sample=sample,
        turn=turn,
        mask=live,
        min_std=rules.last_turn_std,
        min_samples=min_samples,
    )


def pad_rows(rows: int, *, multiple: int, how: Literal["masked", "duplicate"] = "masked") -> tuple[Tensor, Tensor]:
    """Return ``(index[R'], live[R'])``: which row to take, and whether it counts, filled up to a multiple.

    Both ways repeat the first rows (around, if need be). ``masked``: the repeats do not count. ``duplicate``: they do,
    as in the released code, so that the first rows get double weight.

    Raises:
        OptionError: ``multiple`` below 1.
        ShapeError: no row to repeat.
    """
    if multiple < 1:
        raise OptionError(f"multiple must be >= 1, got {multiple}")
    if rows < 1:
        raise ShapeError("no rows to pad")
    index = torch.arange(math.ceil(rows / multiple) * multiple)
    live = (index < rows) if how == "masked" else torch.ones_like(index, dtype=torch.bool)
    return index % rows, live


def _geometric_mean(coverage: Tensor, sample: Ids) -> Tensor:
    codes = id_codes(sample, rows=coverage.shape[0], name="sample").to(coverage.device)
    known = ~coverage.isnan()
    logs = coverage.clamp(min=COVERAGE_FLOOR).log().where(known, torch.zeros_like(coverage))
    total = torch.zeros_like(coverage).index_add_(0, codes, logs)
    count = torch.zeros_like(coverage).index_add_(0, codes, known.to(coverage.dtype))
    return (total / count)[codes].exp()  # 0/0 where nothing was measured: NaN, hence kept


def _spread(values: list[float], min_samples: int) -> float:
    if len(values) < max(min_samples, 2):
        return -1.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
