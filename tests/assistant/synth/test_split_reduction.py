"""Long and few rows in pieces: every reduction against float64, one and several levels, several pieces."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

LONG = 33_000


def kinds(compiled):
    return {region.kind for region in compiled.regions}


REDUCTIONS = [
    lambda _, x: x.sum(-1) * 2,
    lambda _, x: x.mean(-1, keepdim=True),
    lambda _, x: x.amax(-1) + x.amin(-1),
    lambda _, x: x.var(-1),
    lambda _, x: (x * 0.01 + 1).prod(1),
    lambda _, x: x.norm(dim=1),
    lambda _, x: x / x.abs().sum(1, keepdim=True),
    lambda _, x: F.softmax(x * 3, -1),
    lambda _, x: F.log_softmax(x, -1),
    lambda _, x: torch.logsumexp(x, -1),
    lambda _, x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + 1e-5),
]


@pytest.mark.long
def test_long_rows_agree_with_float64(check):
    def rows(*shape):
        return [torch.randn(shape) + 1 for _ in REDUCTIONS]

    compiled = check(Each(REDUCTIONS), *rows(2, LONG), calls=[rows(3, 5000)], factor=4.0)
    assert kinds(compiled) == {"split"}
    assert len(compiled.kernels) == len(REDUCTIONS)


def test_layer_norm_of_a_large_offset_keeps_its_variance(check):
    module = Function(lambda s, x: s.norm(x), norm=nn.LayerNorm((3, 11_000)))
    check(module, torch.randn(2, 3, 11_000) * 0.1 + 300)


def test_group_and_instance_norm_take_followers_along(check):
    norm = nn.GroupNorm(2, 6)
    module = Function(lambda s, x: F.silu(s.norm(x)) * 2, norm=norm)
    compiled = check(module, torch.randn(1, 6, 110, 110) + 1, calls=[[torch.randn(2, 6, 9, 8)]], factor=3.0)
    assert [region.kind for region in compiled.regions] == ["split", "row", "pointwise"]
    check(Function(lambda s, x: s.norm(x).relu(), norm=nn.InstanceNorm2d(2, affine=True)), torch.randn(1, 2, 190, 190))


def test_everything_to_one_number(check):
    x, y = torch.randn(6, 5, 4000), torch.randn(6, 5, 4000)
    assert len(check(Function(lambda _, x, y: ((x - y) ** 2).mean() * 3), x, y).kernels) == 1
    check(Function(lambda _, x: x / x.norm()), x)
    check(Function(lambda _, x: x.max() - x.min()), x)


def test_columns_apart_in_memory_are_read_in_wide_tiles(check):
    module = Function(lambda _, x: x.softmax(1) + 1)
    compiled = check(module, torch.randn(2, 1100, 37), calls=[[torch.randn(3, 200, 5)]])
    assert kinds(compiled) == {"split"}
    check(Function(lambda _, x: x.std(0)), torch.randn(1500, 21))


def test_places_of_extremes_are_exact(interpreter, graph_of):
    from drk.assistant.synth.propose import compile_graph, variants

    for shape, dim in (((3, 70), 1), ((2, LONG), 1), ((2, 1500, 7), 1), ((4, 6, 9), 1)):
        module = Function(lambda _, x, d=dim: (x.argmax(d), x.argmin(d, keepdim=True), x.max(d), x.min(d)))
        module = Function(lambda _, x, d=dim: (x.argmax(d), x.argmin(d, keepdim=True), *x.max(d), *x.min(d)))
        x = torch.randint(-50, 50, shape).float()
        x[..., 3] = float("nan") if shape[-1] == 70 else x[..., 3]
        x[0] = float("-inf") if shape[-1] == 9 else x[0]
        graph = graph_of(module, x)
        compiled = compile_graph(graph, variants(graph)[0])
        assert "tl.min(tl.where(" in compiled.source
        (outputs,) = interpreter.run(compiled.source, {}, [[x]])
        for got, expected in zip(outputs, module(x), strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.long
def test_pieces_compile_for_hopper(graph_of, offline_compile):
    from drk.assistant.synth.propose import compile_graph, variants

    module = Function(lambda s, x: F.gelu(s.norm(x)), norm=nn.GroupNorm(2, 4)).eval()
    graph = graph_of(module, torch.randn(2, 4, 150, 150))
    rows = offline_compile(compile_graph(graph, variants(graph)[0]).source, [2, 4, 150, 150])
    assert len(rows) == 4
    assert all(row["fits"] and row["spill_bytes"] == 0 for row in rows)
