"""Turn-level returns and advantages: TRLOO and its relatives (arXiv 2602.05885, section on turn-level REINFORCE).

A row is one turn of one sample. ``[R]`` tensors hold one number a row, in any order; ids (``prompt``, ``sample``) are
tensors or plain sequences of hashable values, ``turn`` is an integer >= 0 (or -1: a padding row, which counts for
nothing). Samples are told apart by (prompt, sample), so that sample numbers may start again in each prompt.

The estimators are points of one small family, ``advantage = G - baseline(group)``:

==============  ===================  ==============  ==========================================================
estimator       group                baseline        note
==============  ===================  ==============  ==========================================================
``trloo``       (prompt, turn)       mean of others  N/(N-1) (G - mean G): unbiased
``grpo``        (prompt, turn)       mean of all     (1 - 1/N) x trloo: shrinks small groups most
``rloo``        prompt, turns mixed  mean of others  a sample's other turns stay in its baseline: not unbiased
``reinforce``   the whole batch      mean of all     divided by the batch's standard deviation
==============  ===================  ==============  ==========================================================

Honest limits: with equal N, trloo and grpo differ by a constant factor, which Adam removes; they differ in effect only
where group sizes do. Nothing here is differentiable, and nothing here gathers over ranks: give it the whole batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from drk.training.errors import NotFiniteError, OptionError, ShapeError

Estimator = Literal["trloo", "grpo", "rloo", "reinforce"]
Ids = Tensor | Sequence[Hashable]

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it; a group's deviation below it counts as 1."""


@dataclass(frozen=True)
class AdvantageOptions:
    """Choices on which texts and code differ; the defaults are those of the released code.

    Attributes:
        singleton: what a row alone in its group gets under a leave-one-out or mean baseline. ``return``: its return,
            uncentred (released code; unbiased, high variance). ``zero``: nothing (biased, but no uncentred outliers).
        rejected_in_baseline: whether rows with ``keep`` false stay in their group's baseline (released code: yes).
            If not, N counts kept rows only.
        group: overrides the estimator's grouping.
        scale: ``group_std`` divides by the group's unbiased deviation (of the other rows for leave-one-out
            estimators), ``batch_std`` standardises all live advantages at the end, without an epsilon.
    """

    singleton: Literal["return", "zero"] = "return"
    rejected_in_baseline: bool = True
    group: Literal["turn", "prompt"] | None = None
    scale: Literal["none", "group_std", "batch_std"] = "none"


RELEASED = AdvantageOptions()
"""The released code's choices."""
CAUTIOUS = AdvantageOptions(singleton="zero", rejected_in_baseline=False)
"""drk's own: a lone row teaches nothing, and a rejected row leaves the baseline too."""


def id_codes(ids: Ids, *, rows: int, name: str) -> Tensor:
    """Return dense codes ``0..K-1`` (int64 ``[R]``, on the CPU) for ids of any hashable kind.

    Raises:
        ShapeError: not one id a row.
    """
    values: list[Hashable] = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    if len(values) != rows or (isinstance(ids, Tensor) and ids.dim() != 1):
        raise ShapeError(f"{name} must give one id a row: {rows} rows, {len(values)} ids")
    codes: dict[Hashable, int] = {}
    return torch.tensor([codes.setdefault(value, len(codes)) for value in values], dtype=torch.int64)


def turn_numbers(turn: Ids, *, rows: int) -> Tensor:
    """Return ``turn`` as int64 ``[R]`` on the CPU.

    Raises:
        ShapeError: not one whole number >= -1 a row.
    """
    numbers = torch.as_tensor(turn).detach().cpu()
    if numbers.shape != (rows,) or numbers.is_floating_point():
        raise ShapeError(f"turn must give one whole number a row: {rows} rows, got shape {tuple(numbers.shape)}")
    if rows and int(numbers.min()) < -1:
        raise ShapeError("turn must be >= 0, or -1 for a padding row")
    return numbers.to(torch.int64)


def _row_vector(values: Tensor, name: str, *, rows: int | None = None) -> Tensor:
    if values.dim() != 1 or (rows is not None and values.shape[0] != rows):
        wanted = "[R]" if rows is None else f"[{rows}]"
        raise ShapeError(f"{name} must have shape {wanted}, got {list(values.shape)}")
    return values


def reward_to_go(rewards: Tensor, *, sample: Ids, turn: Ids, gamma: float = 1.0) -> Tensor:
    """Return ``G_t = r_t + gamma G_{t+1}`` along the turns of each sample, ``[R]``.

    Rows may come in any order. A missing turn counts as one with reward 0, so that a later one is discounted by the
    difference of turn numbers. Padding rows (turn -1) get 0 and add nothing. Whole-number rewards become float32.

    Args:
        rewards: ``[R]``, one reward a turn.
        sample: ``[R]``, unique over the batch.
        turn: ``[R]``, >= 0, or -1 for padding.
        gamma: discount, 0 to 1 (1.0 in the paper's recipe).

    Raises:
        ShapeError: lengths differ, or a sample has one turn twice.
        OptionError: ``gamma`` outside 0..1.
    """
    if not 0.0 <= gamma <= 1.0:
        raise OptionError(f"gamma must lie in 0..1, got {gamma}")
    rows = _row_vector(rewards, "rewards").shape[0]
    codes = id_codes(sample, rows=rows, name="sample")
    turns = turn_numbers(turn, rows=rows)
    rewards = rewards.detach() if rewards.is_floating_point() else rewards.to(torch.float32)
    device, rewards = rewards.device, rewards.cpu()
    live = turns >= 0
    if torch.unique(torch.stack([codes[live], turns[live]]), dim=1).shape[1] != int(live.sum()):
        raise ShapeError("a sample has the same turn twice; sample ids must be unique over the batch")
    returns = torch.zeros_like(rewards)
    carry = torch.zeros(rows, dtype=rewards.dtype)
    last = torch.zeros(rows, dtype=torch.int64)
    for number in sorted(set(turns[live].tolist()), reverse=True):
        here = turns == number
        who = codes[here]
        discount = torch.as_tensor(gamma, dtype=rewards.dtype) ** (last[who] - number).clamp(min=1)
        carry[who] = rewards[here] + discount * carry[who]
        last[who] = number
        returns[here] = carry[who]
    return returns.to(device)


def turn_advantages(  # noqa: PLR0913 - the formula's own arguments
    rewards: Tensor,
    *,
    prompt: Ids,
    sample: Ids,
    turn: Ids,
    mask: Tensor,
    estimator: Estimator = "trloo",
    gamma: float = 1.0,
    keep: Tensor | None = None,
    options: AdvantageOptions = RELEASED,
) -> Tensor:
    """Return one advantage a row, ``[R]``; 0 for padding, masked and rejected rows.

    Args:
        rewards: ``[R]`` reward of each turn.
        prompt: ``[R]`` id of the task; all its samples compete with each other.
        sample: ``[R]`` id of the sample, unique within its prompt.
        turn: ``[R]`` turn number, -1 for padding.
        mask: ``[R]``, 0 or false: the row is no part of the batch. Its reward counts as 0 in earlier turns' returns,
            and it leaves its group. A fault of the gym and a void turn are masked.
        estimator: see the module.
        gamma: discount of the reward-to-go.
        keep: ``[R]``, false: rejected (PRS, MRS). Its reward counts in earlier turns' returns; whether it stays in
            the baseline is ``options.rejected_in_baseline``.
        options: choices on which texts and code differ.

    Raises:
        ShapeError: lengths differ, or a sample has one turn twice.
        OptionError: ``estimator`` is not known, or ``gamma`` outside 0..1.
        NotFiniteError: a live row's reward is NaN or infinite.
    """
    if estimator not in get_args(Estimator):
        raise OptionError(f"unknown estimator {estimator!r}", help=f"one of {', '.join(get_args(Estimator))}")
    rows = _row_vector(rewards, "rewards").shape[0]
    device = rewards.device
    prompts = id_codes(prompt, rows=rows, name="prompt")
    samples = id_codes(sample, rows=rows, name="sample")
    turns = turn_numbers(turn, rows=rows)
    live = (_row_vector(mask, "mask", rows=rows).detach().cpu() > 0) & (turns >= 0)
    kept = live if keep is None else live & (_row_vector(keep, "keep", rows=rows).detach().cpu() > 0)
    # where, not a product: a masked row's reward may be NaN (nothing was measured).
    counted = rewards.detach().cpu().where(live, torch.zeros((), dtype=rewards.dtype))
    if not bool(torch.isfinite(counted).all()):
        raise NotFiniteError("a live turn's reward is not finite", help="mask turns that were not judged")
    returns = reward_to_go(
        counted, sample=list(zip(prompts.tolist(), samples.tolist(), strict=True)), turn=turns, gamma=gamma
    )
    members = live if options.rejected_in_baseline else kept
    if estimator == "reinforce":
        advantages = _whitened(returns, members)
    else:
        by_turn = options.group == "turn" or (options.group is None and estimator != "rloo")
        keys = list(zip(prompts.tolist(), turns.tolist(), strict=True)) if by_turn else prompts
        groups = id_codes(keys, rows=rows, name="group")
        advantages = _centred(returns, groups, members, leave_one_out=estimator != "grpo", options=options)
    if options.scale == "batch_std":
        advantages = _standardised(advantages, members)
    return advantages.where(kept, torch.zeros((), dtype=advantages.dtype)).to(device)


def group_sizes(*, prompt: Ids, turn: Ids, mask: Tensor) -> Tensor:
    """Return N, the number of live rows in each row's (prompt, turn) group, int64 ``[R]``; 0 for rows not live.

    For logs: trloo and grpo differ by ``1 - 1/N``, and N = 1 has no baseline.
    """
    rows = _row_vector(mask, "mask").shape[0]
    turns = turn_numbers(turn, rows=rows)
    keys = zip(id_codes(prompt, rows=rows, name="prompt").tolist(), turns.tolist(), strict=True)
    groups = id_codes(list(keys), rows=rows, name="group")
    live = ((mask.detach().cpu() > 0) & (turns >= 0)).to(torch.int64)
    return (torch.zeros(rows, dtype=torch.int64).index_add_(0, groups, live)[groups] * live).to(mask.device)


def _centred(
    returns: Tensor, groups: Tensor, members: Tensor, *, leave_one_out: bool, options: AdvantageOptions
) -> Tensor:
    """``G`` less the mean of its group (or of the others in it), over the rows that are ``members``.

    In float64: the others' deviation is a difference of sums of squares, which float32 would cancel away.
    """
    kind, returns = returns.dtype, returns.double()
    weight = members.double()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, groups, values * weight)[groups]

    count = total(torch.ones_like(returns))
    mean = total(returns) / count.clamp(min=1)
    deviation = returns - mean
    centred = deviation * (count / (count - 1).clamp(min=1)) if leave_one_out else deviation
    if options.scale == "group_std":
        squares = total(deviation.square())
        if leave_one_out:
            # Sum of squares of the others around their own mean; N - 1 others, N - 2 degrees of freedom.
            squares, freedom = squares - deviation * centred, count - 2
        else:
            freedom = count - 1
        std = (squares.clamp(min=0) / freedom.clamp(min=1)).sqrt()
        std = torch.where((freedom < 1) | (std < STD_EPSILON), torch.ones_like(std), std)
        centred = centred / (std + STD_EPSILON)
    alone = returns if options.singleton == "return" else torch.zeros_like(returns)
    return torch.where(count > 1, centred, alone).to(kind)


def _whitened(returns: Tensor, members: Tensor) -> Tensor:
    """``(G - mean) / (std + 1e-6)`` over all live rows; 0 where fewer than two are live."""
    live = returns[members]
    if live.numel() < 2:
        return torch.zeros_like(returns)
    return (returns - live.mean()) / (live.std() + STD_EPSILON)


def _standardised(advantages: Tensor, members: Tensor) -> Tensor:
    """``(A - mean) / std`` over all live rows, left as they are where the deviation is below 1e-6."""
    live = advantages[members]
    if live.numel() < 2 or float(live.std()) < STD_EPSILON:
        return advantages
    return (advantages - live.mean()) / live.std()
