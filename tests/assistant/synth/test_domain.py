"""Folding of dimensions and the offsets that follow from it."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drk.assistant.synth.domain import align, fold, index_lines, offset, stride_arguments
from drk.gym.graph import TensorMeta


def operand(name, tensor, shape):
    return align(name, TensorMeta(tuple(tensor.shape), "float32", tensor.stride()), shape)


def test_equal_operands_fold_into_one_group():
    x = operand("x", torch.zeros(4, 3, 5), (4, 3, 5))
    domain = fold((4, 3, 5), 0, [x, x])
    assert [group.dims for group in domain.rows] == [(0, 1, 2)]
    assert offset(x, "x", domain) == "index"


def test_row_and_column_groups_never_mix():
    x = operand("x", torch.zeros(4, 3, 5), (4, 3, 5))
    weight = operand("w", torch.zeros(5), (4, 3, 5))
    domain = fold((4, 3, 5), 1, [x, weight])
    assert (domain.n_rows, domain.n_cols) == (12, 5)
    assert offset(x, "x", domain, "[:, None]", "[None, :]") == "rows[:, None] * n_cols + cols[None, :]"
    assert offset(weight, "w", domain, "[:, None]", "[None, :]") == "cols[None, :]"


def test_shapes_that_do_not_broadcast_are_refused():
    assert operand("x", torch.zeros(4), (3, 5)) is None
    assert operand("x", torch.zeros(2, 3, 5), (3, 5)) is None


def test_parameters_of_size_one_stay_broadcast_where_inputs_may_grow():
    meta = TensorMeta((1, 5), "float32", (5, 1))
    assert align("w", meta, (1, 5), fixed=True).varies == (False, True)
    assert align("x", meta, (1, 5)).varies == (True, True)


def evaluate(domain, item, name, tensor, flat):
    """Run the emitted index statements for one flat index."""
    scope = {domain.rows[0].index if len(domain.rows) == 1 else "index": flat}
    for groups in (domain.rows,):
        for group in groups:
            scope[group.size] = math.prod(domain.shape[dim] for dim in group.dims)
    for parameter, text in stride_arguments(item, name, domain):
        scope[parameter] = eval(text, {name: tensor})
    for line in index_lines(domain.rows, "index"):
        exec(line, scope)
    return eval(offset(item, name, domain) or "0", scope)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_offsets_address_the_right_element(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    sizes = [data.draw(st.sampled_from([1, size])) for size in shape]
    order = data.draw(st.permutations(range(len(shape))))
    storage = torch.arange(math.prod(sizes)).reshape([sizes[axis] for axis in order])
    tensor = storage.permute([order.index(axis) for axis in range(len(shape))])
    item, full = operand("t", tensor, shape), operand("f", torch.zeros(shape), shape)
    domain = fold(shape, 0, [item, full])
    expanded = tensor.expand(shape)
    base = tensor.as_strided((storage.numel(),), (1,))
    for flat, position in enumerate(itertools.product(*(range(size) for size in shape))):
        assert base[evaluate(domain, item, "t", tensor, flat)] == expanded[position]
