"""Questions, counts, sums past NaN, norms of any order and reductions of everything, against float64."""

import math

import torch
from modules import Function

TALLIES = [
    lambda x: (x > 2).any(-1),
    lambda x: torch.all(x > -2, dim=1, keepdim=True),
    lambda x: torch.any(x.clamp(min=0), dim=(0, 2)),
    torch.all,
    lambda x: torch.count_nonzero(x.relu(), dim=-1),
    lambda x: torch.count_nonzero(x > 0),
    lambda x: (x > 0.5).sum(dim=1),
    lambda x: x.lt(0).sum((0, -1), keepdim=True),
    lambda x: (x > 0).sum(),
]
SUMS = [
    lambda x: torch.nansum(x, -1),
    lambda x: torch.nanmean(x, 1, keepdim=True),
]
FORMS = [
    *(lambda x, p=p: torch.linalg.vector_norm(x, p, dim=1) for p in (3, 0.5, 0, -math.inf)),
    lambda x: x / torch.linalg.matrix_norm(x, keepdim=True),
    lambda x: torch.std_mean(x, -1)[0] + torch.std_mean(x, -1)[1],
    lambda x: torch.var_mean(x, 1, correction=0, keepdim=True)[1] * x,
    lambda x: x[0, 0].contiguous().prod(),
    lambda x: x.argmax() * 2,
    lambda x: x.var(),
]


def all_of(functions):
    return Function(lambda _, x: tuple(function(x) for function in functions))


def test_tallies(check):
    compiled = check(all_of(TALLIES), torch.randn(4, 6, 35), calls=[[torch.randn(2, 3, 17)], [torch.zeros(1, 5, 40)]])
    assert not any(f"torch.{name}(" in compiled.source for name in ("any", "all", "count_nonzero"))


def test_sums_past_nan(check):
    x = torch.randn(4, 6, 35)
    x[x > 1.2] = math.nan
    module = all_of([lambda x, f=function: f(torch.where(x > 1.2, math.nan, x)) for function in SUMS])
    assert "torch.ops" not in check(module, torch.randn(4, 6, 35), factor=3.0).source


def test_nan_counts_as_true(interpreter, graph_of):
    from drk.assistant.synth.propose import compile_graph, variants

    module = Function(lambda _, x: (x.any(-1), x.all(-1), torch.count_nonzero(x, -1)))
    x = torch.zeros(3, 8)
    x[1, 2], x[2] = math.nan, math.nan
    graph = graph_of(module, x)
    (got,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x]])
    assert all(torch.equal(one, own) for one, own in zip(got, module(x), strict=True))


def test_norms_means_and_reductions_of_everything(check):
    compiled = check(all_of(FORMS), torch.randn(4, 6, 35), calls=[[torch.randn(3, 7, 12)]], factor=3.0)
    assert "torch.ops" not in compiled.source
