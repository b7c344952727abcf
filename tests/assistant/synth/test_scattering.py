"""Scatters that add, against float64 under the interpreter: segment sums, messages between nodes, histograms."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import Each, Function

from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.scatters import NOTE


def segment_sum(count, *shape):
    """Sums of rows by their target, as tests/fixtures/problems/level1/058_segment_sum.py has them."""

    def forward(_, messages, targets):
        total = torch.zeros(count, *shape, dtype=messages.dtype, device=messages.device)
        return total.index_add(0, targets, messages)

    return Function(forward)


def targets_of(size, most):
    return torch.randint(0, most, (size,))


def test_segment_sums_are_added_to_zeros_in_place(check):
    module = segment_sum(7, 24)
    compiled = check(module, torch.randn(50, 24), targets_of(50, 7), calls=[[torch.randn(3, 24), targets_of(3, 7)]])
    assert (compiled.launches, len(compiled.kernels)) == (2, 1)
    assert "clone" not in compiled.source
    assert compiled.note.endswith(NOTE)


def test_messages_are_gathered_weighed_and_added_up_by_one_kernel(check):
    def forward(_, x, weight, senders, receivers):
        return torch.zeros_like(x).index_add(0, receivers, x[senders] * weight.unsqueeze(-1).relu())

    x, ids = torch.randn(9, 20), [targets_of(31, 9) for _ in range(2)]
    compiled = check(Function(forward), x, torch.randn(31), *ids)
    assert len(compiled.kernels) == 1
    assert compiled.launches == 2


def test_every_way_to_say_it(check):
    def expanded(_, x, i):
        return x.new_ones(6, 5).scatter_add(0, i.abs().unsqueeze(-1).expand(-1, 5), x)

    def reduced(_, x, i):
        return x.new_zeros(6, 5).scatter_reduce(0, i.abs()[:, None].expand_as(x), x, "sum")

    def put(_, x, i):
        return x.new_zeros(6, 5).index_put((i,), x.exp(), accumulate=True)

    def in_place(_, x, i):
        total = x.new_zeros(6, 5)
        total[i] += 0.0
        return total.index_add_(0, i.abs(), x, alpha=-0.5)

    def columns(_, x, i):
        return x.new_zeros(5, 6).index_add(1, i.abs(), x.t())

    each = Each([expanded, reduced, put, in_place, columns], 2)
    inputs = [item for _ in range(5) for item in (torch.randn(11, 5), torch.randint(-5, 6, (11,)))]
    inputs[3::4] = [item.abs() for item in inputs[3::4]]
    check(each, *inputs)


def test_an_index_for_each_element(check):
    module = Function(lambda _, x, i: x.new_zeros(4, 6, 3).scatter_add(1, i, x.sigmoid()))
    assert len(check(module, torch.randn(4, 7, 3), torch.randint(0, 6, (4, 7, 3))).kernels) == 1
    module = Function(lambda _, base, x, i: base.scatter_add(-1, i, x))
    compiled = check(module, torch.randn(4, 6), torch.randn(4, 9), torch.randint(0, 6, (4, 9)))
    assert "clone(memory_format" in compiled.source


def test_histograms_and_integers(check):
    ones = Function(lambda _, i: torch.zeros(8).scatter_add(0, i, torch.ones(40)))
    check(ones, targets_of(40, 8))
    whole = Function(lambda _, x, i: torch.zeros(8, 3, dtype=torch.int64).index_add(0, i, x * 2))
    compiled = check(whole, torch.randint(-9, 9, (40, 3)), targets_of(40, 8))
    assert NOTE not in compiled.note


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_types_are_summed_in_float32(check, dtype):
    check(segment_sum(4, 12), torch.randn(40, 12).to(dtype), targets_of(40, 4), factor=1.0)


def test_sums_in_a_fixed_order_are_a_variant(check, graph_of):
    def forward(_, base, x, i):
        return base.index_add(0, i, x, alpha=0.5), base.index_put((i - 7,), x * 2, accumulate=True)

    args = [torch.randn(7, 3, 5), torch.randn(90, 3, 5), targets_of(90, 7)]
    found = [item for item in variants(graph_of(Function(forward), *args)) if not item.rules.atomics]
    compiled = check(Function(forward), *args, variant=found[0], calls=[[args[0], args[1][:0], args[2][:0]]])
    assert [region.kind for region in compiled.regions].count("ordered") == 2
    assert NOTE not in compiled.note
    check(segment_sum(5, 12), torch.randn(40, 12).half(), targets_of(40, 4), variant=found[0])


def test_a_base_that_something_else_reads_is_kept(interpreter, graph_of):
    module = Function(lambda _, base, x, i: (base.index_add(0, i, x), base * 2))
    args = [torch.randn(5, 4), torch.randn(9, 4), targets_of(9, 5)]
    graph = graph_of(module, *args)
    kept = args[0].clone()
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [args])
    torch.testing.assert_close(outputs, list(module(kept, *args[1:])))

    def twice(_, x, i):
        zeros = torch.zeros(5, 4)
        return zeros.index_add(0, i, x), zeros.index_add(0, i, x * 2), zeros + 1

    graph = graph_of(Function(twice), *args[1:])
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [args[1:]])
    torch.testing.assert_close(outputs, list(twice(None, *args[1:])))


def test_no_values_and_values_outside_leave_the_rest_alone(interpreter, graph_of):
    module = segment_sum(5, 6)
    x, ids = torch.randn(9, 6), targets_of(9, 5)
    graph = graph_of(module, x, ids)
    source = compile_graph(graph, variants(graph)[0]).source
    bad = ids.clone()
    bad[2], bad[4] = 5, -(2**40)
    calls = [[x[:0], ids[:0]], [x, bad], [x[:, ::2].repeat(1, 2), ids]]
    (none,), (some,), (strided,) = interpreter.run(source, {}, calls)
    assert none.eq(0).all()
    inside = (bad >= 0) & (bad < 5)
    torch.testing.assert_close(some, module(x[inside], bad[inside]))
    torch.testing.assert_close(strided, module(*calls[2]))


def test_special_values_come_through(interpreter, graph_of):
    module = segment_sum(4, 3)
    x = torch.zeros(5, 3)
    x[0], x[1], x[2, 0] = float("inf"), float("-inf"), float("nan")
    ids = torch.tensor([0, 1, 2, 0, 3])
    graph = graph_of(module, x, ids)
    ((got,),) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, {}, [[x, ids]])
    torch.testing.assert_close(got, module(x, ids), equal_nan=True)


def test_segment_sums_compile_for_hopper(graph_of, offline_compile):
    graph = graph_of(Function(lambda _, x: torch.zeros(64, 96).index_add(0, x[:, 0].long(), x)), torch.rand(256, 96))
    (kernel,) = [
        item
        for item in offline_compile(compile_graph(graph, variants(graph)[0]).source, [256, 96])
        if "index_add" in item["name"]
    ]
    assert kernel["spill_bytes"] == 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_shape_and_dimension(check, data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    dim = data.draw(st.integers(0, len(shape) - 1))
    count, whole = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    sizes = [*shape[:dim], count, *shape[dim + 1 :]]
    index = torch.randint(0, count, shape if whole else shape[dim : dim + 1])
    name = "scatter_add" if whole else "index_add"

    def forward(_, x, i):
        return getattr(x.new_ones(sizes), name)(dim, i, x * 2)

    check(Function(forward), torch.randn(shape), index)
