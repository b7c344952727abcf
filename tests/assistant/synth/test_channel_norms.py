"""Norms around convolutions: how often each kernel goes over tensors of full size, and results against float64."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.pointwise import BLOCKS
from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.split_reduction import passes_of


def image(*shape):
    return [torch.randn(shape)]


def norm(kind, *sizes, **options):
    made = kind(*sizes, **options)
    if made.weight is not None:
        nn.init.uniform_(made.weight, 0.5, 1.5)
        nn.init.normal_(made.bias)
    return made


def conv_group_norm_silu():
    parts = {"conv": nn.Conv2d(2, 6, 3), "norm": norm(nn.GroupNorm, 2, 6)}
    return Function(lambda s, x: F.silu(s.norm(s.conv(x))), **parts), image(2, 2, 68, 66)


def residual_of_two():
    def forward(s, x):
        return s.side(x) + F.silu(s.second(s.b(F.silu(s.first(s.a(x)))))) * 0.2

    parts = {"a": nn.Conv2d(3, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 3, padding=1), "side": nn.Conv2d(3, 6, 1)}
    return Function(forward, **parts, first=norm(nn.GroupNorm, 2, 6), second=norm(nn.GroupNorm, 3, 6)), image(
        2, 3, 72, 64
    )


def transposed_group_norm():
    parts = {"up": nn.ConvTranspose2d(3, 6, 4, stride=2, padding=1), "norm": norm(nn.GroupNorm, 3, 6)}
    return Function(lambda s, x: torch.tanh(s.norm(F.gelu(s.up(x)))) * 2, **parts), image(2, 3, 33, 32)


def group_norm_global_mean():
    parts = {"conv": nn.Conv3d(2, 4, 3), "norm": norm(nn.GroupNorm, 2, 4)}
    return Function(lambda s, x: s.norm(s.conv(x)).mean(dim=[1, 2, 3, 4]), **parts), image(2, 2, 18, 18, 18)


def image_mean():
    parts = {"conv": nn.Conv2d(2, 6, 3), "norm": norm(nn.GroupNorm, 2, 6)}
    return Function(lambda s, x: F.relu(s.norm(s.conv(x))).mean((2, 3)), **parts), image(2, 2, 68, 66)


def volume_minimum_clamp():
    parts = {"conv": nn.Conv3d(2, 4, 3), "norm": norm(nn.GroupNorm, 2, 4)}

    def forward(s, x):
        y = s.norm(s.conv(x))
        return torch.clamp(torch.min(y, torch.tensor(0.1)), 0.0, 1.0)

    return Function(forward, **parts), image(2, 2, 18, 18, 18)


def instance_norm():
    parts = {"conv": nn.Conv2d(2, 6, 3), "norm": norm(nn.InstanceNorm2d, 6, affine=True)}
    return Function(lambda s, x: F.leaky_relu(s.norm(s.conv(x)), 0.2) / 2, **parts), image(2, 2, 36, 34)


def plain_group_norm():
    parts = {"conv": nn.Conv2d(2, 6, 3, bias=False), "norm": nn.GroupNorm(6, 6, affine=False)}
    return Function(lambda s, x: s.norm(s.conv(x)).sigmoid(), **parts), image(2, 2, 68, 66)


def small_groups():
    parts = {"conv": nn.Conv2d(2, 6, 3), "norm": norm(nn.GroupNorm, 2, 6)}
    return Function(lambda s, x: F.silu(s.norm(F.relu(s.conv(x)))), **parts), image(2, 2, 12, 11)


ROUNDING = 2.0**-24
STATISTICS, RESULT = (1, 0), (1, 1)
CASES = {
    conv_group_norm_silu: ([STATISTICS, RESULT], [STATISTICS, RESULT]),
    transposed_group_norm: ([STATISTICS, RESULT], [STATISTICS, RESULT]),
    group_norm_global_mean: ([STATISTICS, STATISTICS], [STATISTICS, STATISTICS]),
    image_mean: ([STATISTICS, STATISTICS], [STATISTICS, STATISTICS]),
    volume_minimum_clamp: ([STATISTICS, RESULT], [STATISTICS, RESULT]),
    instance_norm: ([STATISTICS, RESULT], [RESULT]),
    plain_group_norm: ([STATISTICS, RESULT], [RESULT]),
    small_groups: ([STATISTICS, RESULT], [RESULT]),
}
"""(reads, writes) of full tensors by each kernel that touches any: channels last, then row-major."""


def layouts(graph):
    """The first variants in channels-last and in row-major layout, which must be the first two."""
    first, second = variants(graph)[:2]
    assert (first.channels_last, second.channels_last) == (True, False)
    return first, second


def traffic(compiled, numel):
    """(reads, writes) of tensors of at least ``numel`` elements for each pass of each kernel that has any."""
    rows = []
    for region in compiled.regions:
        for part in [item.region for item in passes_of(region)] if region.kind == "split" else [region]:
            reads = sum(item.meta.numel >= numel for item in (*part.inputs, *part.pooled))
            writes = sum(item.meta.numel >= numel for item in part.outputs)
            rows += [(reads, writes)] if reads + writes else []
    return sorted(rows)


def torch_operators(source):
    """Names of the torch operators in forward that work on tensors of full size."""
    forward = source.split("def forward")[1]
    return [name for name in re.findall(r"(?:F|\w)\.(\w+)\(", forward) if name not in {"reshape", "copy_"}]


@pytest.mark.parametrize("make", CASES)
def test_full_tensors_are_read_once_for_statistics_and_once_for_the_result(make, graph_of):
    module, args = make()
    graph = graph_of(module.eval(), *args)
    numel = max(node.meta.numel for node in graph.nodes if node.bare_op.startswith("conv")) // 2
    for variant, wanted in zip(layouts(graph), CASES[make], strict=True):
        compiled = compile_graph(graph, variant)
        layout_changes = [r for r in compiled.regions if [n.bare_op for n in r.nodes] == ["contiguous"]]
        assert len(layout_changes) == variant.channels_last, "the module's input is laid out once"
        compiled_regions = [region for region in compiled.regions if region not in layout_changes]
        rows = traffic(type(compiled)(compiled.source, (), tuple(compiled_regions)), numel)
        assert rows == wanted, compiled.source
        assert set(torch_operators(compiled.source)) <= {"conv2d", "conv3d", "conv_transpose2d", "contiguous"}


SHORT = (conv_group_norm_silu, group_norm_global_mean, small_groups)
CHECKED = [make if make in SHORT else pytest.param(make, marks=pytest.mark.long) for make in (*CASES, residual_of_two)]


@pytest.mark.parametrize("make", CHECKED)
def test_both_layouts_agree_with_float64_at_two_sizes(make, interpreter, graph_of, errors):
    module, args = make()
    graph = graph_of(module.eval(), *args)
    calls = [[args[0][:1]], [torch.randn(3, args[0].shape[1], *(6 + dim for dim in range(args[0].dim() - 2))) + 0.5]]
    for variant in layouts(graph):
        source = compile_graph(graph, replace(variant, block=BLOCKS[2])).source
        for call, outputs in zip(calls, interpreter.run(source, module.state_dict(), calls), strict=True):
            got, own = errors(module, call, outputs)
            assert got <= max(3 * own, 4 * ROUNDING), f"error {got:.2e}, the reference's {own:.2e}\n{source}"
            assert outputs[0].stride() == module(*call).stride(), source


def test_a_convolution_block_is_three_convolutions_and_five_passes(graph_of):
    module, args = residual_of_two()
    graph = graph_of(module.eval(), *args)
    numel = max(node.meta.numel for node in graph.nodes)
    for variant in layouts(graph):
        compiled = compile_graph(graph, variant)
        rows = traffic(compiled, numel)
        assert rows == [STATISTICS, STATISTICS, RESULT, (2, 1)], compiled.source
        assert torch_operators(compiled.source).count("conv2d") == 3
        assert all("self." not in line.split(",")[2] for line in compiled.source.splitlines() if "F.conv2d(" in line)


def test_statistics_of_half_precision_are_float32(interpreter, graph_of):
    module, _ = conv_group_norm_silu()
    module = module.eval().bfloat16()
    graph = graph_of(module, torch.randn(2, 2, 68, 66).bfloat16())
    x = (torch.randn(2, 2, 12, 13) + 4).bfloat16()
    exact = module.double()(x.double()).detach()
    module.bfloat16()
    own = (module(x).double() - exact).square().mean().sqrt()
    for variant in layouts(graph):
        compiled = compile_graph(graph, variant)
        (outputs,) = interpreter.run(compiled.source, module.state_dict(), [[x]])
        assert outputs[0].dtype == torch.bfloat16
        assert (outputs[0].double() - exact).square().mean().sqrt() <= 1.5 * own
        assert {
            item.meta.dtype for region in compiled.regions if region.kind != "pointwise" for item in region.outputs
        } == {"float32"}
