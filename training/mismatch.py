"""Sampler against trainer: mismatch rejection (MRS), truncated importance weights, and what to log about both.

The sampler (vLLM, or a cached ``generate``) and the trainer compute slightly different log-probabilities for the same
tokens. With ``delta = logp_train - logp_rollout`` on completion tokens, MRS (arXiv 2602.05885, section on training
stability) keeps rows whose *geometric mean ratio* ``exp(mean delta)`` lies in a narrow band, and vetoes a turn in which
any single token ratio is tiny. ``rollout_logp`` must belong to the distribution that was sampled from: after
temperature, without truncation.

Honest limits: the mean of a signed delta can cancel, so two wrongs pass. The band 0.999..1.001 presumes long
completions or fp32: in bf16 the mean over 48 tokens strays by 0.002 to 0.018, and nothing is kept. The bounds are
settings; log :func:`diagnostics` and the kept share, and never step on an empty batch.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from drk.training.advantages import Ids, id_codes
from drk.training.errors import OptionError, ShapeError

Level = Literal["trajectory", "turn"]
WeightLevel = Literal["token", "turn", "trajectory"]

EXPONENT_LIMIT = 20.0
"""Sums of deltas are clamped to +-20 before exp (released code)."""


def mrs_keep(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    sample: Ids,
    level: Level = "trajectory",
    low: float | None = 0.999,
    high: float = 1.001,
    token_veto: float | None = 1e-4,
) -> Tensor:
    """Return which rows stay, bool ``[R]``: ratio in ``low..high`` (inclusive) and no vetoed token.

    A row without tokens has nothing to veto; it follows its trajectory. A NaN on a completion token rejects.

    Args:
        train_logp: ``[R, L]`` log-probabilities under the trainer's model before the update, natural logarithm.
        rollout_logp: ``[R, L]`` the sampler's.
        mask: ``[R, L]``, 1 on completion tokens; other positions may hold anything.
        sample: ``[R]`` ids unique over the batch.
        level: ``trajectory``: one ratio over all tokens of all turns of a sample; ``turn``: one a row.
        low: lower bound; None is ``1 / high``.
        high: upper bound.
        token_veto: a turn (not its trajectory) is dropped when a token's ratio is below this; None or 0: off.

    Raises:
        ShapeError: shapes differ.
        OptionError: an unknown level, or bounds that no ratio meets.
    """
    ratio = geometric_ratio(train_logp, rollout_logp, mask, sample=sample, level=level)
    low = 1.0 / high if low is None else low
    if not low <= high:
        raise OptionError(f"no ratio lies between low={low} and high={high}")
    keep = (ratio >= low) & (ratio <= high)  # false for NaN
    if token_veto:
        delta = _delta(train_logp, rollout_logp, mask)
        keep &= ~(delta < math.log(token_veto)).any(dim=1)
    return keep


def geometric_ratio(
    train_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, sample: Ids, level: Level = "trajectory"
) -> Tensor:
    """Return ``exp(mean delta)`` for each row, ``[R]`` float32; 1 where there is no token.

    Raises:
        ShapeError: shapes differ.
        OptionError: an unknown level.
    """
    if level not in get_args(Level):
        raise OptionError(f"unknown level {level!r}", help=f"one of {', '.join(get_args(Level))}")
    delta = _delta(train_logp, rollout_logp, mask)
    total, count = delta.sum(dim=1), (mask > 0).sum(dim=1)
    if level == "trajectory":
        codes = id_codes(sample, rows=delta.shape[0], name="sample").to(delta.device)
        total, count = _pooled(total, codes), _pooled(count, codes)
    return (total / count.clamp(min=1)).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def importance_weights(
    train_logp: Tensor,
    rollout_logp: Tensor,
    mask: Tensor,
    *,
    sample: Ids | None = None,
    level: WeightLevel = "token",
    cap: float = 2.0,
) -> Tensor:
    """Return truncated importance weights ``min(ratio, cap)``, ``[R, L]`` float32, 0 off the mask, no gradient.

    Not part of the paper's recipe. ``token`` weighs each token by its own ratio, ``turn`` and ``trajectory`` by the
    *product* of the ratios of the row or of the sample (high variance on long texts). No lower bound.

    Raises:
        ShapeError: shapes differ.
        OptionError: an unknown level, ``cap`` not positive, or ``trajectory`` without sample ids.
    """
    if level not in get_args(WeightLevel):
        raise OptionError(f"unknown level {level!r}", help=f"one of {', '.join(get_args(WeightLevel))}")
    if cap <= 0:
        raise OptionError(f"cap must be positive, got {cap}")
    delta = _delta(train_logp, rollout_logp, mask)
    if level != "token":
        total = delta.sum(dim=1)
        if level == "trajectory":
            if sample is None:
                raise OptionError("level='trajectory' needs sample ids")
            total = _pooled(total, id_codes(sample, rows=delta.shape[0], name="sample").to(delta.device))
        delta = total[:, None].expand_as(delta)
    ratio = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp().clamp(max=cap)
    return ratio.where(mask > 0, torch.zeros_like(ratio))


def diagnostics(
    train_logp: Tensor, rollout_logp: Tensor, mask: Tensor, *, token_veto: float = 1e-4
) -> dict[str, float]:
    """Return how far sampler and trainer are apart, over rows that have tokens.

    ``training_ppl``, ``rollout_ppl`` (means over rows), ``training_log_ppl``, ``rollout_log_ppl``;
    ``log_ppl_diff``, ``log_ppl_abs_diff``, ``log_ppl_diff_max``, ``log_ppl_diff_min`` (training minus rollout) and
    ``ppl_ratio`` by row; ``k1_kl`` and ``k3_kl``, estimates of KL(rollout || training) by token; ``abs_delta``, which
    unlike ``k1_kl`` cannot cancel; ``chi2_token``, ``chi2_turn`` (``E[ratio^2] - 1``); ``veto_fraction`` of rows and
    ``veto_token_fraction`` of tokens with a ratio below ``token_veto``. Natural logarithms. Empty where no row has a
    token.

    Raises:
        ShapeError: shapes differ.
    """
    delta = _delta(train_logp, rollout_logp, mask)
    live = mask > 0
    some = live.any(dim=1)
    if not bool(some.any()):
        return {}
    delta, live = delta[some], live[some]
    count, tokens = live.sum(dim=1), live.sum()
    train = -_masked_sum(train_logp[some], live) / count
    rollout = -_masked_sum(rollout_logp[some], live) / count
    gap = train - rollout
    vetoed = live & (delta < math.log(token_veto))
    double = (2 * delta).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    by_turn = (2 * delta.sum(dim=1)).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    ratio = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()
    return _floats(
        {
            "training_ppl": train.exp().mean(),
            "training_log_ppl": train.mean(),
            "rollout_ppl": rollout.exp().mean(),
            "rollout_log_ppl": rollout.mean(),
            "log_ppl_diff": gap.mean(),
            "log_ppl_abs_diff": gap.abs().mean(),
            "log_ppl_diff_max": gap.max(),
            "log_ppl_diff_min": gap.min(),
            "ppl_ratio": gap.exp().mean(),
            "k1_kl": -delta.sum() / tokens,
            "k3_kl": _masked_sum(ratio - delta - 1, live).sum() / tokens,
            "abs_delta": delta.abs().sum() / tokens,
            "chi2_token": _masked_sum(double, live).sum() / tokens - 1,
            "chi2_turn": by_turn.mean() - 1,
            "veto_fraction": vetoed.any(dim=1).to(torch.float32).mean(),
            "veto_token_fraction": vetoed.sum() / tokens,
        }
    )


def ratio_statistics(
    ratio: Tensor, mask: Tensor, *, low: float | None = 0.999, high: float = 1.001
) -> dict[str, float]:
    """Return statistics of ratios or weights, over tokens and over rows that have tokens.

    By token: ``mean``, ``std`` (population; of ratios clamped to the bounds), ``min``, ``max``, ``fraction_low``,
    ``fraction_high``, ``effective_share`` (Kish's effective sample size of the clamped ratios over the number of
    tokens, 0..1). By row, each row's mean over its tokens: ``turn_mean``, ``turn_std`` (unbiased, 0 for one row),
    ``turn_min``, ``turn_max``, ``turn_max_deviation`` from 1, ``turn_fraction_low``, ``turn_fraction_high``.
    Empty where no row has a token.

    Args:
        ratio: ``[R]`` (spread over the row's tokens) or ``[R, L]``.
        mask: ``[R, L]``.
        low: lower bound; None is ``1 / high``.
        high: upper bound.

    Raises:
        ShapeError: shapes do not fit.
    """
    live = mask > 0
    if ratio.dim() not in (1, 2) or ratio.shape[0] != mask.shape[0] or (ratio.dim() == 2 and ratio.shape != mask.shape):
        raise ShapeError(f"ratio {list(ratio.shape)} does not fit mask {list(mask.shape)}")
    low = 1.0 / high if low is None else low
    spread = ratio[:, None].expand(mask.shape) if ratio.dim() == 1 else ratio
    some = live.any(dim=1)
    if not bool(some.any()):
        return {}
    values = spread[live].to(torch.float32)
    rows = (_masked_sum(spread, live)[some] / live.sum(dim=1)[some]).to(torch.float32)
    # float64: a narrow band's variance is a millionth of its square.
    clamped = values.double().clamp(low, high)
    return _floats(
        {
            "mean": values.mean(),
            "std": clamped.std(unbiased=False),
            "min": values.min(),
            "max": values.max(),
            "fraction_low": (values < low).to(torch.float32).mean(),
            "fraction_high": (values > high).to(torch.float32).mean(),
            "effective_share": clamped.mean().square() / clamped.square().mean(),
            "turn_mean": rows.mean(),
            "turn_std": rows.std() if rows.numel() > 1 else rows.new_zeros(()),
            "turn_min": rows.min(),
            "turn_max": rows.max(),
            "turn_max_deviation": (rows - 1).abs().max(),
            "turn_fraction_low": (rows < low).to(torch.float32).mean(),
            "turn_fraction_high": (rows > high).to(torch.float32).mean(),
        }
    )


def rejected_fractions(keep: Tensor, mask: Tensor) -> dict[str, float]:
    """Return ``token_fraction`` and ``turn_fraction`` rejected by ``keep`` ``[R]``, among rows that have tokens."""
    count = (mask > 0).sum(dim=1)
    some = count > 0
    if not bool(some.any()):
        return {}
    gone = (~(keep > 0)) & some
    return _floats(
        {
            "token_fraction": (count * gone).sum() / count.sum(),
            "turn_fraction": gone.sum() / some.sum(),
        }
    )


def _delta(train_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    if train_logp.dim() != 2 or not train_logp.shape == rollout_logp.shape == mask.shape:
        shapes = [list(tensor.shape) for tensor in (train_logp, rollout_logp, mask)]
        raise ShapeError(f"train_logp, rollout_logp and mask must share a shape [R, L], got {shapes}")
    delta = train_logp.detach().to(torch.float32) - rollout_logp.detach().to(torch.float32)
    # where, not a product: padding may hold -inf or NaN.
    return delta.where(mask > 0, torch.zeros_like(delta))


def _pooled(values: Tensor, codes: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, codes, values)[codes]


def _masked_sum(values: Tensor, live: Tensor) -> Tensor:
    values = values.detach().to(torch.float32)
    return values.where(live, torch.zeros_like(values)).sum(dim=1)


def _floats(values: dict[str, Tensor]) -> dict[str, float]:
    """One transfer from the device for all numbers together."""
    numbers: list[float] = torch.stack([value.double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
