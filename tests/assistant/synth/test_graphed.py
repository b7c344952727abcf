"""Candidates in a CUDA graph: their text, which modules may have one, and that they run without a GPU."""

import ast
import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.artefact import module_source
from drk.assistant.artefact_record import constants
from drk.assistant.episode import Turn
from drk.assistant.regions_source import RegionSource, compose
from drk.assistant.synth.graphed import NOTE, graphed_calls, is_graphed
from drk.assistant.synth.propose import compile_graph, in_cuda_graph, variants
from drk.gym.schema import Call, Candidate, Task, Verdict


class Policy(nn.Module):
    """Two layers; nested inputs and results, an argument that is fixed at capture."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, state, flag=True):
        y = torch.tanh(self.first(x)) * state[0] + state[1] + self.shift
        return {"out": self.second(y).sigmoid(), "state": (y, y.exp().sum(-1))}


@pytest.fixture(scope="module")
def arguments():
    torch.manual_seed(1)
    return torch.randn(6, 12), (torch.randn(6, 8), torch.randn(6, 8))


@pytest.fixture(scope="module")
def forms(graph_of, arguments):
    """The same candidate without and with a graph."""
    graph = graph_of(Policy().eval(), *arguments)
    plain = compile_graph(graph, variants(graph)[0])
    return plain, in_cuda_graph(plain)


def replayed(graph_of, module, *args):
    """The candidate in a graph, or None where there can be none."""
    graph = graph_of(module, *args)
    return in_cuda_graph(compile_graph(graph, variants(graph)[0]))


def test_forward_replays_what_forward_was(forms):
    plain, graphed = forms
    text = graphed.source
    assert "    def forward(self, x, state, flag=True):\n        if flag is not True:\n" in text
    assert (
        "        return self.graphed(self, x, state[0], state[1])\n\n    def launch(self, x, state_0, state_1):\n"
        in text
    )
    assert "        self.graphed = GraphedCalls()\n" in text
    body = plain.source.partition("        state_1 = state[1]\n")[2]
    assert body and text.endswith(body)


def test_text_says_what_it_is(forms):
    plain, graphed = forms
    assert graphed.note == f"{plain.note}, {NOTE}"
    assert graphed.source.startswith(f'"""{plain.note}, in a CUDA graph.\n')
    assert is_graphed(graphed.source) and not is_graphed(plain.source)
    assert graphed_calls() in graphed.source
    names = [node.name for node in ast.parse(graphed.source).body if isinstance(node, ast.ClassDef)]
    assert names == ["Launch", "GraphedCalls", "ModelNew"]


def test_kernels_are_the_same(forms):
    plain, graphed = forms
    assert graphed.kernels == plain.kernels
    assert plain.launches == 3


def test_it_runs_kernel_by_kernel_under_the_interpreter(graph_of, interpreter, errors):
    module = Function(lambda s, x, y: (F.gelu(s.first(x)) + y, x.exp() * 2), first=nn.Linear(12, 8)).eval()
    args = [torch.randn(6, 12), torch.randn(6, 8)]
    other = [torch.randn(3, 24)[:, ::2], torch.randn(3, 8)]
    graphed = replayed(graph_of, module, *args)
    assert graphed is not None
    for call, outputs in zip(
        [args, other], interpreter.run(graphed.source, module.state_dict(), [args, other]), strict=True
    ):
        got, own = errors(module, call, outputs)
        assert got <= 2 * own + 1e-9


def test_parts_of_a_module_each_have_their_own(forms):
    source = compose([RegionSource(("a",), forms[1].source), RegionSource(("b",), forms[1].source)])
    assert "self.graphed = GraphedCalls_2()" in source
    assert "return GraphedCalls_1, (self.limit,)" in source
    ast.parse(source)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.exp() * 2 + self.calls


@pytest.mark.parametrize(
    "module",
    [
        Counting(),
        Function(lambda _, x: F.dropout(x.exp() * 2, 0.5, True)),
        Function(lambda _, x: torch.rand_like(x) + x.exp() * 2),
        Function(lambda _, x: (x.exp() * 2, x)),
        Function(lambda _, x: (x.exp() * 2, x.view(-1)[:3])),
        Function(lambda s, x: (x.exp() * 2, s.weight), weight=torch.ones(3)),
        Function(lambda s, x: (s.launch(x).exp() * 2,), launch=nn.Linear(6, 6)),
    ],
    ids=["state", "dropout", "random", "input", "view", "weight", "name"],
)
def test_modules_that_no_graph_can_replay(graph_of, module):
    assert replayed(graph_of, module, torch.randn(4, 6)) is None


def test_dropout_in_eval_mode_draws_nothing(graph_of):
    module = Function(lambda s, x: s.drop(x.exp() * 2 + 1), drop=nn.Dropout()).eval()
    assert replayed(graph_of, module, torch.randn(4, 6)) is not None


def load(source, path):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_copies_of_a_module_record_for_themselves(forms, tmp_path):
    model = load(forms[1].source, tmp_path / "graphed_candidate.py").ModelNew()
    assert model.state_dict().keys() == Policy().state_dict().keys()
    twin = copy.deepcopy(model)
    assert twin.graphed is not model.graphed
    assert twin.graphed.limit == model.graphed.limit


def test_an_artefact_takes_it_with_its_operator_and_its_ties(graph_of, arguments, forms, tmp_path):
    task = Task("policy", {"policy.py": "class Policy: ..."}, "policy.py", "Policy", inputs=Call())
    verdict = Verdict("accepted", "gpu", "measured", True, True, weights="copied")
    graph = graph_of(Policy().eval(), *arguments)
    turn = Turn(1, Candidate(forms[1].source), verdict)
    kernels = load(module_source(task, turn, constants(task, graph, verdict, ())), tmp_path / "policy_kernels.py")
    model = kernels.optimize(Policy().eval())
    stats = kernels.stats(model)
    assert stats["optimized"] and not stats["disabled"]
    dispatch = vars(model)["forward"]
    assert dispatch.kernels.first.weight is model.first.weight
    assert kernels._OPERATOR.ready
    assert kernels._OPERATOR.kernels.graphed is not dispatch.kernels.graphed
    with torch.no_grad():
        assert model(*arguments)["out"].shape == (6, 4)
    assert kernels.stats(model)["fallback_calls"] == 1  # there is no GPU here
