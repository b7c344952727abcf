"""How a graph that trains is cut: what torch keeps, in which order, and where gradients end."""

import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.backward_graph import Segment
from drk.assistant.synth.backward_segments import needing, segments, with_kept_detaches
from drk.assistant.synth.rewrites import rewrite


def cut(graph_of, module, *args):
    graph = rewrite(with_kept_detaches(graph_of(module.train(), *args)))
    return graph, segments(graph)


def words(items):
    return [[node.bare_op for node in item.nodes] if isinstance(item, Segment) else item.bare_op for item in items]


def test_what_is_known_is_one_segment(graph_of):
    _, items = cut(graph_of, Function(lambda s, x: F.gelu(s.fc(x)) + x, fc=nn.Linear(8, 8)), torch.randn(4, 8))
    assert words(items) == [["linear", "gelu", "add"]]


def test_an_unknown_operator_separates_two_segments(graph_of):
    module = Function(lambda s, x: F.max_pool1d(x.exp() + x, 2).tanh() * 2)
    _, items = cut(graph_of, module, torch.randn(2, 4, 8))
    assert words(items)[0] == ["exp", "add"]
    assert words(items)[-1] == ["tanh", "mul"]
    assert all(isinstance(one, str) for one in words(items)[1:-1])


def test_random_operators_keep_their_order(graph_of):
    def forward(s, x, y):
        first = F.dropout(F.max_pool1d(F.max_pool1d(x.exp(), 2), 2), 0.5)
        return first.sum() + F.dropout(y, 0.3).sum()

    graph, items = cut(graph_of, Function(forward), torch.randn(2, 4, 8), torch.randn(3))
    drawn = [node.name for node in graph.nodes if "dropout" in node.op]
    flat = [node.name for item in items for node in (item.nodes if isinstance(item, Segment) else (item,))]
    assert [name for name in flat if name in drawn] == drawn


def test_every_value_exists_before_it_is_read(graph_of):
    def forward(s, x, labels):
        hidden = F.dropout(F.gelu(s.fc(x)), 0.1)
        return F.cross_entropy(s.head(hidden), labels)

    module = Function(forward, fc=nn.Linear(8, 8), head=nn.Linear(8, 6))
    graph, items = cut(graph_of, module, torch.randn(4, 8), torch.tensor([1, 2, 3, 0]))
    known = {item.name for item in graph.placeholders}
    for item in items:
        read = item.inputs if isinstance(item, Segment) else item.inputs()
        assert set(read) <= known
        known |= {node.name for node in item.nodes} if isinstance(item, Segment) else {item.name}
    last = items[-1]
    assert isinstance(last, Segment)
    assert "arange" in [node.bare_op for node in last.nodes]


def test_counters_stand_outside(graph_of):
    _, items = cut(graph_of, nn.Sequential(nn.BatchNorm1d(4), nn.GELU(), nn.Tanh()), torch.randn(6, 4))
    assert words(items) == ["add", "batch_norm", ["gelu", "tanh"]]


def test_no_gradient_flows_to_detached_values_and_buffers(graph_of):
    module = Function(lambda s, x: x.detach().exp() * s.weight * s.scale + x, scale=torch.ones(4))
    module.register_buffer("weight", torch.ones(4))
    graph = with_kept_detaches(graph_of(module, torch.randn(3, 4)))
    found = needing(graph)
    assert not {"detach", "exp", "b_weight"} & found
    assert {"x", "p_scale", "add"} <= {name.replace("args_0", "x") for name in found}
