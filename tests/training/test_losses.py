"""The policy loss and its gradients against golden numbers and hand-written REINFORCE."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from drk.training.errors import EmptyBatchError, OptionError, ShapeError
from drk.training.losses import kl_divergence, loss_statistics, policy_loss, require_tokens

CASES = json.loads((Path(__file__).parents[1] / "golden" / "paper-algorithms.json").read_text())["cases"]


def golden(name):
    inputs, outputs = CASES[name]["inputs"], CASES[name]["outputs"]
    logp = torch.tensor(inputs["log_prob"], requires_grad=True)
    clips = {
        "clip_low": inputs["cliprange_low"],
        "clip_high": inputs["cliprange_high"],
        "dual_clip": inputs["clip_ratio_c"],
    }
    data = [torch.tensor(inputs[key]) for key in ("old_log_prob", "advantages", "eos_mask")]
    form = {"aggregation": inputs["loss_agg_mode"], "scale": inputs["loss_scale_factor"]}
    return logp, data, clips, form, outputs


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["kind"] == "policy_loss"])
@pytest.mark.parametrize("by_row", [False, True])
def test_loss_and_gradient_equal_the_golden_numbers(name, by_row):
    logp, (old, advantages, mask), clips, form, outputs = golden(name)
    if by_row:
        advantages = advantages[:, 0]
    loss = policy_loss(logp, old, advantages, mask, **clips, **form)
    loss.backward()
    assert loss.item() == pytest.approx(outputs["loss"], abs=1e-5, rel=1e-5)
    torch.testing.assert_close(logp.grad, torch.tensor(outputs["grad_log_prob"]), atol=1e-8, rtol=1e-5)
    found = loss_statistics(logp, old, advantages, mask, **clips)
    assert found.k1_kl == pytest.approx(outputs["kl"], abs=1e-5)
    assert found.outside == pytest.approx(outputs["clip_fraction"], abs=1e-5)
    assert found.dual == pytest.approx(outputs["clip_fraction_dual"], abs=1e-5)


def test_kl_estimate_equals_the_golden_numbers():
    inputs, outputs = CASES["kl_low_var_kl"]["inputs"], CASES["kl_low_var_kl"]["outputs"]
    logp, reference = torch.tensor(inputs["log_prob"]), torch.tensor(inputs["ref_log_prob"])
    found = kl_divergence(logp, reference)
    torch.testing.assert_close(found, torch.tensor(outputs["kl"]), atol=1e-5, rtol=1e-5)


def test_kl_estimates_have_the_divergence_as_their_mean():
    policy, reference = torch.tensor([0.2, 0.5, 0.3]).log(), torch.tensor([0.4, 0.3, 0.3]).log()
    truth = (policy.exp() * (policy - reference)).sum()
    for estimate in ("k1", "k3"):
        mean = (policy.exp() * kl_divergence(policy, reference, estimate=estimate)).sum()
        torch.testing.assert_close(mean, truth)
    assert bool((kl_divergence(policy, reference, estimate="k2") >= 0).all())


def test_on_policy_gradient_is_reinforce_whatever_is_rejected():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5, 4, generator=generator, dtype=torch.float32, requires_grad=True)
    tokens = torch.randint(4, (6, 5), generator=generator)
    mask = (torch.rand(6, 5, generator=generator) > 0.3).float()
    mask[2] = 0.0  # a rejected row
    advantages = torch.randn(6, generator=generator)
    logp = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    (found,) = torch.autograd.grad(policy_loss(logp, logp.detach(), advantages, mask), logits, retain_graph=True)
    live = (mask.sum(1) > 0).sum()
    (wanted,) = torch.autograd.grad(-(advantages[:, None] * logp * mask).sum() / live / 1000.0, logits)
    torch.testing.assert_close(found, wanted)
    assert float(found[2].abs().max()) == 0.0


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(4)
    logp, old = 0.1 * torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)  # inside the clip range
    advantages = torch.randn(3, generator=generator, dtype=torch.float64)
    mask = torch.ones(3, 4)
    mask[1, 2:] = 0.0

    def loss(values):
        return policy_loss(values, old, advantages, mask, scale=1.0)

    assert torch.autograd.gradcheck(loss, logp.requires_grad_())


def test_whatever_stands_off_the_mask_has_no_effect():
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    advantages = torch.tensor([1.0, -2.0])

    def run(filler):
        logp = torch.tensor([[-1.0, filler], [-2.0, filler]], requires_grad=True)
        loss = policy_loss(logp, torch.full((2, 2), -1.5), advantages, mask, weights=torch.tensor([[1.0, filler]] * 2))
        loss.backward()
        return loss.item(), logp.grad.tolist()

    assert run(-0.5) == run(math.nan) == run(-math.inf)


def test_a_fixed_number_of_rows_makes_micro_batches_add_up():
    generator = torch.Generator().manual_seed(0)
    logp, old = torch.randn(2, 8, 3, generator=generator)
    advantages, mask = torch.randn(8, generator=generator), torch.ones(8, 3)
    mask[1] = 0.0
    whole = policy_loss(logp, old, advantages, mask, rows=8)
    parts = [policy_loss(logp[s], old[s], advantages[s], mask[s], rows=8) for s in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(whole, sum(parts))
    # Without it the divisor shrinks with every rejected row.
    torch.testing.assert_close(policy_loss(logp, old, advantages, mask), whole * 8 / 7)


@pytest.mark.parametrize(
    ("aggregation", "wanted"),
    [("seq-mean-token-sum", -(3 * 2.0 + 1.0) / 2), ("seq-mean-token-mean", -1.5), ("token-mean", -7.0 / 4)],
)
def test_aggregations(aggregation, wanted):
    logp = torch.zeros(2, 3)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    loss = policy_loss(logp, logp, torch.tensor([2.0, 1.0]), mask, aggregation=aggregation, scale=1.0)
    assert loss.item() == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("ratio", "advantage", "wanted", "learns"),
    [
        (1.5, 1.0, -1.28, False),  # clipped above
        (1.1, 1.0, -1.1, True),
        (0.5, 1.0, -0.5, True),  # a good action that became rare: pulled back
        (0.5, -1.0, 0.8, False),  # clipped below
        (2.0, -1.0, 2.0, True),
        (5.0, -1.0, 3.0, False),  # dual clip
    ],
)
def test_each_side_of_the_clip(ratio, advantage, wanted, learns):
    logp = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss = policy_loss(logp, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), scale=1.0)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    assert (logp.grad.item() != 0) == learns


def test_statistics_count_tokens_on_the_mask_by_their_side():
    logp = torch.tensor([[5.0, 5.0, 0.5, 1.0]]).log()
    mask = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
    bad, good = (loss_statistics(logp, torch.zeros(1, 4), torch.tensor([sign]), mask) for sign in (-1.0, 1.0))
    assert (bad.above, bad.below, bad.dual) == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert (good.above, good.below, good.dual) == pytest.approx((1 / 3, 1 / 3, 0.0))
    assert loss_statistics(logp, torch.zeros(1, 4), torch.tensor([-1.0]), mask, dual_clip=None).dual == 0.0
    assert bad.k1_kl == pytest.approx(-math.log(2.5) / 3)


def test_without_a_dual_clip_the_loss_grows_with_the_ratio():
    logp = torch.tensor([[math.log(5.0)]])
    loss = policy_loss(logp, torch.zeros(1, 1), torch.tensor([-1.0]), torch.ones(1, 1), scale=1.0, dual_clip=None)
    assert loss.item() == pytest.approx(5.0)


def test_weights_scale_token_losses_without_a_gradient():
    logp = torch.zeros(1, 2, requires_grad=True)
    weights = torch.tensor([[0.5, 2.0]], requires_grad=True)
    policy_loss(logp, logp.detach(), torch.ones(1), torch.ones(1, 2), scale=1.0, weights=weights).backward()
    assert logp.grad.tolist() == [[-0.5, -2.0]]
    assert weights.grad is None


def test_an_empty_batch_gives_zero_gradients_and_is_refused_before_a_step():
    logp = torch.zeros(2, 2, requires_grad=True)
    mask = torch.zeros(2, 2)
    loss = policy_loss(logp, torch.ones(2, 2), torch.ones(2), mask)
    loss.backward()
    assert loss.item() == 0.0
    assert logp.grad.abs().max().item() == 0.0
    assert loss_statistics(logp, logp, torch.ones(2), mask).outside == 0.0
    with pytest.raises(EmptyBatchError):
        require_tokens(mask)
    assert require_tokens(torch.ones(2, 3)) == 6


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"aggregation": "sum"}, OptionError),
        ({"scale": 0.0}, OptionError),
        ({"rows": 0}, OptionError),
        ({"dual_clip": 0.9}, OptionError),
        ({"clip_low": 1.5}, OptionError),
        ({"advantages": torch.ones(3)}, ShapeError),
        ({"old_logp": torch.ones(2, 3)}, ShapeError),
        ({"weights": torch.ones(2, 1)}, ShapeError),
    ],
)
def test_misfits_are_named(change, error):
    arguments = {
        "logp": torch.zeros(2, 2),
        "old_logp": torch.zeros(2, 2),
        "advantages": torch.ones(2),
        "mask": torch.ones(2, 2),
    }
    with pytest.raises(error):
        policy_loss(**(arguments | change))
    with pytest.raises(OptionError):
        kl_divergence(torch.zeros(1), torch.zeros(1), estimate="k9")
    with pytest.raises(ShapeError):
        kl_divergence(torch.zeros(1), torch.zeros(2))
