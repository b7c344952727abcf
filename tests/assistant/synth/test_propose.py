"""The proposer: order, determinism, history, and end to end on the shipped examples' structure."""

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from modules import Attention, Function, GatedMLP
from torch import nn

from drk.assistant.synth import BuiltinProposer
from drk.assistant.synth.propose import blamed_nodes, compile_graph, variants
from drk.gym.schema import Failure, Flag


@pytest.fixture(scope="module")
def mlp(graph_of):
    return graph_of(GatedMLP(), torch.randn(2, 5, 48))


def test_proposals_differ_in_code_and_parse(mlp):
    found = BuiltinProposer().propose(mlp, limit=8)
    assert len(found) == 8
    assert len({item.source.split('"""', 2)[-1] for item in found}) == 8
    for item in found:
        compile(item.source, "candidate.py", "exec")
        assert item.proposer == "builtin"


def test_same_graph_same_text(mlp, graph_of):
    torch.manual_seed(5)
    again = graph_of(GatedMLP(), torch.randn(2, 5, 48))
    sources = [[item.source for item in BuiltinProposer().propose(graph)] for graph in (mlp, again)]
    assert sources[0] == sources[1]


def test_text_does_not_depend_on_the_hash_seed(mlp):
    program = (
        "import torch, sys; sys.path.insert(0, sys.argv[1]); from modules import GatedMLP\n"
        "from drk.gym.runner.capture import capture; from drk.gym.graph import graph_from_json\n"
        "from drk.assistant.synth import BuiltinProposer\n"
        "graph = graph_from_json(capture(GatedMLP(), (torch.zeros(2, 5, 48),)))\n"
        "sys.stdout.write(''.join(item.source for item in BuiltinProposer().propose(graph)))"
    )
    folder = str(__file__).rsplit("/", 1)[0]
    command = [sys.executable, "-W", "ignore", "-c", program, folder]
    other = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "1"})
    assert os.environ.get("PYTHONHASHSEED") != "1"
    assert other.stdout == "".join(item.source for item in BuiltinProposer().propose(mlp)) != ""


def test_narrow_dtypes_try_the_library_first(graph_of):
    module = Function(lambda s, x: F.gelu(s.linear(x)), linear=nn.Linear(64, 64).bfloat16())
    graph = graph_of(module, torch.randn(8, 64, dtype=torch.bfloat16))
    first, second = BuiltinProposer().propose(graph)[:2]
    assert "F.linear(" in first.source
    assert "tl.dot(" in second.source


def test_tried_candidates_are_not_proposed_again(mlp):
    proposer = BuiltinProposer()
    everything = proposer.propose(mlp, limit=50)
    history = [SimpleNamespace(candidate=item, verdict=None) for item in everything[:3]]
    rest = proposer.propose(mlp, history=history, limit=50)
    assert [item.source for item in rest] == [item.source for item in everything[3:]]
    assert (
        proposer.propose(mlp, history=[SimpleNamespace(candidate=i, verdict=None) for i in everything], limit=50) == []
    )


def test_a_kernel_that_failed_is_left_to_torch(mlp):
    proposer = BuiltinProposer()
    first = proposer.propose(mlp, limit=1)[0]
    lines = first.source.splitlines()
    kernel = next(n for n, text in enumerate(lines) if text.startswith("def rms_norm_kernel("))
    line = next(n for n, text in enumerate(lines, 1) if n > kernel and "tl.rsqrt(" in text)
    verdict = SimpleNamespace(error=Failure("compile", "CompilationError", "boom", line))
    history = [SimpleNamespace(candidate=first, verdict=verdict)]
    blamed = blamed_nodes(mlp, history)
    assert "rsqrt" in blamed
    sources = [item.source for item in proposer.propose(mlp, history=history, limit=50)]
    assert any("rms_norm_kernel" not in source and "linear_silu_mul_kernel" in source for source in sources)


def test_after_a_wrong_answer_at_another_shape_other_shapes_are_refused(mlp):
    proposer = BuiltinProposer()
    first = proposer.propose(mlp, limit=1)[0]
    verdict = SimpleNamespace(error=None, flags=(Flag("shape-wrong", "shape", "fraud", "wrong at (48, 64)"),))
    again = proposer.propose(mlp, history=[SimpleNamespace(candidate=first, verdict=verdict)], limit=1)[0]
    shape = next(item.meta.shape for item in mlp.placeholders if item.kind == "input")
    assert f"if x.shape != {shape}:\n            raise ValueError('these kernels were made for x" in again.source
    assert "raise ValueError('these kernels" not in first.source
    ast.parse(again.source)


def test_nothing_to_fuse_gives_nothing(graph_of):
    assert BuiltinProposer().propose(graph_of(Function(lambda _, x: torch.linalg.inv(x)), torch.eye(3))) == []
    assert BuiltinProposer().propose(graph_of(Function(lambda _, x: x.median(0)[0]), torch.randn(8))) == []


def test_a_lone_training_norm_is_written_by_kernels(graph_of):
    found = BuiltinProposer().propose(graph_of(nn.BatchNorm1d(4).train(), torch.randn(6, 4)))
    assert found
    assert all("def batch_norm(" in item.source and "F.batch_norm" not in item.source for item in found)


def test_notes_speak_of_products_only_where_there_are_some(graph_of):
    graph = graph_of(Function(lambda _, x: F.gelu(x) * 2 + 1), torch.randn(8, 64))
    found = BuiltinProposer().propose(graph)
    assert len(found) >= 3
    assert not [item.note for item in found if "roduct" in item.note or "roduct" in item.source]


def test_hybrid_attention_block(check):
    compiled = check(Attention(), torch.randn(3, 10, 32), calls=[[torch.randn(1, 10, 32)]])
    names = [kernel.name for kernel in compiled.kernels]
    assert names == ["layer_norm", "linear", "attention", "linear_add"]


def test_hybrid_convolution(check):
    parts = {"conv": nn.Conv2d(3, 5, 3), "norm": nn.BatchNorm2d(5)}
    module = Function(lambda s, x: F.relu(s.norm(s.conv(x))), **parts)
    check(module, torch.randn(2, 3, 8, 8), kernels=["pointwise", "batch_norm_relu"])


def test_embedding_then_norm(interpreter, graph_of):
    module = Function(lambda s, i: s.norm(s.table(i) * 2 + 1), table=nn.Embedding(10, 16), norm=nn.LayerNorm(16)).eval()
    ids = torch.arange(10).view(2, 5)
    graph = graph_of(module, ids)
    (outputs,) = interpreter.run(compile_graph(graph, variants(graph)[0]).source, module.state_dict(), [[ids]])
    torch.testing.assert_close(outputs[0], module(ids).detach())
