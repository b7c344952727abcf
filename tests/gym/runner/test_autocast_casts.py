"""Casts that autocast makes, written into a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from drk.gym.graph import graph_from_json
from drk.gym.runner.autocast_casts import write_casts
from drk.gym.runner.capture import capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.one(x)) + self.two(x)


def captured() -> dict[str, Any]:
    module = Net().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return capture(module, [torch.randn(3, 8)])


def test_operands_of_products_are_cast_once() -> None:
    graph = graph_from_json(write_casts(captured(), "bfloat16"))
    ops = [node.bare_op for node in graph.nodes]
    assert ops.count("_to_copy") == 5  # x once, two weights, two biases
    metas = graph.metas()
    for node in graph.nodes:
        if node.bare_op == "linear":
            assert {metas[name].dtype for name in node.inputs()} == {"bfloat16"}
            assert node.meta.dtype == "bfloat16"


def test_what_autocast_left_alone_is_left_alone() -> None:
    graph = captured()
    assert write_casts(graph, "float16") == graph  # no result has that dtype
    sums = {**graph["nodes"][0], "op": "aten.sum.default", "name": "s", "args": [{"ref": "linear"}]}
    sums["meta"] = [{**sums["meta"][0], "dtype": "float32"}]
    raised = write_casts({**graph, "nodes": [*graph["nodes"], sums]}, "bfloat16")["nodes"]
    assert raised[-1]["args"] == [{"ref": raised[-2]["name"]}]
    assert raised[-2]["kwargs"] == {"dtype": {"dtype": "float32"}}
