"""Recurrent cells against PyTorch's: both products and the gates in kernels."""

import pytest
import torch
from modules import Function
from torch import nn


@pytest.mark.parametrize(
    "cell",
    [nn.GRUCell(12, 10), nn.GRUCell(12, 10, bias=False), nn.RNNCell(12, 10), nn.RNNCell(12, 10, nonlinearity="relu")],
)
def test_cells_of_one_state(check, cell):
    compiled = check(Function(lambda s, x, h: s.cell(x, h), cell=cell), torch.randn(5, 12), torch.randn(5, 10))
    assert "ops.aten" not in compiled.source


def test_a_cell_with_memory_hands_back_both(check):
    module = Function(lambda s, x, h, c: s.cell(x, (h, c)), cell=nn.LSTMCell(12, 10))
    state = [torch.randn(3, 10), torch.randn(3, 10)]
    compiled = check(
        module, torch.randn(5, 12), *(torch.randn(5, 10) for _ in "hc"), calls=[[torch.randn(3, 12), *state]]
    )
    assert "ops.aten" not in compiled.source
