"""Compares the decoding kernels, under Triton's interpreter, with torch; a process of its own, since that is a switch.

TRITON_INTERPRET=1 python decode_kernels_check.py
"""

from __future__ import annotations

import torch

from drk.training.decode_kernels import TritonOperations
from drk.training.decode_model import Place, TorchOperations


def check(heads: int, key_heads: int, size: int, *, norm: bool) -> None:
    torch.manual_seed(0)
    rows, context, width = 3, 160, heads * size
    positions = torch.tensor([0, 63, 130])
    mine, plain = TritonOperations(), TorchOperations()
    keys, values = (torch.randn(rows + 1, key_heads, context, size) for _ in range(2))
    angles = torch.randn(context, size // 2).repeat(1, 2)
    weights = [torch.randn(size) if norm else None for _ in range(2)]
    places = []
    for _ in range(2):  # each with a cache of its own
        cache = (keys.clone()[:rows], values.clone()[:rows])
        places.append(Place(positions, *cache, angles.cos(), angles.sin(), *weights, 1e-5, 0.3, 131))
    states = torch.randn(rows, heads + 2 * key_heads, size)
    turned = [ops.rotate(states, place) for ops, place in zip((mine, plain), places, strict=True)]
    close(*turned)
    for name in ("keys", "values"):
        close(getattr(places[0], name), getattr(places[1], name))
    close(mine.attend(turned[0], places[0]), plain.attend(turned[1], places[1]))
    x, delta, weight = torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)
    for one in (None, delta):
        for left, right in zip(mine.add_norm(x, one, weight, 1e-5), plain.add_norm(x, one, weight, 1e-5), strict=True):
            close(left, right)
    both = torch.randn(rows, 2200)
    close(mine.gated(both), plain.gated(both))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check(4, 2, 12, norm=True)
    check(2, 2, 64, norm=False)
    print("alike")
