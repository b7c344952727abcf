"""Pooling with its neighbours in one kernel, against float64, in both layouts."""

import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants

IMAGES = torch.randn(2, 6, 13, 11)


POOLS = [
    lambda _, x: F.max_pool2d(x, 3, 2, 1).relu(),
    lambda _, x: F.max_pool2d(x, (2, 3), ceil_mode=True) * 2,
    lambda _, x: F.max_pool2d(x, 3, 1, 0, dilation=2),
    lambda _, x: F.avg_pool2d(x.sigmoid() * 2, 2) + 1,
    lambda _, x: F.avg_pool2d(x, 3, 2, 1),
    lambda _, x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    lambda _, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True).tanh(),
    lambda _, x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=5),
    lambda _, x: F.avg_pool1d(x.flatten(2), 5, 2),
    lambda _, x: F.max_pool1d(x.flatten(2), 4, 4),
    lambda _, x: F.max_pool3d(x.unsqueeze(1), 2).exp(),
    lambda _, x: F.avg_pool3d(x.unsqueeze(1), (3, 2, 2), (2, 2, 1), (1, 0, 1)),
]


def test_pools_agree_with_float64(check):
    def images(*shape):
        return [torch.randn(shape) for _ in POOLS]

    others = [images(3, 4, 9, 8), images(1, 3, 20, 35), images(2, 3, 7, 33)]
    compiled = check(Each(POOLS), *images(2, 6, 13, 11), calls=others, factor=3.0)
    assert {region.kind for region in compiled.regions} == {"pool"}
    assert len(compiled.kernels) == len(POOLS)


def test_tensors_that_lie_otherwise_than_captured(check):
    module = Function(lambda s, x, y: F.avg_pool2d((x + y).relu() * s.scale, 3, 2, 1), scale=torch.randn(6, 1, 1))
    laid_out = [[torch.randn(2, 20, 18, 6).permute(0, 3, 1, 2), torch.randn(2, 6, 20, 18)]]
    laid_out += [[torch.randn(2, 6, 9, 16)[:, :, :, ::2], torch.randn(2, 12, 9, 8)[:, ::2]]]
    check(module, IMAGES, torch.randn(2, 6, 13, 11), calls=laid_out)
    alone = Function(lambda _, x: F.max_pool2d(x, 3, 2, 1) + 1)
    single = torch.randn(3, 1, 9, 8)
    check(alone, IMAGES, calls=[[single], [single.contiguous(memory_format=torch.channels_last)]])


def test_a_gate_for_each_channel_of_each_image_before_the_pool(check):
    gated = Function(lambda _, x, gate: F.avg_pool2d(x * gate, 2).tanh())
    check(gated, IMAGES, torch.rand(2, 6, 1, 1), calls=[[torch.randn(1, 3, 8, 6), torch.rand(1, 3, 1, 1)]])
    check(gated, IMAGES, torch.rand(1, 6, 1, 1))
    check(gated, IMAGES, torch.rand(2, 1, 13, 11))


def test_half_precision(check):
    check(Function(lambda _, x: F.avg_pool2d(x.relu(), 3, 2, 1)), IMAGES.half(), factor=3.0)


def test_tiles_compile_for_a_gpu_without_spills(offline_compile, graph_of):
    module = Function(lambda _, x: F.avg_pool2d(x.relu(), 3, 2, 1))
    graph = graph_of(module, torch.randn(2, 4, 96, 96))
    (row,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, (2, 4, 96, 96))
    assert row["spill_bytes"] == 0
    assert row["registers"] <= 96


def test_both_sides_of_a_pool_with_channel_parameters(check):
    parts = {"scale": torch.randn(6, 1, 1), "shift": torch.randn(6, 1, 1)}
    module = Function(lambda s, x: F.hardswish(F.avg_pool2d(x * s.scale, 2) + s.shift), **parts)
    assert len(check(module, IMAGES).kernels) == 1


def test_a_pool_after_a_convolution_in_channels_last(check, graph_of):
    module = Function(
        lambda s, x: F.max_pool2d(F.relu(s.norm(s.conv(x))), 2) * 2, conv=nn.Conv2d(6, 8, 3), norm=nn.BatchNorm2d(8)
    )
    graph = graph_of(module.eval(), IMAGES)
    for variant in variants(graph)[:2]:
        compiled = check(module, IMAGES, variant=variant, factor=3.0)
        assert "pool" in [region.kind for region in compiled.regions]


def test_operators_that_cost_much_are_not_repeated(graph_of):
    graph = graph_of(Function(lambda _, x: F.max_pool2d(F.mish(x).tanh(), 3, 1)), IMAGES)
    compiled = compile_graph(graph, variants(graph)[0])
    assert sorted(region.kind for region in compiled.regions) == ["pointwise", "pool"]


def test_the_largest_with_a_nan_is_nan(interpreter, graph_of):
    module = Function(lambda _, x: F.max_pool2d(x, 2) + 0.5)
    x = IMAGES.clone()
    x[0, 0, 0, 0] = float("nan")
    x[1, 1] = float("-inf")
    graph = graph_of(module, x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    torch.testing.assert_close(outputs[0], module(x), equal_nan=True)
