"""Running sums and products with their neighbours, from either end, along any dimension, against float64."""

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
]


def test_scans_agree_with_float64(check):
    def rows(*shape):
        return [torch.randn(shape) for _ in SCANS]

    compiled = check(Each(SCANS), *rows(3, 2500), calls=[rows(5, 70), rows(2, 9)], factor=5.0)
    assert [region.kind for region in compiled.regions] == ["scan"] * len(SCANS)


def test_scans_along_middle_dimensions_read_wide_tiles(check):
    compiled = check(Function(lambda _, x: x.flip(1).cumsum(1).flip(1)), torch.randn(2, 75, 21), factor=5.0)
    assert "block_m = 64" in compiled.source


def test_flips_over_other_dimensions_stay(graph_of):
    graph = graph_of(Function(lambda _, x: x.flip(0).cumsum(1).flip(0)), torch.randn(5, 7))
    compiled = compile_graph(graph, variants(graph)[0])
    assert compiled.source.count(".flip") == 2


def test_scans_compile_for_hopper(graph_of, offline_compile):
    graph = graph_of(Function(lambda _, x: x.flip(1).cumsum(1).flip(1)), torch.randn(300, 4000))
    (row,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [300, 4000])
    assert row["spill_bytes"] == 0
