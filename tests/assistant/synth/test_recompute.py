"""Values that several kernels read: computed again where that moves fewer bytes, else written once."""

import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.planner import plan
from drk.assistant.synth.recompute import planned_with_recomputing
from drk.assistant.synth.regions import Rules
from drk.assistant.synth.rewrites import rewrite


def written(graph):
    """Shapes that the kernels of a graph write, and how many values were repeated."""
    own, regions = planned_with_recomputing(rewrite(graph), Rules())
    names = [node.name for node in own.nodes]
    assert len(set(names)) == len(names)
    shapes = sorted(item.meta.shape for region in regions for item in region.outputs)
    return shapes, sum("_again_" in name for name in names)


def scaled_by_its_mean(s, x):
    y = F.relu(x + s.bias)
    return y * y.mean((2, 3), keepdim=True).sigmoid().transpose(0, 1).contiguous().transpose(0, 1)


def test_a_bias_and_an_activation_are_computed_again(graph_of, check):
    module = Function(scaled_by_its_mean, bias=torch.randn(6, 1, 1))
    x = torch.randn(4, 6, 9, 8)
    shapes, repeated = written(graph_of(module, x))
    assert shapes.count(x.shape) == 1
    assert repeated == 2
    check(module, x)


def test_sums_of_two_tensors_are_written(graph_of):
    def forward(_, x, y):
        z = x + y
        return z * z.mean((2, 3), keepdim=True).transpose(0, 1).contiguous().transpose(0, 1)

    shapes, repeated = written(graph_of(Function(forward), torch.randn(4, 6, 9, 8), torch.randn(4, 6, 9, 8)))
    assert shapes.count((4, 6, 9, 8)) == 2
    assert repeated == 0


def test_what_a_torch_operator_or_the_caller_reads_is_in_memory_anyway(graph_of):
    def forward(s, x):
        y = F.relu(x)
        return s.conv(y) + y.mean((2, 3), keepdim=True).transpose(0, 1).contiguous().transpose(0, 1)

    module = Function(forward, conv=nn.Conv2d(6, 6, 3, padding=1))
    assert written(graph_of(module, torch.randn(4, 6, 9, 8)))[1] == 0
    both = Function(lambda s, x: (F.relu(x), scaled_by_its_mean(s, x)), bias=torch.zeros(6, 1, 1))
    assert written(graph_of(both, torch.randn(4, 6, 9, 8)))[1] == 2


def test_long_chains_of_expensive_operators_are_written(graph_of):
    def forward(_, x):
        y = torch.erf(torch.sin(torch.cos(torch.tanh(x.exp()))))
        return y * y.mean((2, 3), keepdim=True).transpose(0, 1).contiguous().transpose(0, 1)

    assert written(graph_of(Function(forward), torch.randn(4, 6, 9, 8)))[1] == 0


def test_graphs_without_shared_values_stay_as_they_are(graph_of):
    graph = rewrite(graph_of(Function(lambda _, x: F.softmax(x * 2, -1) + 1), torch.randn(3, 70)))
    own, regions = planned_with_recomputing(graph, Rules())
    assert own is graph
    assert [region.names for region in regions] == [region.names for region in plan(graph, Rules())]
