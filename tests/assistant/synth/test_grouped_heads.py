"""Attention of the library with shared key and value heads, against float64."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants


def repeated(x):
    return x.repeat_interleave(2, dim=1)


def expanded(x):
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, 2, length, width).reshape(batch, heads * 2, length, width)


def attention(repeat, **options):
    def forward(_, q, k, v):
        return F.scaled_dot_product_attention(q * 2, repeat(k + 1), repeat(v), is_causal=True, **options)

    return Function(forward)


def inputs(dtype, length=6):
    return [torch.randn(2, heads, length, 8, dtype=dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("repeat", [repeated, expanded])
def test_heads_are_not_repeated(check, repeat):
    compiled = check(attention(repeat), *inputs(torch.bfloat16), factor=3.0, calls=[inputs(torch.bfloat16, 5)])
    assert "enable_gqa=True" in compiled.source
    assert compiled.launches == 3


@pytest.mark.parametrize(
    ("module", "dtype"),
    [
        (attention(repeated), torch.float32),
        (attention(lambda x: x.repeat(1, 2, 1, 1)), torch.bfloat16),
        (attention(lambda x: x.repeat_interleave(2, dim=1), dropout_p=0.1), torch.bfloat16),
    ],
)
def test_others_stay_as_they_are(graph_of, module, dtype):
    graph = graph_of(module.eval(), *inputs(dtype))
    assert "enable_gqa" not in compile_graph(graph, variants(graph)[0]).source
