"""The pure functions give on a CUDA device what they give on the CPU, and their results stay there."""

from __future__ import annotations

import pytest
import torch

from drk.training.advantages import group_sizes, reward_to_go, turn_advantages
from drk.training.losses import loss_statistics, policy_loss
from drk.training.mismatch import diagnostics, importance_weights, mrs_keep, ratio_statistics, rejected_fractions
from drk.training.rejection import (
    RELEASED,
    batch_mask,
    effective_rows,
    prs_draw,
    prs_keep_probability,
    soft_advantages,
)

ROWS, TOKENS = 24, 16


def everything(device):
    """Run one batch through every function; return tensors and numbers by name."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.rand(*shape, generator=generator).to(device)

    ids = {
        "prompt": torch.arange(ROWS, device=device) // 12,
        "sample": torch.arange(ROWS, device=device) // 3,
        "turn": torch.arange(ROWS, device=device) % 3,
    }
    rewards, coverage = 2 * draw(ROWS), draw(ROWS)
    mask, train = (draw(ROWS, TOKENS) > 0.2).float(), -draw(ROWS, TOKENS)
    rollout = train + 0.001 * (draw(ROWS, TOKENS) - 0.5)
    live = batch_mask(rewards, **ids, rules=RELEASED)
    probability = prs_keep_probability(coverage, rewards > 0.5, pooling="geometric", sample=ids["sample"])
    mrs = mrs_keep(train, rollout, mask, sample=ids["sample"])
    kept = mrs & prs_draw(probability, generator=generator)
    advantages = turn_advantages(rewards, **ids, mask=live, keep=kept)
    weights = importance_weights(train, rollout, mask, sample=ids["sample"], level="trajectory")
    tokens = mask * kept[:, None]
    tensors = {
        "live": live,
        "probability": probability,
        "kept": kept,
        "advantages": advantages,
        "soft": soft_advantages(advantages, probability),
        "returns": reward_to_go(rewards, sample=ids["sample"], turn=ids["turn"]),
        "sizes": group_sizes(prompt=ids["prompt"], turn=ids["turn"], mask=live),
        "weights": weights,
        "loss": policy_loss(train, rollout, advantages, tokens, weights=weights),
    }
    numbers = diagnostics(train, rollout, mask) | ratio_statistics(weights, mask, low=None, high=2.0)
    numbers |= ratio_statistics(weights[:1, 0], mask[:1]) | rejected_fractions(kept, mask)
    numbers |= {"effective": effective_rows(probability, live)}
    numbers |= {"outside": loss_statistics(train, rollout, advantages, tokens).outside}
    return tensors, numbers


def test_the_batch_exercises_every_branch_on_the_cpu():
    tensors, numbers = everything(torch.device("cpu"))
    assert 0 < int(tensors["kept"].sum()) < ROWS
    assert float(tensors["advantages"].abs().max()) > 0
    assert numbers["turn_std"] == 0.0  # one row has no deviation


@pytest.mark.gpu
def test_cuda_agrees_with_the_cpu():
    device = torch.device("cuda", 0)
    tensors, numbers = everything(device)
    wanted_tensors, wanted_numbers = everything(torch.device("cpu"))
    for name, wanted in wanted_tensors.items():
        assert tensors[name].device == device, name
        torch.testing.assert_close(tensors[name].cpu(), wanted, atol=1e-6, rtol=1e-5)
    assert numbers == pytest.approx(wanted_numbers, abs=1e-6, rel=1e-4)
