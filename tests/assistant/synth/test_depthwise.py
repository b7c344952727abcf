"""Depthwise convolutions in every cut: rows a lane, lanes along channels, dilation, stride, one to three dimensions."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth import depthwise_form
from drk.assistant.synth.propose import compile_graph
from drk.assistant.synth.variants import variants

LAST = torch.channels_last


@pytest.fixture
def small_devices(monkeypatch):
    """Small tensors are cut like large ones."""
    monkeypatch.setattr(depthwise_form, "LANES", 1)


def depthwise(channels, size, **options):
    return nn.Conv2d(channels, channels, size, groups=channels, **options)


PARTS = {
    "same": depthwise(3, 3, padding=1),
    "strided": depthwise(3, (5, 3), stride=2, padding=(2, 0), bias=False),
    "dilated": depthwise(3, 3, dilation=2, padding=2),
    "both": depthwise(3, 3, stride=2, dilation=2, padding=1),
    "tall": depthwise(3, (5, 1), padding=(4, 1)),
    "norm": nn.BatchNorm2d(3),
    "scale": torch.randn(3, 1, 1),
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
    images = [torch.randn(2, 3, 16, 7).contiguous(memory_format=layout) for _ in CHAINS]
    others = [torch.randn(1, 3, 9, 10)[:, :, :, ::2] for _ in CHAINS]
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


@pytest.fixture(scope="module")
def form_of(graph_of):
    """The cut of a graph's only depthwise convolution, in its first variant."""

    def choose(module, images):
        graph = graph_of(module.eval(), images)
        first = variants(graph)[0]
        region = next(item for item in compile_graph(graph, first).regions if item.window is not None)
        return depthwise_form.choose_form(region, region.window, first.block)

    return choose


def test_lanes_run_along_what_is_innermost(form_of):
    images = torch.empty(4, 192, 80, 80)
    for size, rows, width in ((3, 4, 4), (5, 4, 2), (7, 8, 1)):
        module = Function(lambda s, x: s.conv(x).relu(), conv=depthwise(192, size, padding=size // 2))
        form = form_of(module, images)
        assert (form.by_channel, form.rows, form.width) == (False, 8, 1)
        form = form_of(module, images.contiguous(memory_format=LAST))
        assert (form.by_channel, form.rows, form.width) == (True, rows, width)


def test_row_major_images_stay_so_unless_channels_are_wanted_innermost(graph_of, check):
    module = Function(lambda s, x: s.point(s.conv(x).relu()), conv=depthwise(6, 3), point=nn.Conv2d(6, 8, 1))
    images = torch.randn(2, 6, 8, 7)
    assert not variants(graph_of(module, images))[0].channels_last
    assert variants(graph_of(module, images.contiguous(memory_format=LAST)))[0].channels_last
    assert variants(graph_of(module.half(), images.half()))[0].channels_last
    module = Function(
        lambda s, x: F.gelu(s.norm(s.conv(x).permute(0, 2, 3, 1))), conv=depthwise(6, 3), norm=nn.LayerNorm(6)
    )
    compiled = check(module, images, calls=[[torch.randn(1, 6, 5, 9)]], factor=4.0)
    assert "memory_format=torch.channels_last)" in compiled.source
    assert [region.kind for region in compiled.regions] == ["depthwise", "row"]


def test_a_lane_holds_its_sums_in_registers(graph_of, offline_compile):
    images = torch.empty(2, 64, 96, 96)
    module = Function(lambda s, x: s.conv(x).relu(), conv=depthwise(64, 3, padding=1)).eval()
    graph = graph_of(module, images)
    source = compile_graph(graph, variants(graph)[0]).source
    (kernel,) = offline_compile(source, list(images.shape))
    assert "sums = (zeros,) * 8" in source
    assert kernel["spill_bytes"] == 0
    assert kernel["registers"] <= 96
    assert kernel["shared_bytes"] == 0  # all tensors lie in lanes alike


@pytest.mark.parametrize(("size", "kernels"), [(3, 1), (7, 2)])
def test_what_stands_before_a_large_window_is_not_computed_again_for_each_tap(graph_of, size, kernels):
    layers = nn.Sequential(nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 8, size, padding=size // 2, groups=8))
    graph = graph_of(layers.eval(), torch.randn(2, 8, 20, 20))
    plain = next(item for item in variants(graph) if not item.channels_last)
    assert len(compile_graph(graph, plain).kernels) == kernels
