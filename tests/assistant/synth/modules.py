"""Small modules that several tests compile."""

import torch
import torch.nn.functional as F
from torch import nn


class Function(nn.Module):
    """``forward`` is ``function(self, *args)``; keyword arguments become submodules or parameters."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))

    def forward(self, *args):
        return self.function(self, *args)


class Each(Function):
    """Several functions in one module: each takes ``arity`` arguments of its own and gives one result."""

    def __init__(self, functions, arity=1, **parts):
        super().__init__(None, **parts)
        self.functions, self.arity = tuple(functions), arity

    def forward(self, *args):
        step = self.arity
        return tuple(function(self, *args[step * i : step * (i + 1)]) for i, function in enumerate(self.functions))


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class GatedMLP(nn.Module):
    """RMSNorm, SwiGLU and residual, as in docs/examples/transformer_mlp.py."""

    def __init__(self, dim=48, hidden=72):
        super().__init__()
        self.norm = RMSNorm(dim)
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Attention(nn.Module):
    """Pre-norm self-attention with written-out causal softmax."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        batch, length, dim = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (p.view(batch, length, self.heads, dim // self.heads).transpose(1, 2) for p in parts)
        scores = (q @ k.transpose(-1, -2)) / (dim // self.heads) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, dim))
