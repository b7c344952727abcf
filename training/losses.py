"""The policy loss: clipped, dual-clipped, aggregated as the paper's recipe does (arXiv 2602.05885, settings).

With ``ratio = exp(logp - old_logp)`` a token's loss is ``max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))``
(PPO with "clip-higher"), for negative advantages capped at ``-A dual_clip`` (dual clip, arXiv 1912.09729). The recipe
sums tokens, averages rows and divides by a constant; it makes one step a batch, so that the ratio is 1, no clip is ever
active, and the loss is plain REINFORCE.

Left out: KL to a reference in the loss (its weight is 0 in the recipe; :func:`kl_divergence` is there to log it),
entropy terms, GSPO. A batch without tokens yields 0 with zero gradients, since other ranks may have some: call
:func:`require_tokens` on the gathered counts before stepping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from drk.training.errors import EmptyBatchError, OptionError, ShapeError

Aggregation = Literal["seq-mean-token-sum", "seq-mean-token-mean", "token-mean"]
Estimate = Literal["k1", "k2", "k3"]

EXPONENT_LIMIT = 20.0
"""Log ratios are clamped to +-20 before exp; beyond it the gradient is 0."""


def policy_loss(  # noqa: PLR0913 - the formula's own arguments
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
    aggregation: Aggregation = "seq-mean-token-sum",
    scale: float = 1000.0,
    weights: Tensor | None = None,
    rows: float | None = None,
) -> Tensor:
    """Return the loss to minimise, a scalar that carries gradients of ``logp`` only.

    Args:
        logp: ``[R, L]`` log-probabilities under the model that learns.
        old_logp: ``[R, L]`` before the update (for one step a batch: ``logp.detach()``).
        advantages: ``[R]``, or ``[R, L]``.
        mask: ``[R, L]``, 1 on tokens that count; rejected rows are all 0. Other positions may hold anything.
        clip_low: the ratio's lower clip is ``1 - clip_low``.
        clip_high: the upper one is ``1 + clip_high``.
        dual_clip: bound > 1 on the ratio for negative advantages; None: off.
        aggregation: ``seq-mean-token-sum`` (recipe): sum over tokens, mean over rows that have some;
            ``seq-mean-token-mean``; ``token-mean``: mean over all tokens.
        scale: the loss is divided by it (1000 in the recipe).
        weights: ``[R, L]`` or ``[R]`` importance weights on the token losses; no gradient flows into them.
        rows: divisor of the ``seq-mean`` forms instead of the rows that have tokens. Give the planned number (prompts x
            rollouts x turns) and the step does not grow when rows are rejected, and micro-batches add up (recipe).

    Raises:
        ShapeError: shapes do not fit.
        OptionError: an unknown aggregation, or a number that makes no sense.
    """
    if aggregation not in get_args(Aggregation):
        raise OptionError(f"unknown aggregation {aggregation!r}", help=f"one of {', '.join(get_args(Aggregation))}")
    if scale <= 0 or (rows is not None and rows <= 0):
        raise OptionError(f"scale and rows must be positive, got scale={scale}, rows={rows}")
    live = mask > 0
    token = _token_loss(logp, old_logp, advantages, live, (clip_low, clip_high, dual_clip))
    if weights is not None:
        token = token * _by_token(weights.detach(), live, "weights").where(live, torch.zeros_like(token))
    if aggregation == "token-mean":
        return token.sum() / live.sum().clamp(min=1) / scale
    count = live.sum(dim=1)
    by_row = token.sum(dim=1)
    if aggregation == "seq-mean-token-mean":
        by_row = by_row / count.clamp(min=1)
    divisor = (count > 0).sum().clamp(min=1) if rows is None else rows
    return by_row.sum() / divisor / scale


@dataclass(frozen=True)
class LossStatistics:
    """Shares of tokens (0..1), and the estimate ``k1`` of KL(old || new) in nats.

    ``below`` and ``above`` count ratios outside the clip range whatever the advantage's sign; ``dual`` those that the
    dual clip binds.
    """

    k1_kl: float
    below: float
    above: float
    dual: float

    @property
    def outside(self) -> float:
        """Share of ratios outside the clip range."""
        return self.below + self.above


def loss_statistics(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 3.0,
) -> LossStatistics:
    """Return what clipping did, with the arguments of :func:`policy_loss`; all 0 without tokens.

    Raises:
        ShapeError: shapes do not fit.
    """
    live = mask > 0
    advantage = _by_token(advantages.detach(), live, "advantages")
    delta = _log_ratio(logp.detach(), old_logp, live)
    ratio = delta.exp()
    bound = torch.zeros_like(live) if dual_clip is None else live & (advantage < 0) & (ratio > dual_clip)
    sums = [-delta.sum(), (live & (ratio < 1 - clip_low)).sum(), (live & (ratio > 1 + clip_high)).sum(), bound.sum()]
    tokens = live.sum().clamp(min=1)
    numbers: list[float] = (torch.stack([value.double() for value in sums]) / tokens).tolist()
    return LossStatistics(*numbers)


def kl_divergence(logp: Tensor, reference_logp: Tensor, *, estimate: Estimate = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) for each token, same shape, from samples of the policy.

    ``k1``: ``logp - ref`` (unbiased, any sign); ``k2``: half its square; ``k3``: ``exp(ref - logp) - (ref - logp) - 1``
    (unbiased, never negative), as in Schulman's note on approximating KL.

    Raises:
        ShapeError: shapes differ.
        OptionError: an unknown estimate.
    """
    if logp.shape != reference_logp.shape:
        raise ShapeError(f"logp {list(logp.shape)} and reference_logp {list(reference_logp.shape)} differ")
    delta = reference_logp - logp
    if estimate == "k1":
        return -delta
    if estimate == "k2":
        return delta.square() / 2
    if estimate == "k3":
        delta = delta.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
        return delta.exp() - delta - 1
    raise OptionError(f"unknown estimate {estimate!r}", help=f"one of {', '.join(get_args(Estimate))}")


def require_tokens(mask: Tensor) -> int:
    """Return how many tokens count.

    Raises:
        EmptyBatchError: none.
    """
    tokens = int((mask > 0).sum())
    if tokens == 0:
        raise EmptyBatchError(
            "rejection left no token to train on",
            help="widen the mismatch bounds, or sample and train in the same precision",
        )
    return tokens


def _token_loss(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, live: Tensor, clips: tuple[float, float, float | None]
) -> Tensor:
    low, high, dual = clips
    if not 0 <= low <= 1 or high < 0 or (dual is not None and dual <= 1):
        raise OptionError(f"need 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1; got {low}, {high}, {dual}")
    advantage = _by_token(advantages.detach(), live, "advantages")
    ratio = _log_ratio(logp, old_logp, live).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * dual), loss)
    return loss.where(live, torch.zeros_like(loss))


def _log_ratio(logp: Tensor, old_logp: Tensor, live: Tensor) -> Tensor:
    if logp.dim() != 2 or not logp.shape == old_logp.shape == live.shape:
        shapes = [list(tensor.shape) for tensor in (logp, old_logp, live)]
        raise ShapeError(f"logp, old_logp and mask must share a shape [R, L], got {shapes}")
    delta = _at_least_float32(logp) - _at_least_float32(old_logp.detach())
    # where before exp: padding may hold -inf or NaN, which would spoil the gradient even under a zero.
    return delta.where(live, torch.zeros_like(delta)).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)


def _by_token(values: Tensor, live: Tensor, name: str) -> Tensor:
    if values.dim() == 1 and values.shape[0] == live.shape[0]:
        return _at_least_float32(values)[:, None].expand(live.shape)
    if values.shape == live.shape:
        return _at_least_float32(values)
    raise ShapeError(f"{name} must have shape [R] or [R, L] = {list(live.shape)}, got {list(values.shape)}")


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
