"""Losses in one or two kernels, each against float64."""

import torch
import torch.nn.functional as F
from modules import Each, Function

SIGNS = torch.tensor([[1.0, -1.0] * 20] * 9)


LOSSES = [
    lambda _, x, y: F.mse_loss(x, y),
    lambda _, x, y: F.l1_loss(x, y, reduction="sum"),
    lambda _, x, y: F.smooth_l1_loss(x, y, beta=0.3),
    lambda _, x, y: F.huber_loss(x, y, delta=0.2),
    lambda _, x, y: F.kl_div(x.log(), y, reduction="sum"),
    lambda _, x, y: F.kl_div(x.log(), y.log(), log_target=True, reduction="sum"),
    lambda _, x, y: F.binary_cross_entropy(x, y),
    lambda _, x, y: F.binary_cross_entropy_with_logits(x * 9 - 4, y, pos_weight=y[0]),
    lambda _, x, y: F.triplet_margin_loss(x, y, 1 - x, margin=0.4),
    lambda _, x, y: F.cosine_similarity(x, y).mean(),
    lambda _, x, y: F.pairwise_distance(x, y),
    lambda _, x, y: F.mse_loss(x, y, reduction="none").mean(1),
    lambda _, x, y: F.binary_cross_entropy(x, y, weight=y * 2),
    lambda _, x, y: F.binary_cross_entropy_with_logits(x, y, weight=y[0], pos_weight=y[1], reduction="sum"),
    lambda _, x, y: F.poisson_nll_loss(x, y),
    lambda _, x, y: F.poisson_nll_loss(x, y * 5, log_input=False, full=True, reduction="sum"),
    lambda _, x, y: F.triplet_margin_loss(x, y, 1 - x, p=3.0, swap=True),
    lambda _, x, y: F.cosine_similarity(x.unsqueeze(1), y.unsqueeze(0), dim=-1),
    lambda _, x, y: F.pairwise_distance(x, y[:1], p=1.0),
    lambda _, x, y: F.gaussian_nll_loss(x, y, y, full=True),
    lambda _, x, y: F.gaussian_nll_loss(x, y, y[:, :1], eps=0.5, reduction="sum"),
]
OF_SIGNS = [
    lambda _, x, y: F.hinge_embedding_loss(x, y, margin=0.7),
    lambda _, x, y: F.soft_margin_loss(x, y),
    lambda _, x, y: F.margin_ranking_loss(x, x.flip(1) * 1.0, y, margin=0.1),
    lambda _, x, y: torch.clamp(1 - x * y, min=0).mean(),
    lambda _, x, y: F.cosine_embedding_loss(x, 1 - x, y[:, 0] * 1.0, margin=0.1),
    lambda _, x, y: F.cosine_embedding_loss(x, 1 - x, y[:, 1] * 1.0, reduction="none"),
]


def test_losses_of_two_tensors(check):
    pairs = [item for _ in LOSSES for item in (torch.rand(9, 40), torch.rand(9, 40))]
    compiled = check(Each(LOSSES, 2), *pairs, factor=3.0)
    assert len(compiled.kernels) <= 2 * len(LOSSES)
    assert "torch.ops" not in compiled.source


def test_a_mean_over_the_batch_is_told_at_run_time(check):
    def forward(_, x, y):
        loss = F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")
        return loss * 2, F.kl_div(x, y.softmax(-1).contiguous(), reduction="batchmean")

    fewer = [torch.randn(66, 9), torch.randn(66, 9)]
    compiled = check(Function(forward), torch.randn(70, 9), torch.randn(70, 9), factor=3.0, calls=[fewer])
    assert all(step.kernel is not None for step in compiled.written.steps)


def test_losses_of_signs(check):
    check(Each(OF_SIGNS, 2), *[item for _ in OF_SIGNS for item in (torch.rand(9, 40), SIGNS.clone())], factor=3.0)
