"""Modules that train: results and gradients of the emitted kernels against float64 autograd, under the interpreter."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gradients import gradients
from modules import Function, GatedMLP, RMSNorm
from torch import nn

from drk.assistant.synth.backward_module import TrainingProposer, compile_training, training_variants
from drk.assistant.synth.module_writer import UnsupportedGraph


@pytest.fixture(scope="module")
def hold(interpreter, graph_of):
    """Compile a module, hold its results and gradients to ``factor`` times the reference's own error."""

    def run(module, *args, variant=0, factor=2.5, calls=()):
        module.train()
        graph = graph_of(module, *args)
        compiled = compile_training(graph, training_variants(graph)[variant])
        every_call = [list(args), *calls]
        results = interpreter.run(compiled.source, module.state_dict(), every_call, gradients=True)
        for call, got in zip(every_call, results, strict=True):
            own = gradients(copy.deepcopy(module), call)
            exact = [one.double() if one.is_floating_point() else one for one in call]
            truth = gradients(copy.deepcopy(module).double(), exact)
            assert got.keys() == truth.keys() == own.keys()
            for name, value in truth.items():
                assert (got[name].shape, got[name].dtype) == (own[name].shape, own[name].dtype), name
                scale = value.double().square().mean().sqrt() + 1e-30
                ours, theirs = ((one[name].double() - value).square().mean().sqrt() / scale for one in (got, own))
                rounding = 0.4 * torch.finfo(own[name].dtype).eps if own[name].is_floating_point() else 0.0
                assert ours <= factor * max(theirs, rounding), f"{name}: {ours:.2e}, {theirs:.2e}\n{compiled.source}"
        return compiled

    return run


def rows(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


def test_a_pointwise_chain(hold):
    compiled = hold(Function(lambda s, x, y: x * torch.sigmoid(x) + y), rows(8, 33), rows(8, 33))
    assert [region.kind for region in compiled.regions] == ["pointwise", "pointwise"]
    assert "torch.autograd.Function" in compiled.source


def test_a_layer_norm_of_any_number_of_rows(hold):
    module = nn.LayerNorm(12)
    nn.init.normal_(module.weight)
    compiled = hold(module, rows(4, 5, 12), calls=[[rows(2, 3, 12)]])
    assert [region.kind for region in compiled.regions] == ["row", "sums"]


def test_sums_over_more_rows_than_programs_take_at_once(hold):
    hold(RMSNorm(4), rows(9000, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_of_half_precision_rows(hold, dtype):
    hold(nn.LayerNorm(24).to(dtype), rows(6, 24, dtype=dtype))


def test_softmax_reads_its_result_only(hold):
    compiled = hold(Function(lambda s, x: (x.softmax(-1), x.log_softmax(0))), rows(7, 20))
    saved = compiled.source.split("ctx.save_for_backward(")[1].split(")")[0]
    assert set(saved.split(", ")) == {"probability", "log_probability"}


@pytest.mark.parametrize("variant", [0, 1])
def test_linear_with_bias_and_activation(hold, variant):
    compiled = hold(Function(lambda s, x: F.gelu(s.fc(x)), fc=nn.Linear(16, 24)), rows(3, 5, 16), variant=variant)
    assert [region.kind for region in compiled.regions].count("matmul") == (0 if variant else 3)


def test_cross_entropy_of_logits(hold):
    module = Function(lambda s, x, y: F.cross_entropy(s.fc(x), y), fc=nn.Linear(16, 24))
    labels = torch.tensor([0, 23, -100, 5, 5, 7, 1, 2])
    hold(module, rows(8, 16), labels, calls=[[rows(4, 16), labels[:4]]])


def test_a_gated_mlp_as_one_function(hold):
    compiled = hold(GatedMLP(16, 24), rows(2, 5, 16))
    assert compiled.source.count("(torch.autograd.Function)") == 1


def test_what_is_not_known_stays_with_torch(hold):
    def forward(s, x):
        return s.norm(F.dropout(F.gelu(s.conv(x)) * 2, 0.3)).mean((2, 3))

    module = Function(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.GroupNorm(2, 4))
    compiled = hold(module, rows(2, 3, 8, 8))
    assert "F.conv2d(x" in compiled.source.replace("args_0", "x")
    assert "dropout" in compiled.source


def test_detached_values_and_buffers_get_no_gradient(hold):
    module = Function(lambda s, x: (x.detach() * x + s.shift).exp())
    module.register_buffer("shift", rows(8))
    hold(module, rows(4, 8))


def test_a_parameter_that_is_frozen_gets_no_gradient_and_can_be_trained_later(hold):
    module = Function(lambda s, x: F.gelu(s.fc(x)), fc=nn.Linear(16, 24))
    module.fc.weight.requires_grad_(False)
    compiled = hold(module, rows(4, 16), variant=1)
    weight = next(line for line in compiled.source.splitlines() if "d_fc_weight = " in line)
    assert "if ctx.needs_input_grad[1] else None" in weight


def test_a_sum_over_rows_that_its_own_rows_need(hold):
    hold(Function(lambda s, x: (x - x.sum(0), x * x.mean(0))), rows(12, 6))


def test_maxima_that_are_used_by_themselves_hand_gradients_on(hold):
    hold(Function(lambda s, x: (x - x.amax(-1, keepdim=True)).exp().sum(-1) + x.softmax(-1)[:, 0]), rows(4, 8))


def test_without_anything_to_fuse_the_reason_is_told(graph_of):
    graph = graph_of(nn.Conv2d(3, 4, 3), rows(2, 3, 8, 8))
    with pytest.raises(UnsupportedGraph, match="left to torch: conv2d"):
        compile_training(graph, training_variants(graph)[0])
    found, why = TrainingProposer().propose(graph)
    assert found == []
    assert "conv2d" in why


def test_candidates_differ_and_those_that_were_tried_are_left_out(graph_of):
    graph = graph_of(Function(lambda s, x: F.gelu(s.fc(x)), fc=nn.Linear(16, 24)), rows(4, 16))
    found, _ = TrainingProposer().propose(graph)
    assert len(found) == len({one.source for one in found}) > 3
    turn = type("Turn", (), {"candidate": found[0], "verdict": None})()
    assert found[0].source not in {one.source for one in TrainingProposer().propose(graph, history=[turn])[0]}
