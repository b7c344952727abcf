"""Cuts into equal parts hold at other sizes too, in whichever words they are written."""

import pytest
import torch
import torch.nn.functional as F
from modules import Each, Function

from drk.assistant.synth.equal_parts import in_equal_parts


def halves(_, x):
    h = x.shape[-1] // 2
    return torch.relu(x[..., :h]) * x[..., h:]


def turned(_, x):
    h = x.shape[-1] // 2
    return torch.cat((-x[..., h:], x[..., :h]), dim=-1) + x


def thirds(_, x):
    a, b, c = torch.split(x, x.shape[1] // 3, dim=1)
    return torch.cat([c * 2, a, b], 1)


def narrowed(_, x):
    h = x.shape[1] // 2
    return x.narrow(1, 0, h).exp() - x.narrow(1, h, h)


def test_at_other_sizes(check):
    functions = [halves, turned, thirds, narrowed, lambda _, x: F.glu(x, 1), lambda _, x: F.glu(x) + 1]
    others = [[torch.randn(size) for _ in functions] for size in ((2, 6, 10), (3, 18, 32))]
    check(Each(functions), *(torch.randn(5, 12, 64) for _ in functions), calls=others)


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, x: x[:, :4] * x[:, 2:6],
        lambda _, x: x[:, :4].sum() + x[:, 4:].sum(),
        lambda _, x: x[:, :3] * x[:, 3:6],
        lambda _, x: sum(x[:, i : i + 1] for i in range(10)),
        lambda _, x: torch.split(x, 4, 1)[0],
    ],
)
def test_other_cuts_stay(forward, graph_of):
    graph = graph_of(Function(forward), torch.randn(2, 10))
    assert in_equal_parts(graph) is graph
