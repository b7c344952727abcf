"""Running sums, products and extremes with their neighbours, from either end, along any dimension, against float64."""

import pytest
import torch
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants

SCANS = [
    lambda _, x: x.cumsum(-1),
    lambda _, x: (x * 2).cumsum(1).relu(),
    lambda _, x: torch.where(x > 0, x, 0.0).cumsum(1) + x,
    lambda _, x: (x * 0.1 + 1).cumprod(-1),
    lambda _, x: x.flip(1).cumsum(1).flip(1),
    lambda _, x: (x.flip(-1).cumsum(-1).flip(-1) * 0.5).tanh(),
    lambda _, x: x.cumsum(0),
    lambda _, x: (x + 1).cummax(-1).values,
    lambda _, x: x.cummin(0).values * 2,
    lambda _, x: x.logcumsumexp(-1),
]


def test_scans_agree_with_float64(check):
    def rows(*shape):
        return [torch.randn(shape) for _ in SCANS]

    # 4096 columns are a tile of few rows, and 32 of rows whose elements lie apart.
    compiled = check(Each(SCANS), *rows(5, 70), calls=[rows(1, 4200), rows(70, 3), rows(2, 9)], factor=5.0)
    assert [region.kind for region in compiled.regions] == ["scan"] * len(SCANS)


def test_scans_along_middle_dimensions_lie_along_threads_of_a_tile_of_rows(check):
    compiled = check(Function(lambda _, x: x.flip(1).cumsum(1).flip(1)), torch.randn(2, 75, 21), factor=5.0)
    assert "block_m = 64" in compiled.source
    assert "tl.associative_scan(tile, 0, added)" in compiled.source
    assert "reverse" not in compiled.source
    check(Function(lambda _, x: x.cumsum(1)), torch.randn(2, 75, 6).half(), factor=5.0)


def test_integers_are_counted_exactly(check):
    compiled = check(Function(lambda _, x: x.cumsum(1)), torch.rand(3, 700) > 0.5, calls=[[torch.rand(4, 9) > 0.5]])
    assert [region.kind for region in compiled.regions] == ["scan"]
    check(Function(lambda _, x: x.cumsum(0) + 1), torch.randint(-(2**40), 2**40, (40, 5)))


def test_running_extremes_keep_nan_and_infinities(interpreter, graph_of):
    module = Function(lambda _, x: (x.cummax(1).values, x.cummin(1).values, x.logcumsumexp(1)))
    x = torch.randn(4, 12)
    x[0, 3], x[1, 4], x[2, :3], x[3, 5] = float("nan"), float("inf"), -float("inf"), -float("inf")
    graph = graph_of(module, x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for got, wanted in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True)


def test_indices_of_running_extremes_over_other_dimensions_stay(graph_of):
    graph = graph_of(Function(lambda _, x: tuple(x.cummax(0)[i] * 2 for i in (0, 1))), torch.randn(5, 7))
    assert "torch.ops.aten.cummax" in compile_graph(graph, variants(graph)[0]).source


def test_flips_over_other_dimensions_do_not_turn_the_scan(check):
    over_rows = check(Function(lambda _, x: x.flip(0).cumsum(1).flip(0)), torch.randn(5, 7))
    over_columns = check(Function(lambda _, x: x.flip(1).cumsum(1).flip(1)), torch.randn(5, 7))
    assert len(over_columns.kernels) == 1 < len(over_rows.kernels)


@pytest.mark.parametrize("shape", [[300, 4000], [64, 256, 32]])
def test_scans_compile_for_hopper(graph_of, offline_compile, shape):
    graph = graph_of(Function(lambda _, x: x.flip(1).cumsum(1).flip(1)), torch.randn(shape))
    (row,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, shape)
    assert row["spill_bytes"] == 0
