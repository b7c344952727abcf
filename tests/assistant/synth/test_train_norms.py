"""Training batch norms: outputs, running statistics after the call, and what is left as export wrote it."""

import copy

import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.propose import compile_graph, variants
from drk.assistant.synth.train_norms import updating_batch_norms


def build(calls=1):
    def forward(s, x):
        y = s.conv(x)
        for _ in range(calls):
            y = F.relu(s.norm(y)) * 2
        return y

    return Function(forward, conv=nn.Conv2d(3, 4, 3, bias=False), norm=nn.BatchNorm2d(4, momentum=0.3)).train()


def hold_outputs_and_state(module, interpreter, graph, x):
    state = {key: value.clone() for key, value in module.state_dict().items()}
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, state, [[x]])
    reference = copy.deepcopy(module)
    torch.testing.assert_close(outputs[0], reference(x).detach())
    assert reference.norm.num_batches_tracked.item() > 0
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(interpreter.state[key], value)


def test_running_statistics_are_updated_in_place(interpreter, graph_of):
    module, x = build(), torch.randn(2, 3, 8, 8)
    graph = graph_of(module, x)
    rewritten = updating_batch_norms(graph)
    assert set(rewritten.mutations) == {"norm.num_batches_tracked"}
    assert "batch_norm" in [node.bare_op for node in rewritten.nodes]
    hold_outputs_and_state(module, interpreter, graph, x)


def test_a_norm_that_is_called_twice_stays_functional(interpreter, graph_of):
    module, x = build(calls=2), torch.randn(2, 3, 8, 8)
    graph = graph_of(module, x)
    rewritten = updating_batch_norms(graph)
    assert rewritten.mutations == graph.mutations
    hold_outputs_and_state(module, interpreter, graph, x)
