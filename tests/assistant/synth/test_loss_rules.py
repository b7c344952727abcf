"""Losses in one or two kernels, each against float64."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function

X, Y = torch.rand(9, 40), torch.rand(9, 40)
SIGNS = torch.tensor([[1.0, -1.0] * 20] * 9)


@pytest.mark.parametrize(
    "function",
    [
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
    ],
)
def test_losses_of_two_tensors(check, function):
    compiled = check(Function(function), X, Y, factor=3.0)
    assert len(compiled.kernels) <= 2
    assert "torch.ops" not in compiled.source


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x, y: F.hinge_embedding_loss(x, y, margin=0.7),
        lambda _, x, y: F.soft_margin_loss(x, y),
        lambda _, x, y: F.margin_ranking_loss(x, x.flip(1) * 1.0, y, margin=0.1),
        lambda _, x, y: torch.clamp(1 - x * y, min=0).mean(),
    ],
)
def test_losses_of_signs(check, function):
    check(Function(function), X, SIGNS, factor=3.0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(check, smoothing, reduction):
    labels = torch.tensor([3, 0, -100, 49, 7, 7, 12])
    module = Function(lambda _, x, y: F.cross_entropy(x, y, label_smoothing=smoothing, reduction=reduction))
    if smoothing == 0.0:
        # With smoothing PyTorch averages ignored rows in another way on some paths; only the plain form has them here.
        check(module, torch.randn(7, 50) * 5, labels, factor=3.0)
    check(module, torch.randn(7, 50) * 5, labels.clamp(0), factor=3.0)


def test_cross_entropy_of_pixels_and_log_likelihood(check):
    check(
        Function(lambda _, x, y: F.cross_entropy(x, y)),
        torch.randn(2, 11, 5, 3),
        torch.randint(11, (2, 5, 3)),
        factor=3.0,
    )
    check(
        Function(lambda _, x, y: F.nll_loss(F.log_softmax(x, 1), y)),
        torch.randn(6, 11),
        torch.randint(11, (6,)),
        factor=3.0,
    )


def test_targets_that_are_probabilities_stay(graph_of):
    from drk.assistant.synth.rewrites import rewrite

    graph = graph_of(Function(lambda _, x, y: F.cross_entropy(x, y)), torch.randn(6, 11), torch.rand(6, 11))
    assert "cross_entropy_loss" in [node.bare_op for node in rewrite(graph).nodes]
