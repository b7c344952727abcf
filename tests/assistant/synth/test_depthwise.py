"""Depthwise convolutions in every cut: rows a lane, lanes along channels, dilation, stride, one to three dimensions."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth import depthwise_form
from drk.assistant.synth.propose import compile_graph, variants

LAST = torch.channels_last


@pytest.fixture
def small_devices(monkeypatch):
    """Small tensors are cut like large ones."""
    monkeypatch.setattr(depthwise_form, "LANES", 1)


def depthwise(channels, size, **options):
    return nn.Conv2d(channels, channels, size, groups=channels, **options)


PARTS = {
    "same": depthwise(5, 3, padding=1),
    "strided": depthwise(5, (5, 3), stride=2, padding=(2, 0), bias=False),
    "dilated": depthwise(5, 3, dilation=2, padding=2),
    "both": depthwise(5, 3, stride=2, dilation=2, padding=1),
    "tall": depthwise(5, (5, 1), padding=(4, 1)),
    "norm": nn.BatchNorm2d(5),
    "scale": torch.randn(5, 1, 1),
}
CHAINS = [
    lambda s, x: F.relu6(s.norm(s.same(x * s.scale))) + x,
    lambda s, x: s.strided(x.relu()).relu(),
    lambda s, x: F.silu(s.dilated(x.sigmoid())),
    lambda s, x: s.both(x) * s.scale,
    lambda s, x: s.tall(x).exp(),
]


@pytest.mark.usefixtures("small_devices")
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_every_cut_agrees_with_float64(check, graph_of, layout):
    images = [torch.randn(2, 5, 16, 7).contiguous(memory_format=layout) for _ in CHAINS]
    others = [torch.randn(1, 5, 9, 10)[:, :, :, ::2] for _ in CHAINS]
    module = Each(CHAINS, **PARTS).eval()
    variant = next(item for item in variants(graph_of(module, *images)) if item.channels_last == (layout is LAST))
    compiled = check(module, *images, variant=variant, calls=[others], factor=4.0)
    assert [region.kind for region in compiled.regions].count("depthwise") == len(CHAINS)
    assert "F.conv" not in compiled.source
    assert f"sums = (zeros,) * {4 if layout is LAST else 8}" in compiled.source
    assert ("_taps_ptr" in compiled.source) == (layout is LAST)


@pytest.mark.usefixtures("small_devices")
def test_row_major_images_become_channels_last_on_the_way(check, graph_of, monkeypatch):
    module = Function(lambda s, x: F.relu(s.second(s.first(x))), first=depthwise(4, 3), second=nn.Conv2d(4, 4, 1))
    images = torch.randn(2, 4, 10, 6)
    variant = next(item for item in variants(graph_of(module, images)) if item.channels_last)
    check(module, images, variant=variant, factor=4.0)
    monkeypatch.setattr(depthwise_form, "UNROLLED", 8)
    compiled = check(module, images, variant=variant, calls=[[images.transpose(2, 3)]], factor=4.0)
    assert "for k_2 in range(3)" in compiled.source


@pytest.mark.usefixtures("small_devices")
def test_one_and_three_dimensions_in_rows(check):
    tokens = Function(
        lambda s, x: F.silu(s.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2),
        conv=nn.Conv1d(40, 40, 4, groups=40, padding=3),
    )
    assert "_taps_ptr" in check(tokens, torch.randn(2, 21, 40), calls=[[torch.randn(1, 5, 40)]], factor=4.0).source
    volume = Function(
        lambda s, x: s.conv(x).relu() * s.scale,
        conv=nn.Conv3d(4, 4, (2, 3, 3), groups=4, padding=(1, 1, 0), stride=(1, 1, 2)),
        scale=torch.randn(1, 1, 3, 1, 1),
    )
    compiled = check(volume, torch.randn(1, 4, 2, 8, 7), factor=4.0)
    assert "sums = (zeros,) * 8" in compiled.source


@pytest.mark.usefixtures("small_devices")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, LAST])
def test_half_precision_adds_up_in_float32(check, dtype, layout):
    module = Function(lambda s, x: F.hardswish(s.conv(x) + x), conv=depthwise(10, 5, padding=2)).to(dtype)
    images = torch.randn(2, 10, 8, 11).to(dtype).contiguous(memory_format=layout)
    check(module, images, variant=1)


@pytest.mark.usefixtures("small_devices")
def test_infinities_and_nans_stay_in_their_windows(interpreter, graph_of):
    module = Function(lambda s, x: s.conv(x) * 1.5, conv=depthwise(3, 3, padding=1)).eval()
    images = torch.randn(1, 3, 8, 8)
    images[0, 0, 0, 0], images[0, 1, 4, 4], images[0, 2, 7, 7] = float("nan"), float("inf"), float("-inf")
    graph = graph_of(module, images)
    source = compile_graph(graph, variants(graph)[1]).source
    ((got,), (none,)) = interpreter.run(source, module.state_dict(), [[images], [images[:0]]])
    torch.testing.assert_close(got, module(images), equal_nan=True)
    assert none.shape == (0, 3, 8, 8)


def test_lanes_run_along_what_is_innermost(graph_of):
    module = Function(lambda s, x: s.conv(x).relu(), conv=depthwise(192, 5, padding=2))
    graph = graph_of(module, torch.randn(4, 192, 80, 80))
    region = next(item for item in compile_graph(graph, variants(graph)[1]).regions if item.window is not None)
    form = depthwise_form.choose_form(region, region.window, variants(graph)[1].block)
    assert (form.by_channel, form.rows, form.width) == (False, 8, 1)
    graph = graph_of(module, torch.randn(4, 192, 80, 80).contiguous(memory_format=LAST))
    region = next(item for item in compile_graph(graph, variants(graph)[0]).regions if item.window is not None)
    form = depthwise_form.choose_form(region, region.window, variants(graph)[0].block)
    assert (form.by_channel, form.rows, form.width) == (True, 4, 2)
