"""The library's attention in a kernel of this project: with what it may be replaced, and when it is tried."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth import BuiltinProposer
from drk.assistant.synth.variants import variants
from drk.assistant.synth.written_attention import with_written_attention

Q, K, V = torch.randn(2, 3, 37, 16), torch.randn(2, 3, 45, 16), torch.randn(2, 3, 45, 24)


def test_attention_of_all_kinds_is_one_kernel_each(check, graph_of):
    functions = [
        lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        lambda _, q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    ]
    tensors = [item.clone() for _ in functions for item in (Q, K, V)]
    written = next(item for item in variants(graph_of(Each(functions, 3), *tensors)) if item.rules.written_attention)
    compiled = check(Each(functions, 3), *tensors, variant=written, factor=3.0)
    assert [region.kind for region in compiled.regions] == ["attention"] * 3


def test_heads_too_wide_for_one_kernel_are_written_in_steps(check, graph_of):
    module = Function(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v))
    q, k, v = torch.randn(1, 2, 5, 272), torch.randn(1, 2, 7, 272), torch.randn(1, 2, 7, 272)
    compiled = check(module, q, k, v, factor=3.0, variant=variants(graph_of(module, q, k, v))[1])
    assert [region.kind for region in compiled.regions] == ["row"]


MASKS = {
    "padding": torch.arange(45)[None, None, None, :] < torch.tensor([45, 13]).view(2, 1, 1, 1),
    "square": torch.rand(37, 45) > 0.4,
    "a-query-sees-nothing": (torch.arange(37)[:, None] > 2) & (torch.rand(2, 1, 37, 45) > 0.3),
    "bias": torch.randn(1, 3, 37, 45),
    "bias-that-hides": torch.zeros(37, 45).masked_fill(torch.rand(37, 45) > 0.5, float("-inf")),
    "bias-that-hides-all": torch.full((2, 1, 37, 45), float("-inf")),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mask_is_applied_in_the_kernel(check, graph_of, name, dtype):
    mask = MASKS[name] if MASKS[name].dtype == torch.bool else MASKS[name].to(dtype)
    module = Function(lambda _, q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m))
    args = [Q.to(dtype), K.to(dtype), V.to(dtype), mask]
    graph = graph_of(module, *args)
    written = next(item for item in variants(graph) if item.rules.written_attention)
    compiled = check(module, *args, variant=written, factor=3.0)
    assert [region.kind for region in compiled.regions] == ["attention"]


def test_a_mask_beside_heads_too_wide_for_one_kernel(check, graph_of):
    module = Function(lambda _, q, k, v, m: F.scaled_dot_product_attention(q, k, v, m))
    args = [torch.randn(1, 2, 5, 272), *torch.randn(2, 1, 2, 7, 272), torch.arange(5)[:, None] > torch.arange(7)]
    compiled = check(module, *args, factor=3.0, variant=variants(graph_of(module, *args))[1])
    assert [region.kind for region in compiled.regions] == ["row"]


def test_dropout_and_grouped_heads_stay(graph_of):
    def stays(forward, *args):
        graph = graph_of(Function(forward), *args)
        return with_written_attention(graph).nodes == graph.nodes

    assert stays(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1), Q, K, V)
    assert stays(lambda _, q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), Q, K[:, :1], V[:, :1])


def test_half_precision_tries_the_library_first(graph_of):
    module = Function(lambda _, q, k, v: F.scaled_dot_product_attention(q.relu() * 2, k, v).sigmoid() + 1)
    for dtype, place in ((torch.float32, 1), (torch.bfloat16, 2)):
        found = BuiltinProposer().propose(graph_of(module, *(item.to(dtype) for item in (Q, K, V))), limit=4)
        texts = ["F.scaled_dot_product_attention(" in item.source for item in found]
        assert texts[:place] == [True] * place
        assert False in texts


def test_half_precision_with_a_mask_tries_the_kernel_next(graph_of):
    module = Function(lambda _, q, k, v, m: F.scaled_dot_product_attention(q, k, v, m))
    graph = graph_of(module, Q.half(), K.half(), V.half(), MASKS["square"])
    assert [item.rules.written_attention for item in variants(graph)][:3] == [False, True, True]
