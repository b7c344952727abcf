"""Kernels with sums over rows: how they are written, and that they compile for a GPU as the forward ones do."""

import re

import torch
from torch import nn

from drk.assistant.synth.backward_module import compile_training, training_variants


def kernel(graph_of, module, *args):
    graph = graph_of(module.train(), *args)
    source = compile_training(graph, training_variants(graph)[0]).source
    return re.search(r"def layer_norm_backward_kernel\(.*?(?=\n\n\nclass)", source, re.DOTALL).group()


def test_whole_rows_are_held_where_they_are_reduced(graph_of):
    text = kernel(graph_of, nn.LayerNorm(48), torch.randn(8, 48))
    assert "cols = tl.arange(0, BLOCK_N)" in text
    assert "for start in range(program * BLOCK_M, n_rows, n_programs * BLOCK_M):" in text
    assert "atomic" not in text
    assert "d_weight_parts.sum(0)" in text


def test_very_long_rows_are_summed_by_tiles_in_a_kernel_of_their_own(graph_of):
    text = kernel(graph_of, nn.LayerNorm(9000), torch.randn(200, 9000))
    assert "tiles_n = tl.cdiv(n_cols, BLOCK_N)" in text
    assert "out_d_input" not in text.split("tl.arange")[0]


def test_rows_of_two_dimensions_keep_them(graph_of):
    text = kernel(graph_of, nn.LayerNorm((4, 6)), torch.randn(8, 4, 6))
    assert "d_weight_parts.sum(0).reshape(d_shifted.shape[-2:])" in text
