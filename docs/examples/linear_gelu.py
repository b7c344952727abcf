"""A plain fp32 linear layer with GELU, 4096 x 4096 x 4096: one large matrix product and one pointwise function.

Make it faster::

    drk optimize docs/examples/linear_gelu.py
"""

import torch
import torch.nn.functional as F
from torch import nn


class LinearGELU(nn.Module):
    """``gelu(x W^T + b)`` with the exact (erf) GELU."""

    def __init__(self, in_features: int = 4096, out_features: int = 4096) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x))


def example_inputs() -> tuple[torch.Tensor]:
    """Return what one call gets: 4096 rows."""
    return (torch.randn(4096, 4096),)
