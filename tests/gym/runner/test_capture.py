"""Golden graphs of small modules, and what capture refuses."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from drk.gym.errors import BundleError
from drk.gym.graph import Pack, Ref, graph_from_json
from drk.gym.runner.capture import CaptureError, capture
from drk.gym.runner.remap import device_remap


def parsed(module, *args, **kwargs):
    return graph_from_json(json.loads(json.dumps(capture(module, args, kwargs))))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()
        self.up = nn.Linear(8, 12)

    def forward(self, x):
        return F.silu(self.up(self.norm(x)))


def test_golden_graph_of_a_norm_and_a_linear_layer():
    graph = parsed(Block(), torch.randn(2, 3, 8))
    assert [(node.op, node.meta.shape, node.module) for node in graph.nodes] == [
        ("aten.pow.Tensor_Scalar", (2, 3, 8), "norm"),
        ("aten.mean.dim", (2, 3, 1), "norm"),
        ("aten.add.Tensor", (2, 3, 1), "norm"),
        ("aten.rsqrt.default", (2, 3, 1), "norm"),
        ("aten.mul.Tensor", (2, 3, 8), "norm"),
        ("aten.mul.Tensor", (2, 3, 8), "norm"),
        ("aten.linear.default", (2, 3, 12), "up"),
        ("aten.silu.default", (2, 3, 12), ""),
    ]
    assert graph.method == "export"
    assert {item.path for item in graph.placeholders} == {"norm.weight", "up.weight", "up.bias", "x"}
    assert [item.key for item in graph.state] == ["norm.weight", "up.weight", "up.bias"]
    assert graph.output == Ref(graph.nodes[-1].name)


def test_source_lines_point_into_the_users_file():
    node = parsed(Norm(), torch.randn(2, 8)).nodes[0]
    assert node.file == __file__
    assert node.line == Norm.forward.__code__.co_firstlineno + 1


def test_in_place_operators_become_functional():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x + 1
            y.relu_()
            return y * 2

    assert [node.bare_op for node in parsed(InPlace(), torch.randn(4)).nodes] == ["add", "relu", "mul"]


def test_arguments_keep_names_defaults_and_nesting():
    class Nested(nn.Module):
        def forward(self, x, pair, scale=2.0, *, extra=None):
            return {"sum": x + pair[0] * scale, "rest": (pair[1]["z"], [x])}

    graph = parsed(Nested(), torch.randn(3), (torch.randn(3), {"z": torch.randn(3)}), extra=torch.randn(3))
    assert [item.path for item in graph.placeholders] == ["x", "pair[0]", "pair[1]['z']", "extra"]
    assert [(item.name, item.has_default, item.default) for item in graph.signature] == [
        ("x", False, None),
        ("pair", False, None),
        ("scale", True, 2.0),
        ("extra", True, None),
    ]
    assert isinstance(graph.output, Pack)
    assert graph.output.form == "dict"
    assert graph.output.items[1].form == "tuple"
    assert graph.output.items[1].items[1].form == "list"


def test_keyword_order_does_not_swap_inputs():
    class Two(nn.Module):
        def forward(self, a, b):
            return a - b.sum()

    graph = parsed(Two(), b=torch.randn(5), a=torch.randn(3))
    assert {item.path: item.meta.shape for item in graph.placeholders} == {"a": (3,), "b": (5,)}


def test_buffers_tied_weights_and_constants():
    class State(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0, 4.0]), persistent=False)
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x):
            return self.second(self.first(x)) + self.table + torch.tensor(3.0)

    graph = parsed(State(), torch.randn(2, 4))
    state = {item.key: item for item in graph.state}
    assert state["second.weight"].alias_of == "first.weight"
    assert (state["table"].persistent, state["table"].value) == (False, (1.0, 2.0, 3.0, 4.0))
    assert state["step"].persistent
    constant = next(item for item in graph.placeholders if item.kind == "constant")
    assert constant.value == 3.0


def test_mutated_buffers_are_named():
    module = nn.BatchNorm1d(4).train()
    graph = parsed(module, torch.randn(6, 4))
    assert graph.training
    assert set(graph.mutations) == {"running_mean", "running_var", "num_batches_tracked"}
    assert module.num_batches_tracked == 0


def test_control_flow_that_depends_on_values_is_refused():
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x * 3

    with pytest.raises(CaptureError, match="data-dependent"):
        capture(Branch(), (torch.ones(3),))


def test_tracing_stands_in_where_export_fails(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("export is broken")

    monkeypatch.setattr(torch.export, "export", fail)
    module = Block()
    graph = parsed(module, torch.randn(2, 8))
    assert graph.method == "make_fx"
    assert "traced on real values" in graph.notes[0]
    assert {item.path for item in graph.placeholders} == {"norm.weight", "up.weight", "up.bias", "x"}
    assert graph.nodes[-1].bare_op == "silu"


def test_named_tuples_of_torch_keep_their_type():
    class Largest(nn.Module):
        def forward(self, x):
            return {"top": torch.max(x, dim=1), "sorted": x.sort()}

    graph = parsed(Largest(), torch.randn(2, 8))
    top, ordered = graph.output.items
    assert (top.form, top.keys, len(top.items)) == ("tuple", ("max",), 2)
    assert ordered.keys == ("sort",)
    wire = capture(Largest(), (torch.randn(2, 8),))
    wire["output"]["dict"][0][1]["returned"][0] = "max:0"
    with pytest.raises(BundleError, match="type"):
        graph_from_json(wire)


def test_outputs_that_a_graph_cannot_state_are_refused():
    @dataclasses.dataclass
    class Result:
        value: torch.Tensor

    class Custom(nn.Module):
        def forward(self, x):
            return Result(x + 1)

    with pytest.raises(CaptureError, match="Result"):
        capture(Custom(), (torch.ones(2),))


def test_failing_modules_name_every_attempt():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("no way through")

    with pytest.raises(CaptureError, match="no way through") as caught:
        capture(Broken(), (torch.ones(2),))
    assert list(caught.value.attempts) == ["export", "export-strict", "make_fx"]


def test_training_mode_and_strides_are_recorded():
    graph = parsed(nn.ReLU().eval(), torch.randn(4, 6).t())
    assert not graph.training
    assert graph.placeholders[0].meta.strides == (1, 6)


def test_training_norm_is_captured_while_cuda_means_the_cpu():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    with device_remap() as mode, torch.no_grad():
        data = capture(module, (torch.randn(2, 3, 8, 8),))
        assert torch.overrides._get_current_function_mode() is mode
    assert set(data["mutations"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
