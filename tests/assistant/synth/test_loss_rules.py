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
]
OF_SIGNS = [
    lambda _, x, y: F.hinge_embedding_loss(x, y, margin=0.7),
    lambda _, x, y: F.soft_margin_loss(x, y),
    lambda _, x, y: F.margin_ranking_loss(x, x.flip(1) * 1.0, y, margin=0.1),
    lambda _, x, y: torch.clamp(1 - x * y, min=0).mean(),
]


def test_losses_of_two_tensors(check):
    pairs = [item for _ in LOSSES for item in (torch.rand(9, 40), torch.rand(9, 40))]
    compiled = check(Each(LOSSES, 2), *pairs, factor=3.0)
    assert len(compiled.kernels) <= 2 * len(LOSSES)
    assert "torch.ops" not in compiled.source


def test_losses_of_signs(check):
    check(Each(OF_SIGNS, 2), *[item for _ in OF_SIGNS for item in (torch.rand(9, 40), SIGNS.clone())], factor=3.0)


def test_cross_entropy(check):
    kinds = [(reduction, smoothing) for reduction in ("mean", "sum", "none") for smoothing in (0.0, 0.1)]
    losses = [
        lambda _, x, y, r=reduction, s=smoothing: F.cross_entropy(x, y, reduction=r, label_smoothing=s)
        for reduction, smoothing in kinds
    ]
    labels = torch.tensor([3, 0, 5, 49, 7, 7, 12])
    check(Each(losses, 2), *[item for _ in losses for item in (torch.randn(7, 50) * 5, labels.clone())], factor=3.0)
    ignoring = torch.tensor([3, 0, -100, 49, 7, 7, 12])
    check(Function(losses[0]), torch.randn(7, 50) * 5, ignoring, factor=3.0)


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


def test_an_element_picked_from_rows_that_others_reduce(check):
    def loss(_, logits, targets):
        logits = logits.float()
        total = torch.logsumexp(logits, dim=-1)
        picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        keep = (targets != -100).float()
        return ((total - picked + 1e-4 * total.square()) * keep).sum() / keep.sum().clamp(min=1.0)

    labels = torch.tensor([3, 0, -100, 49, 7, 7, 12])
    compiled = check(Function(loss), (torch.randn(7, 50) * 5).bfloat16(), labels, factor=3.0)
    assert "gather" not in compiled.source
    assert len(compiled.kernels) == 2, compiled.source


def test_a_gather_alone_stays_one(check):
    compiled = check(Function(lambda _, x, i: x.gather(1, i) * 2.0), torch.randn(7, 50), torch.randint(50, (7, 1)))
    assert "gather" in compiled.source


def test_cross_entropy_of_half_precision_logits(check):
    labels = torch.tensor([3, 0, -100, 49, 7, 7, 12])
    compiled = check(Function(lambda _, x, y: F.cross_entropy(x, y)), (torch.randn(7, 50) * 5).bfloat16(), labels)
    assert "cross_entropy" not in compiled.source and len(compiled.kernels) <= 2


def test_labels_are_limited_inside_the_kernel(check):
    def loss(_, logits, targets):
        picked = logits.gather(-1, targets.clamp(0, 40).view(-1, 1))
        return logits.amax(-1, keepdim=True) - picked

    compiled = check(Function(loss), torch.randn(7, 50), torch.tensor([3, 0, -100, 49, 7, 7, 12]))
    assert len(compiled.kernels) == 1
    assert "torch.ops" not in compiled.source


def test_a_row_is_picked_from_before_what_is_the_same_for_it(graph_of):
    from drk.assistant.synth.rewrites import rewrite

    module = Function(lambda _, x, y: F.nll_loss(F.log_softmax(x, 1), y))
    nodes = {node.name: node for node in rewrite(graph_of(module, torch.randn(6, 11), torch.randint(11, (6,)))).nodes}
    chosen = next(node for node in nodes.values() if node.name == "chosen")
    assert chosen.args[0].name not in nodes
