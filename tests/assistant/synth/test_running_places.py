"""Running extremes with their places under the interpreter: what torch gives, bit for bit."""

import torch
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants


def test_values_and_places(interpreter, graph_of):
    def forward(_, x):
        return (*x.cummax(-1), *torch.cummin(x, 1), x.cummax(1).indices + 1, x.t().cummax(1)[1], *x.cummax(0))

    x = torch.randint(-9, 9, (5, 1500)) / 4
    x[1, 7], x[1, 900], x[2, 3], x[3, :4], x[4, 0] = float("nan"), float("nan"), float("inf"), float("-inf"), -0.0
    graph = graph_of(Function(forward), x)
    compiled = compile_graph(graph, variants(graph)[0])
    assert [region.kind for region in compiled.regions].count("places") == 4
    calls = [[x], [torch.randn(3, 70)]]
    for call, got in zip(calls, interpreter.run(compiled.source, {}, calls), strict=True):
        for left, right in zip(got, forward(None, *call), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def test_places_compile_for_hopper(graph_of, offline_compile):
    graph = graph_of(Function(lambda _, x: x.cummin(1)[1]), torch.randn(4, 900))
    (kernel,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [4, 900])
    assert kernel["spill_bytes"] == 0
