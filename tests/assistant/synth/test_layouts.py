"""Convolution chains: bias moved behind, channels-last inside, row-major results, against float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.layouts import channels_last, only_products, without_conv_bias
from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.rewrites import rewrite


def shuffled_norm(channels, kind=nn.BatchNorm2d):
    norm = kind(channels)
    nn.init.uniform_(norm.running_var, 0.5, 1.5)
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


def residual():
    parts = {"conv": nn.Conv2d(8, 8, 3, padding=1), "norm": shuffled_norm(8)}
    return Function(lambda s, x: x + F.hardswish(s.norm(s.conv(x))), **parts), [torch.randn(2, 8, 7, 9)]


def two_convolutions():
    parts = {"a": nn.Conv2d(4, 6, 3), "norm": shuffled_norm(6), "b": nn.Conv2d(6, 5, 1)}
    return Function(lambda s, x: s.b(F.relu(s.norm(s.a(x)))).sigmoid(), **parts), [torch.randn(2, 4, 9, 8)]


def pooled():
    parts = {"a": nn.Conv2d(4, 6, 3), "b": nn.Conv2d(6, 6, 3, groups=6, bias=False)}
    return Function(lambda s, x: F.avg_pool2d(F.gelu(s.b(F.max_pool2d(s.a(x).relu(), 2))), 2), **parts), [
        torch.randn(2, 4, 17, 16)
    ]


def transposed():
    parts = {"up": nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), "gain": nn.Parameter(torch.randn(6, 1, 1))}
    return Function(lambda s, x: (s.up(x) * s.gain).clamp(-1, 1).sigmoid(), **parts), [torch.randn(2, 4, 5, 6)]


def channel_softmax():
    parts = {"conv": nn.Conv2d(4, 12, 3)}
    return Function(lambda s, x: torch.softmax(s.conv(x) * 2, 1).mul(3), **parts), [torch.randn(2, 4, 9, 8)]


def channel_minimum():
    parts = {"conv": nn.Conv2d(4, 12, 3), "shift": torch.randn(1, 1, 1)}
    return Function(lambda s, x: s.conv(x).amin(1, keepdim=True).tanh() + s.shift, **parts), [torch.randn(2, 4, 9, 8)]


def channel_mean_dropped():
    return Function(lambda s, x: s.conv(x).relu().mean(1) * 2, conv=nn.Conv2d(4, 12, 3)), [torch.randn(2, 4, 9, 8)]


def global_average_and_head():
    parts = {"conv": nn.Conv2d(4, 12, 3), "head": nn.Linear(12, 5)}
    return Function(lambda s, x: s.head(s.conv(x).relu().mean((2, 3))).relu(), **parts), [torch.randn(3, 4, 9, 8)]


def group_norm():
    parts = {"conv": nn.Conv2d(4, 12, 3), "norm": nn.GroupNorm(3, 12)}
    return Function(lambda s, x: F.silu(s.norm(s.conv(x))), **parts), [torch.randn(2, 4, 9, 8)]


def three_dimensional():
    parts = {"conv": nn.Conv3d(2, 6, 3, padding=1), "norm": shuffled_norm(6, nn.BatchNorm3d)}
    return Function(lambda s, x: torch.logsumexp(s.norm(s.conv(x)), 1, keepdim=True).relu(), **parts), [
        torch.randn(2, 2, 4, 5, 6)
    ]


def flattened():
    parts = {"conv": nn.Conv2d(3, 4, 3), "head": nn.Linear(4 * 5 * 6, 7)}
    return Function(lambda s, x: s.head(s.conv(x).relu().flatten(1)), **parts), [torch.randn(2, 3, 7, 8)]


def one_dimensional():
    parts = {"conv": nn.Conv1d(4, 8, 3, dilation=2, padding=2)}
    return Function(lambda s, x: torch.tanh(s.conv(x)) * 0.5, **parts), [torch.randn(2, 4, 20)]


CASES = [residual, two_convolutions, pooled, transposed, channel_softmax, channel_minimum, channel_mean_dropped]
CASES += [global_average_and_head, group_norm, three_dimensional, flattened, one_dimensional]


@pytest.mark.parametrize("make", CASES)
def test_both_layouts_agree_with_float64_and_keep_strides(make, interpreter, graph_of, errors):
    module, args = make()
    module.eval()
    graph = graph_of(module, *args)
    both = {item.channels_last: item for item in reversed(variants(graph))}
    more = [torch.randn(1, *args[0].shape[1:])]
    for variant in both.values():
        source = compile_graph(graph, variant).source
        for call, outputs in zip((args, more), interpreter.run(source, module.state_dict(), [args, more]), strict=True):
            got, own = errors(module, call, outputs)
            assert got <= 2 * own + 1e-9, f"error {got:.2e}, the reference's {own:.2e}\n{source}"
            assert outputs[0].stride() == module(*call).stride(), source


def test_bias_joins_the_kernel_that_follows(graph_of):
    module, args = residual()
    rewritten = rewrite(without_conv_bias(graph_of(module.eval(), *args)))
    (conv,) = [node for node in rewritten.nodes if node.bare_op == "conv2d"]
    assert conv.args[2] is None
    alone = Function(lambda s, x: s.conv(x).cumsum(-1), conv=nn.Conv2d(3, 4, 3))
    (conv, _) = without_conv_bias(graph_of(alone, torch.randn(1, 3, 5, 5))).nodes
    assert conv.args[2] is not None


def test_values_stay_in_layout_from_one_convolution_to_the_next(graph_of):
    module, args = two_convolutions()
    nodes = channels_last(rewrite(without_conv_bias(graph_of(module.eval(), *args)))).nodes
    copied = [node.args[0].name for node in nodes if node.bare_op == "contiguous"]
    assert sorted(copied) == ["args_0", "p_a_weight"]


@pytest.mark.parametrize("variant", [0, 1])
def test_single_images_have_no_batch(variant, check):
    parts = {"a": nn.Conv2d(4, 6, 3), "b": nn.ConvTranspose2d(6, 3, 2), "norm": nn.GroupNorm(2, 6)}
    check(Function(lambda s, x: s.b(F.relu(s.norm(s.a(x)[None])[0])), **parts), torch.randn(4, 9, 8), variant=variant)
    check(Function(lambda s, x: F.relu(s.a(x)), a=nn.Conv1d(4, 6, 3)), torch.randn(4, 9), variant=variant)
    check(Function(lambda s, x: F.relu(s.a(x)), a=nn.Conv3d(2, 3, 3)), torch.randn(2, 5, 4, 6), variant=variant)


def test_graphs_without_convolutions_are_left_alone(graph_of):
    graph = graph_of(Function(lambda _, x: F.gelu(x) * 2), torch.randn(2, 3, 4, 4))
    assert channels_last(graph) is graph


def test_weights_are_kept_in_their_layout(interpreter, graph_of):
    module, args = residual()
    graph = graph_of(module.eval(), *args)
    source = compile_graph(graph, variants(graph)[0]).source
    assert "memory_format=torch.channels_last))" in source
    state = copy.deepcopy(module.state_dict())
    interpreter.run(source, state, [args])
    for key, value in state.items():
        torch.testing.assert_close(interpreter.state[key], value)


@pytest.mark.parametrize(
    ("conv", "wanted"),
    [
        (nn.Conv2d(4, 6, 1), True),
        (nn.Conv2d(4, 6, 1, stride=2), False),
        (nn.Conv2d(4, 6, 1, padding=1), False),
        (nn.Conv2d(4, 6, 1, groups=2), False),
        (nn.Conv2d(4, 6, 3), False),
        (nn.ConvTranspose2d(4, 6, 1), False),
        (nn.Conv2d(4, 6, 1, dtype=torch.bfloat16), False),
    ],
)
def test_products_over_channels_are_tried_as_images_lie_first(conv, wanted, graph_of):
    x = torch.randn(2, 4, 5, 5, dtype=conv.weight.dtype)
    graph = graph_of(Function(lambda s, x: s.conv(x).relu(), conv=conv), x)
    assert only_products(graph) == wanted
    assert variants(graph)[0].channels_last != wanted
    last = x.contiguous(memory_format=torch.channels_last)
    assert not only_products(graph_of(Function(lambda s, x: s.conv(x).relu(), conv=conv), last))
