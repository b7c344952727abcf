"""Rewrites: what disappears, what is written out, and that the rest is kept."""

import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.rewrites import rewrite


def ops(graph):
    return [node.bare_op for node in rewrite(graph).nodes]


def test_operators_that_do_nothing_go(graph_of):
    module = nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.ReLU()).eval()
    assert ops(graph_of(module, torch.randn(4))) == ["relu"]
    module = Function(lambda _, x: x.contiguous().float().view(2, 3).detach().sin())
    assert ops(graph_of(module, torch.randn(2, 3))) == ["sin"]


def test_dropout_in_training_stays(graph_of):
    assert ops(graph_of(nn.Dropout(0.5).train(), torch.randn(4))) == ["dropout"]


def test_a_copy_that_is_returned_stays(graph_of):
    assert ops(graph_of(Function(lambda _, x: x.clone()), torch.randn(4))) == ["clone"]


def test_equal_subexpressions_are_computed_once(graph_of):
    assert ops(graph_of(Function(lambda _, x: x.exp() * x.exp()), torch.randn(4))) == ["exp", "mul"]


def test_random_operators_are_never_merged(graph_of):
    module = Function(lambda _, x: torch.rand_like(x) + torch.rand_like(x))
    assert ops(graph_of(module, torch.randn(4))).count("rand_like") == 2


def test_dead_operators_go(graph_of):
    def forward(_, x):
        x.cos()
        return x.sin()

    assert ops(graph_of(Function(forward), torch.randn(4))) == ["sin"]


def test_softmax_is_written_out_along_any_dimension(graph_of):
    x = torch.randn(3, 5)
    assert ops(graph_of(Function(lambda _, x: x.softmax(-1)), x)) == ["amax", "sub", "exp", "sum", "div"]
    assert ops(graph_of(Function(lambda _, x: x.softmax(0)), x)) == ["amax", "sub", "exp", "sum", "div"]
    assert ops(graph_of(Function(lambda _, x: x.softmax(0)), torch.randn(2000, 5))) == [
        "amax",
        "sub",
        "exp",
        "sum",
        "div",
    ]


def test_layer_norm_and_batch_norm(graph_of):
    assert ops(graph_of(nn.LayerNorm(5), torch.randn(3, 5))) == [
        *("mean", "var", "sub", "add", "rsqrt", "mul", "mul", "add")
    ]
    assert "batch_norm" not in ops(graph_of(nn.BatchNorm2d(3).eval(), torch.randn(2, 3, 4, 4)))


def test_hand_written_silu_is_recognised(graph_of):
    assert ops(graph_of(Function(lambda _, x: torch.sigmoid(x) * x), torch.randn(4))) == ["silu"]


def test_unsqueezed_reductions_keep_their_dimension(graph_of):
    graph = rewrite(graph_of(Function(lambda _, x: x * x.mean(-1).unsqueeze(-1)), torch.randn(3, 5)))
    assert [(node.bare_op, node.meta.shape) for node in graph.nodes] == [("mean", (3, 1)), ("mul", (3, 5))]


def test_expansions_are_left_to_broadcasting(graph_of):
    assert "expand" not in ops(graph_of(Function(lambda _, x: F.normalize(x, dim=-1)), torch.randn(3, 5)))
    assert ops(graph_of(Function(lambda _, x: x.expand(4, 3)), torch.randn(3))) == ["expand"]


def test_contiguous_strides():
    assert contiguous_meta((2, 3, 4), "float32").strides == (12, 4, 1)
    assert contiguous_meta((), "float32").strides == ()
    assert contiguous_meta((5,), "float32").strides == (1,)
