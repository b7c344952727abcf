"""Losses of class indices, one-hot codes and picked elements, against float64."""

import torch
import torch.nn.functional as F
from modules import Each, Function

LABELS = torch.tensor([3, 0, -100, 49, 7, 7, 12])
WEIGHED = [
    lambda _, x, y, w: F.cross_entropy(x, y, w),
    lambda _, x, y, w: F.cross_entropy(x, y, w, reduction="sum"),
    lambda _, x, y, w: F.cross_entropy(x, y, w, reduction="none", label_smoothing=0.1),
    lambda _, x, y, w: F.cross_entropy(x, y.clamp(min=0), w, label_smoothing=0.2, ignore_index=7),
    lambda _, x, y, w: F.nll_loss(x.log_softmax(1), y, w),
    lambda _, x, y, w: F.multi_margin_loss(x, y.clamp(min=0)) + w.sum() * 0,
    lambda _, x, y, w: F.multi_margin_loss(x, y.clamp(min=0), p=2, margin=0.5, weight=w, reduction="none"),
]
EXPECTED = [
    lambda _, x, y, w: F.cross_entropy(x, y.softmax(1)) + w.sum() * 0,
    lambda _, x, y, w: F.cross_entropy(x, y.softmax(1), w, reduction="sum"),
    lambda _, x, y, w: F.cross_entropy(x, y.softmax(1), w, reduction="none", label_smoothing=0.1),
]


def test_class_weights(check):
    args = [item for _ in WEIGHED for item in (torch.randn(7, 50) * 5, LABELS.clone(), torch.rand(50))]
    assert "torch.ops" not in check(Each(WEIGHED, 3), *args, factor=3.0).source
    pixels = Function(lambda _, x, y, w: F.cross_entropy(x, y, w))
    check(pixels, torch.randn(2, 11, 5, 3), torch.randint(11, (2, 5, 3)), torch.rand(11), factor=3.0)


def test_targets_that_are_probabilities(check):
    args = [item for _ in EXPECTED for item in (torch.randn(7, 50), torch.randn(7, 50), torch.rand(50))]
    assert "cross_entropy" not in check(Each(EXPECTED, 3), *args, factor=3.0).source


def test_one_hot_codes(check):
    module = Function(lambda _, i: (F.one_hot(i, 10), F.one_hot(i, 10).float() * 0.9 + 0.01))
    assert "one_hot" not in check(module, torch.randint(10, (4, 7)), calls=[[torch.randint(10, (3, 5))]]).source


def test_values_that_are_put_at_one_place_a_row(check):
    x, ids, values = torch.randn(6, 10), torch.randint(10, (6, 1)), torch.randn(6, 1)
    codes = [
        lambda _, i: torch.zeros(6, 10).scatter_(1, i, 1.0),
        lambda _, i: torch.zeros(6, 10).scatter(-1, i, -2.5) + 1,
        lambda _, i: torch.zeros(6, 10, dtype=torch.bool).float().scatter(1, i, float("inf")).clamp(max=3),
    ]
    assert "scatter" not in check(Each(codes), ids, ids.flip(0), ids).source.split("class ModelNew")[1]
    kept = [lambda _, x, i, v: x.scatter(1, i, v), lambda _, x, i, v: x.scatter(1, i, 0.5) * v]
    kept.append(lambda _, x, i, v: torch.zeros_like(x).scatter(1, i, v.exp()))
    check(Each(kept, 3), *(x, ids, values) * 3)


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


def test_log_probabilities_of_tokens_are_never_written(check):
    def scores(_, logits, tokens):
        logs = F.log_softmax(logits[:, :-1].float(), dim=-1)
        picked = torch.gather(logs, 2, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        mask = tokens[:, 1:] != 0
        return (picked * mask).sum(-1) / mask.sum(-1)

    tokens = torch.randint(40, (3, 6))
    compiled = check(Function(scores), torch.randn(3, 6, 40).bfloat16(), tokens, factor=3.0)
    assert len(compiled.kernels) == 2
    assert "gather" not in compiled.source


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
