"""Coordinates and guards of joined, padded and rolled tensors against PyTorch, for chains of them with views between.

What a trace says is worked out element by element, without kernels.
"""

import itertools
import json
import random

import pytest
import torch
import torch.nn.functional as F
from modules import Each

from drk.assistant.synth.cat_maps import is_join
from drk.assistant.synth.index_maps import NoMap
from drk.assistant.synth.index_rules import is_view
from drk.assistant.synth.mapped_trace import trace
from drk.gym.graph import graph_from_json
from drk.gym.runner.capture import capture

STEPS = (
    lambda x: x.roll((1, -2), (0, 1)),
    lambda x: F.pad(x, (1, 2, 0, 1), value=-1.0),
    lambda x: F.pad(x[None], (1, 2), mode="reflect")[0],
    lambda x: F.pad(x[None], (2, 1), mode="replicate")[0],
    lambda x: F.pad(x[None], (1, 1), mode="circular")[0],
    lambda x: torch.cat([x, x.flip(1), x], 1),
    lambda x: torch.cat([x.roll(1, 0), x], 0),
    lambda x: torch.stack([x, x.flip(0)], 1).flatten(0, 1),
    lambda x: torch.stack([x, x.roll(1, 1)], -1).flatten(1),
    lambda x: x.t(),
    lambda x: x.reshape(x.shape[1], x.shape[0]),
    lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    lambda x: x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if x.shape[0] % 2 == 0 else x.flip(0),
)


def chains():
    """Functions of three random steps each."""
    draw = random.Random(5)
    for _ in range(40):
        steps = [draw.choice(STEPS) for _ in range(3)]
        yield lambda _, x, steps=steps: steps[2](steps[1](steps[0](x)))


class Elements:
    """What a trace says an element of its output is."""

    def __init__(self, found, tensors, place):
        self.found, self.atoms, self.tensors = found, found.atoms, tensors
        self.values = {
            digit.atom: own // digit.weight % self.atoms.sizes[digit.atom]
            for own, coordinate in zip(place, found.root, strict=True)
            for digit in coordinate.digits
        }

    def index(self, atom):
        if atom in self.values:
            return self.values[atom]
        bend, size = self.atoms.bends.get(atom), self.atoms.sizes[atom]
        if bend is None:
            parent, (outer, inner) = next(item for item in self.atoms.children.items() if atom in item[1])
            whole, length = self.index(parent), self.atoms.sizes[inner]
            return whole // length if atom == outer else whole % length
        at = self.number(bend.whole) - bend.shift - sum(self.atoms.sizes[piece] for piece in bend.before)
        if bend.kind == "reflect":
            return size - 1 - abs(size - 1 - abs(at))
        return {"replicate": min(max(at, 0), size - 1), "roll": at % size, "circular": at % size}.get(bend.kind, at)

    def number(self, coordinate):
        return coordinate.start + sum(
            digit.weight * (self.atoms.sizes[digit.atom] - 1 - at if digit.turned else at)
            for digit in coordinate.digits
            for at in [self.index(digit.atom)]
        )

    def inside(self, guard):
        return 0 <= self.index(guard) < self.atoms.sizes[guard]

    def value(self, place):
        if place is None or place not in self.found.joined:
            where = tuple(self.number(coordinate) for coordinate in place[1])
            assert all(0 <= at < size for at, size in zip(where, self.tensors[place[0]].shape, strict=True))
            assert all(self.inside(guard) for guard in self.found.guards[place])
            return self.tensors[place[0]][where].item()
        choice = next(item for item in self.found.joined[place] if all(map(self.inside, item.guards)))
        return choice.fill if choice.place is None else self.value(choice.place)


@pytest.fixture(scope="module")
def captured():
    """A graph of all chains, its inputs by name, and PyTorch's results by name."""
    functions = list(chains())
    inputs = [torch.arange(24.0).reshape(4, 6) for _ in functions]
    module = Each(functions).eval()
    graph = graph_from_json(json.loads(json.dumps(capture(module, inputs))))
    names = [item.name for item in graph.output.items]
    tensors = {item.name: own for item, own in zip(graph.placeholders, inputs, strict=True)}
    return graph, tensors, dict(zip(names, module(*inputs), strict=True))


def test_every_element_is_the_one_that_pytorch_has(captured):
    graph, tensors, results = captured
    by_name = {node.name: node for node in graph.nodes}
    known = 0
    assert all(is_view(node) or is_join(node) for node in graph.nodes)
    for name, expected in results.items():
        try:
            found = trace([name], graph.nodes, by_name, graph.metas(), frozenset(), {})
        except NoMap:
            continue
        known += 1
        assert found is not None
        for place in itertools.islice(itertools.product(*map(range, expected.shape)), 0, None, 3):
            got = Elements(found, tensors, place).value(found.outputs[name])
            assert got == expected[place].item(), (name, place)
    assert known > len(results) // 2
