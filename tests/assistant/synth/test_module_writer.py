"""The emitted module's face: state keys, arguments, outputs, constants, text."""

import ast
import importlib.util

import pytest
import torch
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.synth.module_writer import UnsupportedGraph, attribute
from drk.assistant.synth.propose import compile_graph, variants


def emitted(graph, tmp_path):
    source = compile_graph(graph, variants(graph)[0]).source
    path = tmp_path / "emitted.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("emitted_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return source, module.ModelNew


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layers[0].weight
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.ones(6))
        self.register_buffer("table", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), persistent=False)

    def forward(self, x, scale=2.0, *, other=None, flag=True):
        y = self.tied(self.layers(x)) * scale + self.shift + self.table
        return {"y": y, "pair": (y.relu() * 2, [y.sigmoid() + 1])}


def test_state_keys_shapes_ties_and_gradients(graph_of, tmp_path):
    module = Stateful().eval()
    _, model = emitted(graph_of(module, torch.randn(2, 6)), tmp_path)
    new = model("any", constructor="arguments")
    assert new.state_dict().keys() == module.state_dict().keys()
    new.load_state_dict(module.state_dict())
    assert new.tied.weight is new.layers._modules["0"].weight
    assert not new.unused.requires_grad
    assert torch.equal(new.table, module.table)


def test_argument_names_and_defaults(graph_of, tmp_path):
    source, _ = emitted(graph_of(Stateful().eval(), torch.randn(2, 6)), tmp_path)
    assert "def forward(self, x, scale=2.0, *, other=None, flag=True):" in source


def test_plain_arguments_are_held_to_their_captured_values(graph_of, tmp_path):
    module = Stateful().eval()
    _, model = emitted(graph_of(module, torch.randn(2, 6)), tmp_path)
    with pytest.raises(ValueError, match=r"scale was 2\.0"):
        model()(torch.randn(2, 6), scale=3.0)
    with pytest.raises(ValueError, match="flag was True"):
        model()(torch.randn(2, 6), flag=False)


def test_nested_outputs_keep_their_form(graph_of):
    graph = graph_of(Stateful().eval(), torch.randn(2, 6))
    source = compile_graph(graph, variants(graph)[0]).source
    returned = ast.parse(source.splitlines()[-1].strip()).body[0].value
    assert [key.value for key in returned.keys] == ["y", "pair"]
    assert isinstance(returned.values[1], ast.Tuple)
    assert isinstance(returned.values[1].elts[1], ast.List)


def test_named_tuples_of_torch_are_handed_back(check):
    module = Function(lambda _, x: x.max(dim=1))
    source = check(module, torch.randn(3, 5)).source
    assert "return torch.return_types.max((" in source


def test_text_is_documented_and_parses(graph_of):
    graph = graph_of(GatedMLP(), torch.randn(2, 5, 48))
    tree = ast.parse(compile_graph(graph, variants(graph)[0]).source)
    assert "silu(norm @ gate_weight.T) * (norm @ up_weight.T)" in ast.get_docstring(tree)
    for item in tree.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            assert ast.get_docstring(item), item.name


def test_attribute_paths():
    assert attribute("norm.weight") == "self.norm.weight"
    assert attribute("layers.0.weight") == 'self.layers._modules["0"].weight'
    assert attribute("weight") == "self.weight"


class Unsaved(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(100))
        self.part = nn.ModuleList([nn.Module()])
        self.part[0].register_buffer("table", torch.randn(100), persistent=False)
        self.offset = torch.randn(100)

    def forward(self, x):
        return (x * self.weight * self.part[0].table + self.offset).relu()


def test_large_tensors_that_no_state_dict_holds_come_from_the_reference(graph_of, tmp_path):
    module = Unsaved().eval()
    source, model = emitted(graph_of(module, torch.randn(4, 100)), tmp_path)
    new = model.from_reference(module)
    assert torch.equal(new.part._modules["0"].table, module.part[0].table)
    assert any(torch.equal(one, module.offset) for one in new.buffers())
    assert new.weight.data_ptr() == module.weight.data_ptr()
    assert new.state_dict().keys() == module.state_dict().keys()
    assert source.count("from_reference") == 1


def test_large_values_made_in_forward_are_refused(graph_of):
    class Made(nn.Module):
        def forward(self, x):
            return (x * torch.tensor([float(index) for index in range(100)])).relu() + 1

    with pytest.raises(UnsupportedGraph, match="too large"):
        compile_graph(graph_of(Made().eval(), torch.randn(4, 100)), variants(graph_of(Made(), torch.randn(4, 100)))[0])


class Normed(nn.Module):
    """Weights that several operators read, and some that kernels only need the address of."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.SiLU())

    def forward(self, x):
        y = self.inner(x)
        return y * self.inner[0].bias.view(6, 1, 1) + self.inner[0].bias.sum()


def test_weights_are_read_once_and_not_reshaped_for_kernels(check):
    module = Normed()
    nn.init.normal_(module.inner[1].weight)
    nn.init.normal_(module.inner[1].bias)
    source = check(module, torch.randn(2, 4, 9, 7), calls=[[torch.randn(3, 4, 5, 6)]]).source
    forward = source[source.index("def forward") :]
    assert forward.count('self.inner._modules["0"].bias') == 1
    assert "bias.reshape" not in forward
    assert "weight.reshape" not in forward


class Counted(nn.Module):
    """Returns a weight's view, and changes a buffer that it reads twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x):
        y = (x * self.weight + self.seen).relu()
        self.seen.add_(1.0)
        return y * self.seen, self.weight.view(6, 1)


def test_views_that_leave_and_buffers_that_change_are_made(graph_of, interpreter):
    module = Counted().eval()
    x = torch.randn(3, 6)
    graph = graph_of(Counted().eval(), x)
    source = compile_graph(graph, variants(graph)[0]).source
    (first, second) = interpreter.run(source, module.state_dict(), [[x], [x]])
    for outputs in (first, second):
        for got, expected in zip(outputs, module(x), strict=True):
            assert torch.allclose(got, expected, atol=1e-6)
    assert torch.equal(interpreter.state["seen"], torch.full((6,), 2.0))
