"""Summed matrix products as thin ones, against float64, and where they must stay."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.algebra import thin_products
from drk.assistant.synth.rewrites import rewrite


def ops(graph):
    return [node.bare_op for node in thin_products(graph).nodes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "reduce",
    [
        lambda y: y.sum(-1, keepdim=True),
        lambda y: y.sum(dim=2),
        lambda y: y.mean(-1),
        lambda y: y.mean(2, keepdim=True),
    ],
)
def test_summed_linear_layers_agree_with_float64(check, bias, reduce):
    module = Function(lambda s, x: F.gelu(reduce(s.linear(x))) * 2, linear=nn.Linear(50, 70, bias=bias))
    # Both errors are a rounding or two; the reference's many roundings average out.
    compiled = check(module, torch.randn(3, 9, 50), calls=[[torch.randn(1, 4, 50)]], factor=4.0)
    assert "tl.dot(" not in compiled.source
    assert "F.linear(" not in compiled.source
    assert "algebra" in compiled.note


def test_summed_products_of_two_inputs(check):
    module = Function(lambda _, x, y: (x @ y).mean(1).tanh())
    check(module, torch.randn(30, 40), torch.randn(40, 20))


def test_products_that_are_read_elsewhere_or_summed_otherwise_stay(graph_of):
    linear = nn.Linear(8, 6)
    twice = Function(lambda s, x: (lambda y: y.sum(-1, keepdim=True) + y)(s.linear(x)), linear=linear)
    rows = Function(lambda s, x: s.linear(x).sum(0), linear=linear)
    largest = Function(lambda s, x: s.linear(x).amax(-1), linear=linear)
    for module in (twice, rows, largest):
        assert "linear" in ops(graph_of(module, torch.randn(5, 8)))
    half = Function(lambda s, x: s.linear(x).sum(-1), linear=nn.Linear(8, 6).half())
    assert "linear" in ops(graph_of(half, torch.randn(5, 8).half()))


def test_reductions_over_one_element_are_dropped(graph_of):
    module = Function(lambda _, x: torch.logsumexp(x.amax(1, keepdim=True).mean(1, keepdim=True), 1, keepdim=True))
    assert [node.bare_op for node in rewrite(graph_of(module, torch.randn(5, 8))).nodes] == ["amax"]
