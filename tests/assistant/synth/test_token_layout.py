"""Tokens of images that convolutions make, in both layouts, against float64 under the interpreter."""

import torch
from modules import Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants

PARTS = {"patches": nn.Conv2d(3, 8, 4, stride=4), "norm": nn.LayerNorm(8), "first": torch.randn(1, 1, 8)}


def tokens(s, x):
    x = s.patches(x).flatten(2).transpose(1, 2)
    return s.norm(torch.cat([s.first.expand(x.shape[0], -1, -1), x], dim=1))


def test_tokens_lie_one_after_the_other(check):
    compiled = check(Function(tokens, **PARTS), torch.randn(2, 3, 8, 12), calls=[[torch.randn(1, 3, 8, 12)]])
    assert compiled.written.variant.channels_last
    metas = compiled.written.graph.metas()
    (made,) = [
        node for node in compiled.written.graph.nodes if node.bare_op == "reshape" and node.meta.shape == (2, 6, 8)
    ]
    assert metas[made.name].contiguous
    assert "row_major" not in compiled.source


def test_other_ways_and_the_other_layout(check, graph_of):
    def forward(s, x):
        return s.patches(x).flatten(2).permute(0, 2, 1).softmax(-1), s.patches(x).view(2, 8, 6).transpose(-1, -2) * 2

    module = Function(forward, patches=PARTS["patches"])
    x = torch.randn(2, 3, 8, 12)
    check(module, x, factor=3.0)
    graph = graph_of(Function(tokens, **PARTS).eval(), x)
    row_major = next(item for item in variants(graph) if not item.channels_last)
    check(Function(tokens, **PARTS), x, variant=row_major)
    assert "permute" not in compile_graph(graph, row_major).source
