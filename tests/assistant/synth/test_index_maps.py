"""Index maps against PyTorch: what each output element's coordinates say it is, for chains of views of any shapes."""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Function
from torch import nn

from drk.assistant.synth.index_maps import Atoms, NoMap, reshaped
from drk.assistant.synth.index_rules import is_view, moves_data
from drk.assistant.synth.mapped_trace import trace
from drk.gym.graph import Node, Ref, TensorMeta, graph_from_json
from drk.gym.runner.capture import capture


def traced(function, x):
    """The trace of ``function``'s single result."""
    graph = graph_from_json(json.loads(json.dumps(capture(Function(function).eval(), [x]))))
    by_name = {node.name: node for node in graph.nodes}
    assert all(is_view(node) for node in graph.nodes), graph.nodes
    return trace([graph.output.name], graph.nodes, by_name, graph.metas(), frozenset(), {})


def picked(found, x, shape):
    """The result that the traced coordinates give."""
    ((_, coords),) = found.loads
    result = []
    sizes = found.atoms.sizes
    for place in itertools.product(*map(range, shape)):
        values = {}
        for own, coordinate in zip(place, found.root, strict=True):
            for digit in coordinate.digits:
                values[digit.atom] = own // digit.weight % sizes[digit.atom]
        where = tuple(
            coordinate.start
            + sum(
                digit.weight * (sizes[digit.atom] - 1 - values[digit.atom] if digit.turned else values[digit.atom])
                for digit in coordinate.digits
            )
            for coordinate in coords
        )
        result.append(x[where].item())
    return torch.tensor(result).reshape(shape)


def agrees(function, x):
    found = traced(function, x)
    expected = function(None, x)
    torch.testing.assert_close(picked(found, x, expected.shape), expected)


def numbered(*shape):
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


CHAINS = {
    "pixel_shuffle": (lambda _, x: F.pixel_shuffle(x, 2), (2, 12, 3, 4)),
    "pixel_unshuffle": (lambda _, x: F.pixel_unshuffle(x, 3), (1, 2, 6, 3)),
    "both": (lambda _, x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), (2, 8, 3, 4)),
    "channel_shuffle": (lambda _, x: F.channel_shuffle(x, 3), (2, 6, 2, 2)),
    "groups": (lambda _, x: x.view(2, 3, 4, 5).transpose(1, 2).reshape(2, 12, 5), (2, 12, 5)),
    "heads": (lambda _, x: x.view(2, 3, 4, 5).transpose(1, 2).reshape(8, 15), (2, 3, 20)),
    "chunk": (lambda _, x: x.chunk(3, 1)[2].transpose(0, 1), (2, 6, 5)),
    "split": (lambda _, x: x.split([1, 3, 2], 1)[1].flatten(1), (2, 6, 1)),
    "unbind": (lambda _, x: x.unbind(1)[2].flip(1), (2, 3, 5)),
    "flip": (lambda _, x: x.flip((0, 2)).reshape(4, 15), (2, 6, 5)),
    "flip_of_part": (lambda _, x: x[:, 1:4].flip(1), (2, 6)),
    "steps": (lambda _, x: x[:, 1::2, :-1].permute(2, 0, 1), (2, 7, 5)),
    "select": (lambda _, x: x[:, 5].t(), (2, 7, 5)),
    "repeat": (lambda _, x: x.repeat(2, 1, 3), (2, 5)),
    "interleave": (lambda _, x: x.repeat_interleave(3, 1).flatten(), (2, 5)),
    "nearest": (lambda _, x: F.interpolate(x, scale_factor=(2, 3)), (2, 1, 2, 3)),
    "nearest_1d": (lambda _, x: F.interpolate(x, scale_factor=4), (2, 2, 3)),
    "nearest_3d": (lambda _, x: F.interpolate(x, scale_factor=(2, 1, 2)), (1, 2, 2, 1, 3)),
    "expand": (lambda _, x: x.unsqueeze(1).expand(2, 4, 3).reshape(8, 3), (2, 3)),
    "squeeze": (lambda _, x: x.unsqueeze(-1).squeeze(0).permute(1, 0, 2), (1, 4, 3)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_views(name):
    function, shape = CHAINS[name]
    agrees(function, numbered(*shape))


@pytest.mark.parametrize("factor", [2, 3, 5, 7, 16])
def test_positions_of_nearest_upsampling(factor):
    agrees(lambda _, x: F.interpolate(x, scale_factor=factor), numbered(1, 1, 13))


def factors(draw, size):
    parts = []
    while size > 1:
        part = draw(st.sampled_from([n for n in range(2, size + 1) if size % n == 0]))
        parts.append(part)
        size //= part
    return parts or [1]


@st.composite
def chains(draw):
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
    steps, now = [], list(shape)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["permute", "reshape", "flip", "slice", "merge"]))
        if kind == "permute":
            order = draw(st.permutations(range(len(now))))
            steps.append((kind, tuple(order)))
            now = [now[dim] for dim in order]
        elif kind == "flip":
            steps.append((kind, (draw(st.integers(0, len(now) - 1)),)))
        elif kind == "slice":
            dim = draw(st.integers(0, len(now) - 1))
            start = draw(st.integers(0, now[dim] - 1))
            end = draw(st.integers(start + 1, now[dim]))
            steps.append((kind, (dim, start, end)))
            now[dim] = end - start
        else:
            now = [math.prod(now)] if kind == "merge" else [part for size in now for part in factors(draw, size)]
            steps.append(("reshape", tuple(now)))
    return tuple(shape), steps


def applied(x, steps):
    """Nodes of the steps on ``x``, their metadata, and the result."""
    metas = {"x": TensorMeta(tuple(x.shape), "float32", x.stride())}
    nodes = []
    for place, (kind, args) in enumerate(steps):
        x = x.narrow(args[0], args[1], args[2] - args[1]) if kind == "slice" else getattr(x, kind)(args)
        name = f"{kind}_{place}"
        metas[name] = TensorMeta(tuple(x.shape), "float32", x.stride())
        before = Ref(nodes[-1].name if nodes else "x")
        given = (before, *args) if kind == "slice" else (before, args)
        nodes.append(Node(name, f"aten.{kind}.default", given, metas=(metas[name],)))
    return nodes, metas, x


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(chains())
def test_any_chain_is_right_or_refused(chain):
    shape, steps = chain
    x = numbered(*shape)
    nodes, metas, expected = applied(x, steps)
    try:
        found = trace([nodes[-1].name], nodes, {node.name: node for node in nodes}, metas, frozenset(), {})
    except NoMap:
        assert any(kind == "reshape" for kind, _ in steps)
        return
    assert torch.equal(picked(found, x, expected.shape), expected)


def test_sizes_that_do_not_divide_are_refused():
    atoms = Atoms()
    coords = tuple(atoms.coordinate(atoms.add(size, "a")) for size in (2, 3))
    with pytest.raises(NoMap):
        reshaped(coords, (2, 3), (3, 2), atoms)


def test_a_single_element_is_not_taken_for_all_there_can_be():
    with pytest.raises(NoMap):
        traced(lambda _, x: F.interpolate(x, scale_factor=2), numbered(1, 2, 1, 3))


def test_what_moves_data(graph_of):
    def forward(_, x):
        return x.transpose(1, 2).reshape(4, 24), F.pixel_shuffle(x, 2), x.flatten(1), x.transpose(0, 1)

    graph = graph_of(Function(forward), torch.randn(4, 4, 6))
    moving = {node.bare_op for node in graph.nodes if is_view(node) and moves_data(node, graph.metas())}
    assert moving == {"reshape", "pixel_shuffle"}


def test_random_numbers_of_a_module_are_no_views(graph_of):
    graph = graph_of(nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.randn(3))
    assert not any(is_view(node) for node in graph.nodes)
