"""Convolutions that see one pixel as products with their epilogue, in both layouts, against float64."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.pixel_region import pixel_product, sees_one_pixel
from drk.assistant.synth.propose import compile_graph, variants


def norm_and_activation():
    norm = nn.BatchNorm2d(10)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    parts = {"conv": nn.Conv2d(6, 10, 1, bias=False), "norm": norm}
    return Function(lambda s, x: F.relu6(s.norm(s.conv(x))), **parts), torch.randn(2, 6, 7, 9)


def residual():
    return Function(lambda s, x: x + F.silu(s.conv(x)) * 0.5, conv=nn.Conv2d(6, 6, 1)), torch.randn(3, 6, 5, 8)


def bottleneck():
    parts = {"down": nn.Conv2d(12, 4, 1), "mid": nn.Conv2d(4, 4, 3, padding=1), "up": nn.Conv2d(4, 12, 1)}
    return Function(lambda s, x: F.relu(x + s.up(F.relu(s.mid(F.relu(s.down(x)))))), **parts), torch.randn(2, 12, 6, 5)


def one_dimension():
    return Function(lambda s, x: torch.tanh(s.conv(x)) + 1, conv=nn.Conv1d(5, 7, 1)), torch.randn(2, 5, 33)


def three_dimensions():
    return Function(lambda s, x: s.conv(x).sigmoid() * s.gain, conv=nn.Conv3d(3, 4, 1), gain=torch.randn(4, 1, 1, 1)), (
        torch.randn(2, 3, 3, 4, 5)
    )


def gated():
    parts = {"a": nn.Conv2d(5, 6, 1), "b": nn.Conv2d(5, 6, 1)}
    return Function(lambda s, x: s.a(x) * s.b(x).sigmoid(), **parts), torch.randn(2, 5, 6, 7)


def strided_input():
    return Function(lambda s, x: F.gelu(s.conv(x[:, :, 1:, ::2])), conv=nn.Conv2d(4, 6, 1)), torch.randn(2, 4, 7, 8)


CASES = [norm_and_activation, residual, bottleneck, one_dimension, three_dimensions, gated, strided_input]


@pytest.mark.parametrize("make", CASES)
def test_products_over_pixels_agree_with_float64_and_keep_strides(make, interpreter, graph_of, errors):
    module, x = make()
    module, x = module.eval().half(), x.half()
    graph = graph_of(module, x)
    chosen = {item.channels_last: item for item in reversed(variants(graph)) if item.rules.pixels}
    calls = [[x], [torch.randn(1, *x.shape[1:], dtype=x.dtype)]]
    if x.ndim == 4:
        calls.append([torch.randn_like(x).to(memory_format=torch.channels_last)])
    for variant in chosen.values():
        compiled = compile_graph(graph, variant)
        assert any(region.products and region.products[0].of_pixels for region in compiled.regions)
        for call, outputs in zip(calls, interpreter.run(compiled.source, module.state_dict(), calls), strict=True):
            got, own = errors(module, call, outputs)
            assert got <= 2 * own + 1e-9, f"error {got:.2e}, the reference's {own:.2e}\n{compiled.source}"
            if call is not calls[-1]:
                assert outputs[0].stride() == module(*call).stride(), compiled.source


def test_norm_and_activation_join_the_product(graph_of):
    module, x = norm_and_activation()
    graph = graph_of(module.eval().half(), x.half())
    compiled = compile_graph(graph, next(item for item in variants(graph) if item.rules.pixels))
    assert [kernel.name.split("_")[0] for kernel in compiled.kernels][-1] == "conv"
    assert "F.conv2d" not in compiled.source


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2},
        {"padding": 1},
        {"groups": 2},
        {"kernel_size": 3},
        {"padding_mode": "circular"},
        {"dtype": torch.float32},
    ],
)
def test_other_convolutions_stay_with_the_library(graph_of, options):
    conv = nn.Conv2d(
        **({"in_channels": 4, "out_channels": 6, "kernel_size": 1, "bias": False, "dtype": torch.half} | options)
    )
    x = torch.randn(2, 4, 5, 5, dtype=conv.weight.dtype)
    graph = graph_of(Function(lambda s, x: s.conv(x).relu(), conv=conv), x)
    metas = graph.metas()
    plain = options.get("padding_mode") == "circular"
    assert any(sees_one_pixel(node, metas) for node in graph.nodes) is plain
    assert any(pixel_product(node, metas) for node in graph.nodes) is plain
