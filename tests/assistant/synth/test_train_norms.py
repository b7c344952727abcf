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
    reference = copy.deepcopy(module)
    expected = reference(x).detach()
    assert reference.norm.num_batches_tracked.item() > 0
    found = []
    for variant in variants(graph)[:2]:
        state = {key: value.clone() for key, value in module.state_dict().items()}
        found.append(compile_graph(graph, variant))
        (outputs,) = interpreter.run(found[-1].source, state, [[x]])
        torch.testing.assert_close(outputs[0], expected)
        for key, value in reference.state_dict().items():
            torch.testing.assert_close(interpreter.state[key], value)
    return found


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


def test_statistics_are_one_kernel_and_the_rest_joins_what_follows(interpreter, graph_of):
    def forward(s, x):
        return F.max_pool2d(F.relu(s.norm(s.conv(x) + 3)), 3, 2, 1)

    parts = {"conv": nn.Conv2d(3, 5, 3, padding=1), "norm": nn.BatchNorm2d(5, momentum=0.2)}
    module = Function(forward, **parts).train()
    nn.init.normal_(module.norm.weight)
    nn.init.normal_(module.norm.running_mean)
    graph = graph_of(module, torch.randn(3, 3, 24, 20))
    for compiled in hold_outputs_and_state(module, interpreter, graph, torch.randn(4, 3, 11, 19) - 2):
        kinds = [region.kind for region in compiled.regions if region.inputs or region.pooled]
        assert sorted(kinds)[-2:] in (["pool", "row"], ["pool", "split"]), compiled.source
        assert "F.batch_norm(" not in compiled.source
        assert "torch.ops" not in compiled.source


def test_half_precision_keeps_statistics_in_float32(interpreter, graph_of):
    module = Function(lambda s, x: s.norm(x).sigmoid(), norm=nn.BatchNorm2d(3)).train()
    x = (torch.randn(2, 3, 8, 9) * 2 + 5).bfloat16()
    hold_outputs_and_state(module, interpreter, graph_of(module, x), x)
