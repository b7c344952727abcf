"""Images sampled at the places of a grid, against float64 under the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants

MODES = [(mode, outside) for mode in ("bilinear", "nearest") for outside in ("zeros", "border", "reflection")]


def grid_of(images=2, high=5, wide=7):
    return torch.rand(images, high, wide, 2) * 3 - 1.5


def sampler(mode, outside, corners):
    return lambda _, x, g: F.grid_sample(x, g, mode=mode, padding_mode=outside, align_corners=corners)


@pytest.mark.parametrize("corners", [False, True])
def test_every_mode(check, corners):
    ways = [sampler(mode, outside, corners) for mode, outside in MODES]
    args = [item for _ in ways for item in (torch.randn(2, 3, 6, 8), grid_of())]
    compiled = check(Each(ways, 2), *args, factor=3.0)
    assert len(compiled.kernels) == len(ways)


def test_other_sizes_and_layouts(check):
    x, grid = torch.randn(2, 20, 9, 5), grid_of()
    last, turned = x.to(memory_format=torch.channels_last), grid_of(2, 7, 5).transpose(1, 2)
    module = Function(sampler("bilinear", "zeros", False))
    check(module, x, grid, calls=[[torch.randn(1, 33, 4, 4), grid_of(1, 30, 40)], [last, turned]], factor=3.0)
    single = Function(sampler("bilinear", "reflection", True))
    check(single, torch.randn(1, 2, 1, 6), grid_of(1), factor=3.0)


def test_half_precision(check):
    module = Function(lambda _, x, g: F.grid_sample(x, g, align_corners=False))
    check(module, torch.randn(2, 3, 6, 8).half(), (grid_of() * 64).round().div(64).half())


def test_places_that_are_not_finite_are_outside(interpreter, graph_of):
    module = Function(sampler("bilinear", "zeros", False))
    x, grid = torch.ones(1, 2, 4, 4), torch.zeros(1, 1, 4, 2)
    grid[0, 0, 0, 0], grid[0, 0, 1, 1], grid[0, 0, 2] = float("nan"), float("inf"), -1e30
    graph = graph_of(module, x, grid)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x, grid]])
    torch.testing.assert_close(got[0, 0, 0], torch.tensor([0.0, 0.0, 0.0, 1.0]))


def test_sampling_compiles_for_hopper(graph_of, offline_compile):
    module = Function(lambda _, x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False))
    graph = graph_of(module, torch.randn(2, 8, 32, 32))
    (kernel,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [2, 8, 32, 32])
    assert kernel["spill_bytes"] == 0
