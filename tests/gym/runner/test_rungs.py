"""Lower rungs: rounding is that of the formats, and only products are rounded."""

from __future__ import annotations

import torch

from drk.gym.runner.rungs import on_rung, round_operand


def test_tf32_keeps_ten_bits_to_nearest_even() -> None:
    one = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-12, float("inf"), float("nan")])
    rounded = round_operand(one, "tf32")
    assert rounded[:5].tolist() == [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, -1.0]
    assert rounded[5].isinf() and rounded[6].isnan()


def test_half_rungs_are_casts() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_operand(x, "bf16"), x.bfloat16().float())
    assert torch.equal(round_operand(x, "fp16"), x.half().float())
    assert round_operand(x.double(), "tf32").dtype == torch.float64


def test_products_are_rounded_and_sums_are_not() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(16, 64, generator=generator), torch.randn(8, 64, generator=generator)
    with on_rung("bf16"):
        product, total = torch.nn.functional.linear(x, w), x + 1
    assert torch.equal(product, x.bfloat16().float() @ w.bfloat16().float().T)
    assert torch.equal(total, x + 1)


def test_convolutions_only() -> None:
    generator = torch.Generator().manual_seed(2)
    x, w = torch.randn(1, 3, 8, 8, generator=generator), torch.randn(4, 3, 3, 3, generator=generator)
    with on_rung("bf16", convolutions_only=True):
        convolved, product = torch.nn.functional.conv2d(x, w), x @ x
    assert not torch.equal(convolved, torch.nn.functional.conv2d(x, w))
    assert torch.equal(product, x @ x)
