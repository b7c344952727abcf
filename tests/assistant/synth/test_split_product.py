"""Products in parts of the inner dimension, whose second kernel has the epilogue."""

import torch
import torch.nn.functional as F
from modules import Function
from torch import nn

INNER = 1030
"""Long enough for two parts, and no multiple of a block."""


def test_a_linear_layer_on_few_rows(check):
    module = Function(lambda s, x, r: F.gelu(s.linear(x)) * 2 + r, linear=nn.Linear(INNER, 70))
    calls = [[torch.randn(7, INNER), torch.randn(7, 1)]]
    compiled = check(module, torch.randn(5, INNER), torch.randn(5, 1), kernels=["linear_gelu_mul_add"], calls=calls)
    assert "PARTS=2" in compiled.source
    assert ", parts.numel()) < 2**31" in compiled.source
    assert "linear_gelu_mul_add_pass1_kernel" in compiled.source


def test_batched_products_with_broadcast_operands(check):
    module = Function(lambda s, x, y: torch.relu(x @ y.mT * 0.1 + s.bias) - x.mean(), bias=torch.randn(9))
    compiled = check(module, torch.randn(2, 3, 4, INNER), torch.randn(2, 3, 9, INNER), factor=3.0)
    assert "PARTS=2" in compiled.source


def test_tall_matrices_times_themselves_and_at_other_lengths(check):
    module = Function(lambda _, x: (x.t() @ x).tanh())
    compiled = check(module, torch.randn(INNER, 20), calls=[[torch.randn(40, 20)], [torch.randn(2000, 17)]], factor=3.0)
    assert "PARTS=2" in compiled.source


def test_a_gated_pair_in_half_precision(check):
    module = Function(lambda s, x: F.silu(s.g(x)) * s.u(x), g=nn.Linear(INNER, 40), u=nn.Linear(INNER, 40)).half()
    compiled = check(module, torch.randn(3, INNER).half(), variant=1, kernels=["linear_silu_mul"])
    assert compiled.source.count("PARTS=2") == 2
