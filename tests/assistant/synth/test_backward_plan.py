"""Which kernels a backward graph becomes: sums over rows join the kernel that has the rows."""

import pytest
import torch
import torch.nn.functional as F
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.synth.backward_module import compile_training, training_variants


@pytest.fixture
def backward(graph_of):
    """The kernels of a module's backward pass, by what they store."""

    def make(module, *args, variant=0):
        graph = graph_of(module.train(), *args)
        compiled = compile_training(graph, training_variants(graph)[variant])
        return [
            region for region in compiled.regions if any(name.startswith("d_") for name in stored(region))
        ], compiled

    return make


def stored(region):
    sums = [node.name for node in region.nodes if node.bare_op == "sum"] if region.kind == "sums" else []
    return {*(item.value for item in region.outputs), *sums}


def test_a_norms_gradients_are_one_kernel(backward):
    regions, _ = backward(nn.LayerNorm(48), torch.randn(8, 5, 48))
    assert [region.kind for region in regions] == ["sums"]
    assert {"d_weight", "d_bias"} < stored(regions[0])


def test_a_bias_is_summed_where_its_rows_are_made(backward):
    regions, compiled = backward(
        Function(lambda s, x: F.gelu(s.fc(x)), fc=nn.Linear(8, 6)), torch.randn(4, 8), variant=1
    )
    assert [region.kind for region in regions] == ["sums"]
    assert "torch.mm(" in compiled.source


def test_what_reads_a_product_alone_stays_in_its_epilogue(backward):
    regions, _ = backward(GatedMLP(16, 24), torch.randn(2, 5, 16))
    kinds = [region.kind for region in regions]
    assert kinds.count("sums") == 1
    pair = next(region for region in regions if {"d_gate", "d_up"} <= stored(region))
    assert pair.kind == "matmul"


def test_sums_over_scattered_dimensions_read_tensors_rather_than_intermediate_results(backward):
    regions, _ = backward(nn.GroupNorm(2, 6), torch.randn(3, 6, 4, 4))
    assert all("again" not in name for region in regions for name in stored(region))
    assert len(regions) == 1


def test_a_sum_of_what_is_in_memory_anyway_is_torchs(backward):
    module = Function(lambda s, x: s.fc(x.tanh() + 1), fc=nn.Linear(8, 6))
    _, compiled = backward(module, torch.randn(3, 4, 8), variant=1)
    assert ".sum([-3, -2], False)" in compiled.source
