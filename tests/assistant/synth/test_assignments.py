"""Assignments to parts of tensors: the same values, without copies of the whole."""

import torch
from modules import Each, Function

from drk.assistant.synth.assignments import without_assignments


def shifted(_, x):
    y = torch.zeros_like(x)
    y[:, :, 1:] = x[:, :, :-1]
    y[:, 0] = 1.0
    return y * 2


def by_channels(_, x):
    out, g = torch.empty_like(x), 2
    out[:, :g, 1:] = x[:, :g, :-1]
    out[:, :g, 0] = 0
    out[:, g : 2 * g, :-1] = x[:, g : 2 * g, 1:]
    out[:, g : 2 * g, -1] = 3
    out[:, 2 * g :, :] = x[:, 2 * g :]
    return out


def in_a_loop(_, x):
    out, state = x.new_zeros(x.shape), x[:, 0]
    for step in range(x.shape[1]):
        state = 0.5 * state + x[:, step]
        out[:, step] = state
    return out.tanh()


def overwritten(_, x):
    y = x.clone()
    y[:, 1:4] = x[:, :3] + 1
    y[:, 2] += 5
    y[..., -2:] = y[..., :2].mean(1, keepdim=True)
    return y, y[:, 1:4] * 2


def of_other_types(_, x):
    y = torch.zeros(x.shape, device=x.device)
    y[:, 1:3] = torch.arange(7, device=x.device)
    y[:, -1:] = (x > 0)[:, :1]
    return x + y


def test_parts_keep_their_values(check):
    functions = [shifted, by_channels, in_a_loop, of_other_types]
    check(
        Each(functions), *(torch.randn(5, 6, 7) for _ in functions), calls=[[torch.randn(2, 6, 7) for _ in functions]]
    )
    check(Function(overwritten), torch.randn(5, 6, 7), calls=[[torch.randn(1, 6, 7)]])


def test_a_loop_s_results_are_joined_once(graph_of):
    nodes = without_assignments(graph_of(Function(in_a_loop), torch.randn(5, 6, 7))).nodes
    assert [node.bare_op for node in nodes if "scatter" in node.op or node.bare_op == "cat"] == ["cat"]


def test_shifts_are_padding(graph_of):
    graph = without_assignments(graph_of(Function(lambda _, x: shifted(_, x)[:, 1:]), torch.randn(5, 6, 7)))
    assert "constant_pad_nd" in [node.bare_op for node in graph.nodes]
    assert not {"slice_scatter", "select_scatter", "copy"} & {node.bare_op for node in graph.nodes}


def test_steps_stay(graph_of):
    def every_other(_, x):
        y = x * 1
        y[:, ::2] = 0
        return y

    graph = graph_of(Function(every_other), torch.randn(3, 6))
    assert "slice_scatter" in [node.bare_op for node in without_assignments(graph).nodes]
