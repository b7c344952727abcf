"""Reductions of stacks are elementwise, and other reductions of them are not touched."""

import pytest
import torch
from modules import Each, Function

from drk.assistant.synth.rewrites import rewrite

REDUCTIONS = [
    lambda a, b, c: torch.stack((a, b, c), dim=0).mean(dim=0),
    lambda a, b, c: torch.stack([a, b, c], -1).sum(-1),
    lambda a, b, c: torch.stack([a, b, c], 1).amax(1),
    lambda a, b, c: torch.stack([a, b, c], 1).amin(dim=(1,)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_are_never_written(check, dtype):
    functions = [lambda _, *abc, reduce=reduce: reduce(*abc) for reduce in REDUCTIONS]
    compiled = check(Each(functions, 3), *(torch.randn(3, 7).to(dtype) for _ in range(3 * len(functions))))
    assert "stack" not in compiled.source.split("def forward")[1]


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, a, b: torch.stack((a, b)).mean(1),
        lambda _, a, b: torch.stack((a, b)).mean((0, 1)),
        lambda _, a, b: torch.stack((a, b)).mean(0, keepdim=True),
    ],
)
def test_other_reductions_stay(forward, graph_of):
    graph = rewrite(graph_of(Function(forward), torch.randn(3, 4), torch.randn(3, 4)))
    assert "stack" in [node.bare_op for node in graph.nodes]
