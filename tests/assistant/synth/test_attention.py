"""Written-out attention in one kernel, against float64: masks, biases, layouts, odd sizes."""

import pytest
import torch
from modules import Attention, Each, Function

from drk.assistant.synth.propose import compile_graph, variants

Q, K, V = torch.randn(2, 3, 37, 16), torch.randn(2, 3, 45, 16), torch.randn(2, 3, 45, 24)


def kinds(compiled):
    return [region.kind for region in compiled.regions]


SCORES = [
    lambda s, x: x,
    lambda s, x: x * 0.25 + s.bias,
    lambda s, x: (x * 0.25).masked_fill(s.bias > 0.5, float("-inf")),
    lambda s, x: torch.tanh(x / 9) * 9 + s.slopes,
]


def test_scores_with_whatever_stands_before_the_softmax(check):
    parts = {"bias": torch.randn(37, 45), "slopes": torch.randn(3, 1, 1)}
    attend = [lambda s, q, k, v, change=change: change(s, q @ k.mT).softmax(-1) @ v for change in SCORES]
    tensors = [item.clone() for _ in SCORES for item in (Q, K, V)]
    compiled = check(Each(attend, 3, **parts), *tensors, calls=[[item[:1] for item in tensors]], factor=3.0)
    assert kinds(compiled).count("attention") == len(SCORES)


def test_three_dimensions_and_dropout_in_eval_mode(check):
    module = Function(
        lambda s, q, k, v: torch.bmm(s.drop(torch.bmm(q, k.mT).softmax(-1)), v), drop=torch.nn.Dropout(0.2)
    )
    assert "attention" in kinds(check(module, Q[0], K[0], V[0], factor=3.0))


def test_a_causal_block_skips_keys_and_lays_heads_out_as_features(check):
    compiled = check(Attention(), torch.randn(2, 70, 32), calls=[[torch.randn(1, 9, 32)]], factor=3.0)
    assert "tl.minimum(n_cols, (tile + 1) * BLOCK_M)" in compiled.source
    assert ".transpose(1, 2)\n" in compiled.source.split("class ModelNew")[0]


def test_half_precision(check):
    module = Function(lambda _, q, k, v: (q @ k.mT * 0.25).softmax(-1) @ v)
    assert "attention" in kinds(check(module, Q.half(), K.half(), V.half()))


def test_half_precision_with_a_softmax_in_float32_and_a_mask_that_was_cast(check):
    def forward(_, q, k, v):
        future = torch.triu(torch.full((37, 37), float("-inf")), diagonal=1).type_as(q)
        first = torch.softmax((q @ k.mT * 0.25 + future).float(), -1).type_as(q) @ v
        return first, torch.softmax(k @ q.mT, dim=-1, dtype=torch.float32).to(q.dtype) @ v

    compiled = check(Function(forward), Q.half(), K[:, :, :37].half(), V[:, :, :37].half())
    assert kinds(compiled).count("attention") == 2
    assert "tl.minimum(n_cols, (tile + 1) * BLOCK_M)" in compiled.source


def test_scores_that_something_else_reads_are_written(graph_of):
    def forward(_, q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights

    graph = graph_of(Function(forward), Q, K, V)
    assert "attention" not in kinds(compile_graph(graph, variants(graph)[0]))


@pytest.mark.parametrize(("shift", "least"), [(0.0, 0.5), (-3e38, 9.0), (-3e38, None), (None, 0.5)])
def test_a_softmax_with_bounds_of_its_own_is_no_safe_one(check, shift, least):
    def forward(_, q, k, v):
        scores = q @ k.mT * 0.25 - 4
        top = scores.amax(-1, keepdim=True)
        power = torch.exp(scores - (top if shift is None else top.clamp_min(shift)))
        total = power.sum(-1, keepdim=True)
        return power / (total if least is None else total.clamp_min(least)) @ v

    assert "attention" not in kinds(check(Function(forward), Q, K, V, factor=4.0))


@pytest.mark.slow
@pytest.mark.parametrize("head", [64, 128])
def test_attention_compiles_for_hopper(graph_of, offline_compile, head):
    module = Function(lambda _, x: (x @ x.mT.contiguous() * 0.1).softmax(-1) @ (x * 2))
    shape = [2, 4, 256, head]
    graph = graph_of(module, torch.randn(shape))
    rows = offline_compile(compile_graph(graph, variants(graph)[0]).source, shape)
    kernel = next(row for row in rows if "attention" in row["name"])
    assert kernel["fits"]
    assert kernel["spill_bytes"] <= 64, kernel
