"""Concatenations that row kernels read piece by piece, against float64 under the interpreter."""

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Each, Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants


class Tokens(nn.Module):
    """A class token before others, positions, a norm: as tests/fixtures/problems/level3/028 has them."""

    def __init__(self, tokens, width):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, tokens + 1, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.position)


def test_a_token_before_others_is_never_written(check):
    compiled = check(Tokens(7, 20), torch.randn(3, 7, 20), calls=[[torch.randn(2, 7, 20)]])
    assert compiled.launches == 1
    assert "torch.cat" not in compiled.source
    turned = Function(lambda s, x: s.norm(x.flatten(2).transpose(1, 2)), norm=Tokens(12, 20))
    assert "torch.cat" not in check(turned, torch.randn(2, 20, 3, 4)).source


def test_joins_along_every_dimension(check):
    ways = [
        lambda _, x, y: F.layer_norm(torch.cat([x, y], 0), (9,)),
        lambda _, x, y: torch.cat([x, y, x * 1.0], 1).softmax(-1),
        lambda _, x, y: torch.cat([x, y], -1).softmax(-1),
        lambda _, x, y: torch.cat([y, x, y], 2).softmax(1),
        lambda _, x, y: torch.concat((x, y), dim=1).abs().amax((0, 2), keepdim=True),
        lambda _, x, y: torch.cat([x[:, :2], y.transpose(0, 1).transpose(0, 1)], 1).mean(-1),
    ]
    args = [item for _ in ways for item in (torch.randn(4, 5, 9), torch.randn(4, 5, 9))]
    compiled = check(Each(ways, 2), *args, factor=3.0)
    assert compiled.source.split("def forward")[1].count("torch.cat") == 0


def test_other_sizes_and_what_else_reads_the_whole(check):
    module = Function(lambda _, x, y: torch.cat([x, y], 1).relu().sum(-1, keepdim=True))
    others = [[torch.randn(2, 1, 30), torch.randn(2, 8, 30)], [torch.randn(4, 6, 18)[..., ::2], torch.randn(4, 2, 9)]]
    check(module, torch.randn(4, 5, 9), torch.randn(4, 3, 9), calls=others)

    def twice(_, x, y):
        whole = torch.cat([x, y], -1)
        return whole.softmax(-1) @ whole.transpose(-1, -2), whole

    check(Function(twice), torch.randn(2, 4, 6), torch.randn(2, 4, 5))


def test_narrow_types_and_special_values(check, interpreter, graph_of):
    module = Function(lambda _, x, y: torch.cat([x, y], 1).amax(-1))
    check(module, torch.randn(4, 5, 9).bfloat16(), torch.randn(4, 3, 9).bfloat16())
    x, y = torch.randn(2, 2, 5), torch.randn(2, 3, 5)
    x[0, 0, 1], y[1, 2, 4], y[0, 0] = float("nan"), float("inf"), float("-inf")
    graph = graph_of(module, x, y)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x, y]])
    torch.testing.assert_close(got, module(x, y), equal_nan=True)


def test_tokens_compile_for_hopper(graph_of, offline_compile):
    graph = graph_of(Tokens(196, 768).eval(), torch.randn(2, 196, 768))
    (kernel,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [2, 196, 768])
    assert kernel["spill_bytes"] == 0


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_pieces(check, data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    dim, over = (data.draw(st.integers(0, len(shape) - 1)) for _ in range(2))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
    pieces = [torch.randn(*shape[:dim], size, *shape[dim + 1 :]) for size in sizes]
    check(Function(lambda _, *pieces: torch.cat(pieces, dim).exp().sum(over, keepdim=True) + 1), *pieces)
