"""Rotary embeddings by complex numbers: one kernel on real ones."""

import pytest
import torch
from torch import nn


class Rotated(nn.Module):
    """Queries turned by angles that grow with the position, as Llama's reference code has it."""

    def __init__(self, width=8, length=16):
        super().__init__()
        powers = 1.0 / 100.0 ** (torch.arange(0, width, 2)[: width // 2].float() / width)
        angles = torch.outer(torch.arange(length).float(), powers)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = self.turns[: x.shape[1]].view(1, pairs.shape[1], 1, pairs.shape[-1])
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_embedding_is_one_kernel(check, dtype):
    x = torch.randn(3, 7, 2, 8).to(dtype)
    made = check(Rotated(), x, calls=[[torch.randn(5, 7, 2, 8).to(dtype)]])
    assert len(made.kernels) == 1
    assert "view_as_complex" not in made.source


def test_a_complex_tensor_times_a_real_one(check):
    class Scaled(nn.Module):
        def forward(self, x, y):
            return torch.view_as_real(torch.view_as_complex(x) * y).relu()

    made = check(Scaled(), torch.randn(5, 3, 2), torch.randn(3))
    assert "view_as_complex" not in made.source
