"""The gamma function's logarithm and its derivative against float64 under the interpreter."""

import pytest
import torch
from modules import Function

from drk.assistant.synth.propose import compile_graph, variants

INF, NAN = float("inf"), float("nan")
PLACES = torch.cat([torch.linspace(low, high, 400) for low, high in ((1e-4, 1), (1, 3), (3, 9), (8, 50), (-7.9, -0.1))])
SPECIAL = torch.tensor([0.0, -0.0, -1.0, -3.0, INF, -INF, NAN, 1.0, 2.0, 1e30, 1e-30])


@pytest.mark.parametrize("name", ["lgamma", "digamma"])
def test_values_and_where_there_are_none(interpreter, graph_of, name):
    module = Function(lambda _, x: getattr(torch, name)(x))
    graph = graph_of(module, PLACES)
    compiled = compile_graph(graph, variants(graph)[0])
    assert len(compiled.kernels) == 1
    (got,), (special,) = interpreter.run(compiled.source, {}, [[PLACES], [SPECIAL]])
    exact = module(PLACES.double())
    # Within some units of the terms, which add up to about 1 for the logarithm and to 3, by ten of them, for its
    # derivative; below 0, between integers, terms are larger than the result.
    least = {"lgamma": 6e-7, "digamma": 1e-6}[name]
    within = 4e-7 * exact.abs() + torch.where(PLACES < 0, 1e-5 * (1 + 1e-2 * exact.abs()), least)
    assert ((got - exact).abs() <= within).all()
    torch.testing.assert_close(special, module(SPECIAL), equal_nan=True)


def test_they_fuse_with_what_stands_around_them(check):
    module = Function(lambda _, x: (torch.lgamma(x + 1) - x * torch.special.digamma(x + 1)).sum(-1))
    assert check(module, torch.rand(5, 40) * 9, factor=4.0).launches == 1
