"""The emitted autograd function: what it keeps, what it skips, and what it refuses."""

import ast

import pytest
import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

from drk.assistant.synth.backward_module import compile_training, training_variants


@pytest.fixture
def function(graph_of):
    """The class of a module's only autograd function, as a syntax tree, and the whole text."""

    def make(module, *args, variant=0):
        graph = graph_of(module.train(), *args)
        source = compile_training(graph, training_variants(graph)[variant]).source
        (found,) = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.bases and "autograd.Function" in ast.unparse(node.bases[0])
        ]
        return {item.name: ast.unparse(item) for item in found.body if isinstance(item, ast.FunctionDef)}, source

    return make


def test_second_derivatives_are_refused(function):
    passes, _ = function(nn.LayerNorm(8), torch.randn(4, 8))
    assert "once_differentiable" in passes["backward"]


def test_one_gradient_is_returned_for_each_input(function):
    module = Function(lambda s, x, y: F.cross_entropy(s.fc(x), y), fc=nn.Linear(8, 6))
    passes, _ = function(module, torch.randn(4, 8), torch.tensor([0, 1, 2, 3]))
    returned = passes["backward"].rpartition("return ")[2]
    taken = passes["forward"].split("(ctx, ")[1].split(")")[0]
    assert len(returned.strip("()").split(", ")) == len(taken.split(", "))
    assert "None" in returned  # labels have none


def test_a_step_for_one_input_alone_is_skipped_where_nobody_wants_it(function):
    passes, _ = function(Function(lambda s, x: F.gelu(s.fc(x)), fc=nn.Linear(8, 6)), torch.randn(4, 8), variant=1)
    skipped = [line for line in passes["backward"].splitlines() if "if ctx.needs_input_grad[0] else None" in line]
    assert len(skipped) == 1
    assert "torch.mm" in skipped[0]


def test_results_without_gradients_are_marked(function):
    module = Function(lambda s, x: ((x * 2).tanh().exp(), (x * 2).tanh().exp().argmax(-1)))
    passes, _ = function(module, torch.randn(4, 8))
    assert "ctx.mark_non_differentiable(argmax)" in passes["forward"]
    assert "_argmax" in passes["backward"].split(":")[0]
