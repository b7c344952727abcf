"""Operators with a ``dtype`` of their own: cast first, then as any other, with the result in that type."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth.rewrites import rewrite


def ops(graph):
    return [node.bare_op for node in rewrite(graph).nodes]


def test_the_cast_stands_before_the_operator(graph_of):
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    written = ops(graph_of(Function(lambda _, x: F.softmax(x, dim=-1, dtype=torch.float32)), x))
    assert written == ["_to_copy", "amax", "sub", "exp", "sum", "div"]
    assert ops(graph_of(Function(lambda _, x: x.sum(-1, dtype=torch.float32)), x.float())) == ["sum"]
    assert ops(graph_of(Function(lambda _, x: x.sum(-1, dtype=torch.float64)), x)) == ["sum"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_results_have_the_type_that_was_asked_for(check, dtype):
    asked = torch.float32
    functions = [
        lambda _, x: F.log_softmax(x, -1, dtype=asked),
        lambda _, x: x.softmax(0, asked),
        lambda _, x: x.sum(1, dtype=asked),
        lambda _, x: x.mean((0, 1), keepdim=True, dtype=asked),
        lambda _, x: torch.cumsum(x, dim=1, dtype=asked),
        lambda _, x: x.sum(dtype=asked),
    ]
    inputs = [(torch.randn(3, 40) * 4).to(dtype) for _ in functions]
    check(Each(functions), *inputs)
