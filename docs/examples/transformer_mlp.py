"""A pre-norm transformer MLP block: RMSNorm, SwiGLU (gate, up, down projections) and the residual connection.

Sizes are those of a small language model: width 1024, hidden width 2816, a batch of 4 sequences of 512 tokens, fp32.
Run it as it is (``python docs/examples/transformer_mlp.py``), or make it faster::

    drk optimize docs/examples/transformer_mlp.py
"""

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learnt scale (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return x * torch.rsqrt(variance + self.eps) * self.weight


class TransformerMLP(nn.Module):
    """``x + down(silu(gate(norm(x))) * up(norm(x)))``, the feed-forward half of a Llama-style layer."""

    def __init__(self, d_model: int = 1024, hidden: int = 2816) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model)
        self.gate = nn.Linear(d_model, hidden, bias=False)
        self.up = nn.Linear(d_model, hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def example_inputs() -> tuple[torch.Tensor]:
    """Return what one call gets: hidden states of 4 sequences of 512 tokens."""
    return (torch.randn(4, 512, 1024),)


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TransformerMLP().to(device).eval()
    with torch.no_grad():
        output = model(*(x.to(device) for x in example_inputs()))
    print(f"output {tuple(output.shape)} on {device}, mean {output.mean():.4f}, std {output.std():.4f}")
