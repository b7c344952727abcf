"""Blocks and in-place operators of exported graphs: what is written out by hand, and that it computes the same."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import CaptureError, capture
from drk.gym.runner.plain_graph import make_functional, mutates


class Written(nn.Module):
    """A module whose forward is a function of its tensors."""

    def __init__(self, function, train=False):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.train(train)

    def forward(self, *args):
        return self.function(self, *args)


def exported(function, *args):
    with torch.no_grad():
        return torch.export.export(Written(function), args, strict=False)


def residual(_, x, y):
    out = F.relu(x * 2, inplace=True)
    out += y
    return out.mul_(3.0) + out


def overwritten(_, x, y):
    out = x + 1
    first = out
    out.clamp_(min=0.0)
    out.masked_fill_(y > 0, -1.0)
    return first, out.neg_()


def indexed(_, x, y):
    out = x * 1
    out[torch.isinf(y)] = 0.0
    return out.exp()


@pytest.mark.parametrize("function", [residual, overwritten, indexed])
def test_plain_in_place_operators_become_functional_and_compute_the_same(function):
    args = (torch.randn(3, 4), torch.randn(3, 4))
    program = exported(function, *args)
    assert mutates(program.graph)
    assert make_functional(program.graph)
    assert not mutates(program.graph)
    program.graph_module.recompile()
    own = program.graph_module(*Written(function).parameters(), *program.constants.values(), *args)
    for mine, theirs in zip(own, torch.utils._pytree.tree_leaves(function(None, *args)), strict=True):
        assert torch.equal(mine, theirs)


def viewed(_, x, y):
    out = x * 2
    part = out.view(-1)
    out.add_(y)
    return part


def of_a_view(_, x, y):
    out = x * 2
    out.view(4, 3).add_(1.0)
    return out + y


def of_an_input(_, x, y):
    x.add_(1.0)
    return x + y


def compared(_, x, y):
    return (x * 2).gt_(y)


def perhaps_the_same(_, x, y):
    out = x * 2
    kept = F.dropout(out, 0.5, training=False)
    out.mul_(y)
    return kept, out


def of_a_permuting_einsum(_, x, y):
    turned = torch.einsum("ij->ji", x)
    turned.mul_(2.0)
    return x + y


LEFT = [viewed, of_a_view, of_an_input, compared, perhaps_the_same, of_a_permuting_einsum]


@pytest.mark.parametrize("function", LEFT)
def test_what_others_may_see_is_left_to_the_export_and_the_graph_is_as_it_was(function):
    graph = exported(function, torch.randn(3, 4), torch.randn(3, 4)).graph
    before = str(graph)
    assert not make_functional(graph)
    assert str(graph) == before


def test_a_view_that_is_read_before_only_is_no_hindrance():
    def gated(_, x):
        out = x * 2
        return out.mul_(torch.sigmoid(out.mean(0, keepdim=True).view(1, -1)))

    assert make_functional(exported(gated, torch.randn(3, 4)).graph)


class Rotated(nn.Module):
    """Positions under ``no_grad`` and without autocast, as rotary embeddings are written."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @torch.no_grad()
    def angles(self, x):
        with torch.autocast("cpu", enabled=False):
            return x.float().cos(), x.float().sin()

    def forward(self, x):
        cos, sin = self.angles(x)
        return self.linear(x) * cos + sin, sin


def captured(module, *args):
    with torch.no_grad():
        return graph_from_json(json.loads(json.dumps(capture(module, args))))


@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_without_gradients_and_autocast_are_written_out(in_place):
    module = Rotated()
    if in_place:
        module.linear.register_forward_hook(lambda _m, _i, out: out.view(-1).add_(1.0).view(out.shape))
    graph = captured(module, torch.randn(3, 4))
    names = [node.bare_op for node in graph.nodes if node.bare_op != "_assert_tensor_metadata"]
    kept = [name for name in names if name not in {"view", "add", "to", "_to_copy"}]
    assert sorted(kept) == ["cos", "linear", "mul", "sin"]
    assert len(graph.output.items) == 2


def test_an_autocast_block_gets_the_casts_that_it_makes():
    def half(own, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = own.linear(x)
        return y.float() + own.linear(x)

    graph = captured(Written(half), torch.randn(3, 4))
    metas = graph.metas()
    linears = [node for node in graph.nodes if node.bare_op == "linear"]
    assert [node.meta.dtype for node in linears] == ["bfloat16", "float32"]
    assert [{metas[name].dtype for name in node.inputs()} for node in linears] == [{"bfloat16"}, {"float32"}]


def test_sizes_that_depend_on_values_are_refused_with_a_reason():
    def chosen(_, x):
        return x[x > 0] * 2

    with pytest.raises(CaptureError, match="captured"):
        capture(copy.deepcopy(Written(chosen)), (torch.randn(3, 4),))
