"""The planner: what is fused together, and what must not be."""

import torch
import torch.nn.functional as F
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.synth.frames import broadcast
from drk.assistant.synth.planner import plan
from drk.assistant.synth.regions import Rules
from drk.assistant.synth.rewrites import rewrite


def regions_of(graph, **rules):
    return [(region.kind, len(region.nodes)) for region in plan(rewrite(graph), Rules(**rules))]


def test_a_gated_mlp_is_three_regions(graph_of):
    graph = graph_of(GatedMLP(), torch.randn(2, 5, 48))
    assert regions_of(graph) == [("row", 6), ("matmul", 4), ("matmul", 2)]
    assert regions_of(graph, shared_left=False) == [("row", 6), ("matmul", 3), ("matmul", 1), ("matmul", 2)]
    assert regions_of(graph, matmul=False) == [("row", 6), ("pointwise", 2), ("pointwise", 1)]


def test_no_path_leaves_a_region_and_comes_back(graph_of):
    def forward(_, x):
        y = x.relu() * 2
        return y + y.sort(0)[0]

    (first, second) = plan(rewrite(graph_of(Function(forward), torch.randn(3, 5))), Rules())
    assert not first.names & second.names
    assert {node.bare_op for node in first.nodes} == {"relu", "mul"}


def test_intermediate_results_that_are_used_elsewhere_leave_the_region(graph_of):
    graph = graph_of(Function(lambda _, x: (lambda y: (y * 2, y.sort(0)[0]))(x.exp() + 1)), torch.randn(3, 5))
    (region,) = plan(rewrite(graph), Rules())
    assert len(region.outputs) == 2


def test_reductions_over_different_shapes_do_not_share_a_kernel(graph_of):
    module = Function(lambda _, x, y: x.softmax(-1).sum() * y.softmax(-1))
    kinds = regions_of(graph_of(module, torch.randn(3, 5), torch.randn(4, 7)))
    assert [kind for kind, _ in kinds].count("row") == 3


def test_reductions_over_leading_dimensions_are_rows_of_another_frame(graph_of):
    (region,) = plan(graph_of(Function(lambda _, x: x.sum(0)), torch.randn(3, 5)), Rules())
    assert (region.kind, region.shape, region.columns) == ("row", (5, 3), 1)


def test_long_rows_that_lie_apart_in_memory_are_taken_in_pieces(graph_of):
    assert regions_of(graph_of(Function(lambda _, x: x.sum(0)), torch.randn(3000, 5))) == [("split", 1)]


def test_siblings_that_read_one_tensor_share_a_kernel(graph_of):
    assert regions_of(graph_of(Function(lambda _, x: (x.exp() + 1, x.tanh() * 2)), torch.randn(9))) == [
        ("pointwise", 4)
    ]


def test_products_with_different_left_operands_stay_apart(graph_of):
    module = Function(lambda s, x, y: F.silu(s.a(x)) * s.b(y), a=nn.Linear(8, 6), b=nn.Linear(8, 6))
    kinds = regions_of(graph_of(module, torch.randn(3, 8), torch.randn(3, 8)))
    assert [kind for kind, _ in kinds] == ["matmul", "matmul"]


def test_excluded_nodes_stay_torch(graph_of):
    graph = graph_of(Function(lambda _, x: (x.exp() + 1).tanh() * 2), torch.randn(9))
    assert regions_of(graph, excluded=frozenset({"tanh"})) == [("pointwise", 2), ("pointwise", 1)]


def test_float64_and_complex_stay_torch(graph_of):
    assert regions_of(graph_of(Function(lambda _, x: x.exp() + 1), torch.randn(3, dtype=torch.float64))) == []


def test_broadcast_shapes():
    assert broadcast([(3, 1), (1, 5), (5,)]) == (3, 5)
    assert broadcast([(1,), (2, 1)]) == (2, 1)
