"""Largest elements and sorted rows under the interpreter: what torch gives, bit for bit."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def run(interpreter, graph_of):
    def make(module, *calls):
        graph = graph_of(module, *calls[0])
        compiled = compile_graph(graph, variants(graph)[0])
        return compiled, interpreter.run(compiled.source, {}, [list(call) for call in calls])

    return make


def equal(got, expected):
    for left, right in zip(got, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def test_values_and_places_are_one_kernel(run):
    module = Function(lambda _, x: x.topk(3, -1))
    calls = [[torch.randn(5, 4, 33)], [torch.randn(1, 2, 50)]]
    compiled, results = run(module, *calls)
    assert (len(compiled.kernels), compiled.launches) == (1, 1)
    for call, got in zip(calls, results, strict=True):
        equal(got, module(*call))


def test_every_way_to_say_it(run):
    ways = [
        lambda _, x: torch.topk(x, 2).values,
        lambda _, x: x.topk(4, largest=False)[1],
        lambda _, x: x.topk(20, dim=1, largest=True, sorted=True)[0],
        lambda _, x: x.sort().values * 2,
        lambda _, x: torch.sort(x, dim=-1, descending=True, stable=True)[1],
        lambda _, x: x.argsort(1),
        lambda _, x: torch.argsort(x, dim=1, descending=True),
        lambda _, x: x.t().sort(-1)[0],
    ]
    args = [torch.randn(6, 37) for _ in ways]
    compiled, (got,) = run(Each(ways), args)
    assert not {"topk(", "sort("} & set(compiled.source.split("def forward")[1].split())
    equal(got, [way(None, x) for way, x in zip(ways, args, strict=True)])


def test_equal_and_special_values(run):
    x = torch.tensor([[1.0, NAN, -INF, INF, -0.0, 0.0, -INF], [-INF] * 7, [2.0, 2.0, 1.0, 2.0, NAN, NAN, 3.0]])
    both = Function(
        lambda _, x: (
            *x.sort(stable=True),
            *x.sort(stable=True, descending=True),
            *x.topk(7),
            *x.topk(7, largest=False),
        )
    )
    _, (got,) = run(both, [x])
    equal(got[:4], both(x)[:4])
    for largest, (values, places) in ((True, got[4:6]), (False, got[6:])):
        equal([values, x.gather(1, places)], [x.topk(7, largest=largest)[0]] * 2)
        assert all(sorted(row) == list(range(7)) for row in places.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types(run, dtype):
    x = torch.randn(9, 20).to(dtype)
    _, (got,) = run(Function(lambda _, x: (x.topk(5)[0], x.sort(stable=True)[1])), [x])
    equal(got, [x.topk(5)[0], x.sort(stable=True)[1]])


def test_what_does_not_fit_stays_with_torch(run):
    x = torch.randn(3, 2100)
    ways = Function(lambda _, x: (x.sort()[0] + 1, x.topk(30)[0] + 1, x.topk(2, 0)[0], x.long().topk(2)[0]))
    compiled, (got,) = run(ways, [x])
    assert "order" not in [region.kind for region in compiled.regions]
    equal(got, ways(x))


@pytest.mark.parametrize("count", [5, None])
def test_rows_compile_for_hopper(graph_of, offline_compile, count):
    graph = graph_of(Function(lambda _, x: x.sort() if count is None else x.topk(count)), torch.randn(4, 100))
    (kernel,) = offline_compile(compile_graph(graph, variants(graph)[0]).source, [4, 100])
    assert kernel["spill_bytes"] == 0


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_row(run, data):
    shape = (*data.draw(st.lists(st.integers(1, 3), max_size=2)), data.draw(st.integers(2, 40)))
    count = data.draw(st.integers(1, shape[-1]))
    x = torch.randint(-4, 5, shape) / 2
    module = Function(lambda _, x: (*x.sort(dim=-1, stable=True), x.topk(count)[0]))
    _, (got,) = run(module, [x])
    equal(got, module(x))
