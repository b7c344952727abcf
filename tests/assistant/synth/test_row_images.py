"""1-D convolutions as images of one row: results, strides, what stays on images, the layout of weights."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.row_images import rows_as_images


def gated_residual():
    parts = {"conv": nn.Conv1d(4, 8, 3, dilation=2, padding=2), "norm": nn.BatchNorm1d(8)}
    nn.init.uniform_(parts["norm"].running_var, 0.5, 1.5)

    def forward(s, x):
        value, gate = s.norm(s.conv(x)).chunk(2, dim=1)
        return x + torch.tanh(value) * torch.sigmoid(gate)

    return Function(forward, **parts), torch.randn(2, 4, 21)


def transposed_snake():
    parts = {"up": nn.ConvTranspose1d(4, 6, 4, stride=2, padding=1, output_padding=1), "gain": torch.rand(6, 1)}
    return Function(lambda s, x: s.up(x) + (s.gain * s.up(x)).sin().pow(2), **parts), torch.randn(2, 4, 9)


def two_convolutions_and_pools():
    parts = {"a": nn.Conv1d(3, 6, 5, stride=2), "b": nn.Conv1d(6, 5, 3, padding="same", groups=1)}
    return (
        Function(lambda s, x: F.avg_pool1d(F.max_pool1d(s.b(F.relu(s.a(x))), 3, 2, 1), 2), **parts),
        torch.randn(2, 3, 47),
    )


def causal_and_reduced():
    parts = {"a": nn.Conv1d(4, 6, 3, padding=2), "b": nn.Conv1d(10, 3, 2), "scale": torch.randn(3, 1)}

    def forward(s, x):
        y = s.a(x)[..., :-2]
        z = s.b(torch.cat([y, x], 1)) * s.scale
        return z.mean(-1), z - z.amax(2, keepdim=True), z.cumsum(-1), z.sum(1)

    return Function(forward, **parts), torch.randn(2, 4, 19)


def normed():
    parts = {"conv": nn.Conv1d(4, 6, 3), "norm": nn.GroupNorm(2, 6), "other": nn.Conv1d(6, 6, 3, groups=6)}
    forward = lambda s, x: F.adaptive_avg_pool1d(F.silu(s.other(F.instance_norm(s.norm(s.conv(x))))), 1)  # noqa: E731
    return Function(forward, **parts), torch.randn(2, 4, 40)


@pytest.mark.parametrize(
    "make", [gated_residual, transposed_snake, two_convolutions_and_pools, causal_and_reduced, normed]
)
def test_agree_with_float64_and_keep_strides(make, interpreter, graph_of, errors):
    module, x = make()
    module.eval()
    graph = graph_of(module, x)
    assert any(node.bare_op.endswith("2d") for node in rows_as_images(graph).nodes)
    variant = next(item for item in variants(graph) if item.channels_last)
    source = compile_graph(graph, variant).source
    assert "F.conv1d" not in source and "F.conv_transpose1d" not in source
    calls = [
        [x],
        [torch.randn(1, *x.shape[1:])],
        [torch.randn(3, *x.shape[1:]).transpose(0, 2).contiguous().mT.mT.transpose(0, 2)],
    ]
    for call, outputs in zip(calls, interpreter.run(source, module.state_dict(), calls), strict=True):
        got, own = errors(module, call, outputs)
        assert got <= 2 * own + 1e-9, f"error {got:.2e}, the reference's {own:.2e}\n{source}"
        truth = module(*call)
        for mine, wanted in zip(outputs, truth if isinstance(truth, tuple) else (truth,), strict=True):
            assert call is calls[2] or mine.stride() == wanted.stride(), source


def test_values_stay_images_between_convolutions(graph_of):
    module, x = two_convolutions_and_pools()
    nodes = rows_as_images(graph_of(module.eval(), x)).nodes
    assert [node.bare_op for node in nodes if node.bare_op == "squeeze"] == ["squeeze"]
    assert [node.args[0].name for node in nodes if node.bare_op == "unsqueeze" and "weight" not in node.name] == [
        "args_0"
    ]


def test_weights_are_kept_with_channels_innermost(interpreter, graph_of):
    module, x = gated_residual()
    graph = graph_of(module.eval(), x)
    source = compile_graph(graph, variants(graph)[0]).source
    assert "torch.empty((8, 3, 4), dtype=torch.float32).transpose(1, 2)" in source
    interpreter.run(source, module.state_dict(), [[x]])
    torch.testing.assert_close(interpreter.state["conv.weight"], module.conv.weight.detach())


def test_graphs_that_gain_nothing_are_left_alone(graph_of):
    for conv in (nn.Conv1d(4, 5, 1), nn.Conv1d(4, 4, 3, groups=4)):
        graph = graph_of(Function(lambda s, x: s.conv(x).relu(), conv=conv), torch.randn(2, 4, 9))
        assert rows_as_images(graph) is graph
