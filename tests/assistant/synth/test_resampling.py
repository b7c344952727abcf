"""Interpolation and adaptive pooling in one kernel with what follows, against float64, in both layouts."""

import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants

IMAGES = torch.randn(2, 6, 13, 11)
INTERPOLATIONS = [
    lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear").relu() + 1,
    lambda _, x: F.interpolate(x, scale_factor=(1.5, 0.7), mode="bilinear"),
    lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
    lambda _, x: F.interpolate(x, size=(10, 29), mode="bilinear"),
    lambda _, x: F.interpolate(x, size=(1, 5), mode="bilinear", align_corners=True),
    lambda _, x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    lambda _, x: F.interpolate(x, size=(20, 9), mode="bicubic", align_corners=True),
    lambda _, x: F.interpolate(x, scale_factor=1.3, mode="nearest") * 2,
    lambda _, x: F.interpolate(x, size=(7, 30), mode="nearest"),
    lambda _, x: F.interpolate(x, size=(7, 30), mode="nearest-exact"),
    lambda _, x: F.interpolate(x.flatten(2), scale_factor=2.5, mode="linear"),
    lambda _, x: F.interpolate(x.unsqueeze(1), scale_factor=1.5, mode="trilinear"),
    lambda _, x: F.interpolate(x.unsqueeze(1), size=(4, 9, 14), mode="trilinear", align_corners=True).sigmoid(),
]
ADAPTIVE = [
    lambda _, x: F.adaptive_avg_pool2d(x, 4).tanh(),
    lambda _, x: F.adaptive_avg_pool2d(x, (5, 20)),
    lambda _, x: F.adaptive_max_pool2d(x, (3, 5)) * 2,
    lambda _, x: F.adaptive_avg_pool1d(x.flatten(2), 7),
    lambda _, x: F.adaptive_max_pool1d(x.flatten(2), 9),
    lambda _, x: F.adaptive_avg_pool3d(x.unsqueeze(1), (2, 3, 4)),
    lambda _, x: F.adaptive_max_pool3d(x.unsqueeze(1), 2),
    lambda _, x: F.interpolate(x, size=(6, 6), mode="area"),
]


def images(functions, *shape):
    return [torch.randn(shape) for _ in functions]


def test_interpolations_agree_with_float64(check):
    others = [images(INTERPOLATIONS, 1, 3, 20, 7)]
    compiled = check(Each(INTERPOLATIONS), *images(INTERPOLATIONS, 2, 6, 13, 11), calls=others, factor=3.0)
    assert {region.kind for region in compiled.regions} == {"resample"}
    assert len(compiled.kernels) == len(INTERPOLATIONS)


def test_adaptive_pools_agree_with_float64(check):
    others = [images(ADAPTIVE, 3, 4, 9, 8), images(ADAPTIVE, 1, 3, 17, 40)]
    compiled = check(Each(ADAPTIVE), *images(ADAPTIVE, 2, 6, 13, 11), calls=others, factor=3.0)
    assert {region.kind for region in compiled.regions} == {"resample"}


def test_tensors_that_lie_otherwise_than_captured(check):
    module = Function(
        lambda s, x: F.interpolate(x, scale_factor=2, mode="bilinear") * s.scale, scale=torch.randn(6, 1, 1)
    )
    turned = torch.randn(2, 20, 18, 6).permute(0, 3, 1, 2)
    check(module, IMAGES, calls=[[turned], [torch.randn(2, 12, 9, 8)[:, ::2]]])
    check(module, IMAGES.contiguous(memory_format=torch.channels_last), calls=[[IMAGES]])
    last = IMAGES.contiguous(memory_format=torch.channels_last)
    check(Function(lambda _, x: F.adaptive_avg_pool2d(x, 4) + 1), last)


def test_half_precision_is_rounded_once(check):
    check(Function(lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear").relu()), IMAGES.half(), factor=3.0)


def test_nan_and_infinity_in_windows(interpreter, graph_of):
    module = Function(lambda _, x: (F.adaptive_max_pool2d(x, 4) + 0.5, F.adaptive_avg_pool2d(x, 3) * 2))
    x = IMAGES.clone()
    x[0, 0, 0, 0], x[1, 1], x[1, 2, 3, 3] = float("nan"), float("-inf"), float("inf")
    graph = graph_of(module, x)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    for got, own in zip(outputs, module(x), strict=True):
        torch.testing.assert_close(got, own, equal_nan=True)


def test_whole_factors_of_nearest_neighbours_stay_a_change_of_indices(graph_of):
    graph = graph_of(Function(lambda _, x: F.interpolate(x, scale_factor=2, mode="nearest").relu() + 1), IMAGES)
    assert [region.kind for region in compile_graph(graph, variants(graph)[0]).regions] == ["mapped"]


def test_tiles_compile_for_a_gpu_without_spills(offline_compile, graph_of):
    module = Function(lambda _, x: F.interpolate(x, scale_factor=2, mode="bicubic").relu())
    graph = graph_of(module, torch.randn(2, 4, 96, 96))
    (row,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, (2, 4, 96, 96))
    assert row["spill_bytes"] == 0
    assert row["registers"] <= 128
