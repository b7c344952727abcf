"""Depthwise convolutions as windows: with bias, padding, stride, dilation and neighbours, in both layouts."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function
from torch import nn

from drk.assistant.synth.propose import compile_graph
from drk.assistant.synth.variants import variants


@pytest.mark.parametrize("variant", [0, 1])
def test_depthwise_convolutions_with_their_neighbours(check, variant):
    parts = {
        "first": nn.Conv2d(6, 6, 3, padding=1, groups=6),
        "second": nn.Conv2d(6, 6, (5, 3), stride=2, padding=(2, 0), groups=6, bias=False),
        "third": nn.Conv2d(6, 6, 3, dilation=2, padding=2, groups=6),
        "norm": nn.BatchNorm2d(6),
    }
    chains = [
        lambda s, x: F.hardswish(s.norm(s.first(x * 2))) + 1,
        lambda s, x: s.second(x).relu(),
        lambda s, x: F.silu(s.third(x)),
    ]
    images = [torch.randn(2, 6, 12, 9) for _ in chains]
    compiled = check(
        Each(chains, **parts), *images, variant=variant, calls=[[x[:1, :, 1:] for x in images]], factor=4.0
    )
    assert [region.kind for region in compiled.regions].count("depthwise") == 3
    assert "F.conv" not in compiled.source


def test_one_and_three_dimensions(check):
    causal = Function(lambda s, x: s.conv(F.pad(x, (3, 0))).relu(), conv=nn.Conv1d(4, 4, 4, groups=4))
    assert "F.conv" not in check(causal, torch.randn(2, 4, 30), factor=4.0).source
    volume = Function(lambda s, x: s.conv(x).relu(), conv=nn.Conv3d(4, 4, 3, groups=4, padding=1))
    assert "F.conv" not in check(volume, torch.randn(1, 4, 5, 6, 7), factor=4.0).source


def test_other_groups_and_a_variant_leave_it_to_the_library(graph_of):
    images = torch.randn(1, 6, 9, 9)
    grouped = graph_of(Function(lambda s, x: s.conv(x).relu(), conv=nn.Conv2d(6, 12, 3, groups=6)), images)
    assert "F.conv2d" in compile_graph(grouped, variants(grouped)[0]).source
    own = graph_of(Function(lambda s, x: s.conv(x).relu(), conv=nn.Conv2d(6, 6, 3, groups=6)), images)
    assert any("F.conv2d" in compile_graph(own, variant).source for variant in variants(own)[:4])
