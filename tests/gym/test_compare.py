"""The comparison against float64 truth: what must pass, what must fail, on real operators."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from drk.gym.compare import block_size, compare_leaf, error_stats


def matmul_case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 512, generator=generator)
    w = torch.randn(128, 512, generator=generator)
    return x, w, x.double() @ w.double().T, x @ w.T


def passes(value: torch.Tensor, truth: torch.Tensor, reference: torch.Tensor) -> bool:
    return compare_leaf("out", value, truth, reference).passed


def test_reference_itself_passes() -> None:
    _, _, truth, reference = matmul_case()
    cell = compare_leaf("out", reference.clone(), truth, reference)
    assert cell.passed and cell.rms == cell.reference_rms and cell.rms_limit is not None


def test_other_summation_order_passes() -> None:
    x, w, truth, reference = matmul_case()
    split = x[:, :256] @ w[:, :256].T + x[:, 256:] @ w[:, 256:].T
    assert passes(split, truth, reference)


def rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Keep ``bits`` bits of mantissa (10 for TF32)."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp(torch.round(mantissa * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent)


@pytest.mark.parametrize("seed", range(5))
def test_lower_precision_fails(seed: int) -> None:
    x, w, truth, reference = matmul_case(seed)
    assert not passes(rounded(x, 10) @ rounded(w, 10).T, truth, reference)
    assert not passes((x.bfloat16().float() @ w.bfloat16().float().T), truth, reference)
    assert not passes(x.half().float() @ w.half().float().T, truth, reference)


@pytest.mark.parametrize(
    "mutate",
    [
        torch.zeros_like,
        lambda t: t.mean().expand_as(t).clone(),
        lambda t: t.roll(1, 0),
        lambda t: torch.cat([t[:-1], torch.zeros_like(t[-1:])]),
        lambda t: t * 1.001,
        lambda t: t + 1e-2,
        lambda t: t.index_fill(1, torch.tensor([5]), 0.0),
    ],
)
def test_mutants_fail(mutate) -> None:
    _, _, truth, reference = matmul_case()
    assert not passes(mutate(reference), truth, reference)


def test_one_wrong_element_in_a_million_fails() -> None:
    reference = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(1))
    value = reference.clone()
    value[777, 123] += 1e-3
    assert not passes(value, reference.double(), reference)


def test_small_rows_count_as_much_as_large_ones() -> None:
    truth = torch.randn(64, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    truth[10] *= 1e-3
    reference = truth.float()
    value = reference.clone()
    value[10] *= 1.01
    assert not passes(value, truth, reference)


def test_exact_reference_tolerates_rounding() -> None:
    reference = torch.relu(torch.randn(256, 256, generator=torch.Generator().manual_seed(3)))
    assert passes(reference * (1 + 2**-24), reference.double(), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(4)).to(dtype)
    truth = torch.softmax(x.double(), -1)
    reference = torch.softmax(x, -1)
    assert passes(torch.softmax(x.float(), -1).to(dtype), truth, reference)
    assert not passes((torch.softmax(x.float(), -1) * 1.02).to(dtype), truth, reference)


def test_nan_only_where_the_reference_has_it() -> None:
    reference = torch.tensor([1.0, math.nan, math.inf, -math.inf] * 16)
    truth = reference.double()
    assert passes(reference.clone(), truth, reference)
    stray = reference.clone()
    stray[0] = math.nan
    assert not passes(stray, truth, reference)
    missing = torch.nan_to_num(reference)
    assert not passes(missing, truth, reference)
    flipped = reference.clone()
    flipped[2] = -math.inf
    assert not passes(flipped, truth, reference)


def test_shape_and_dtype_come_first() -> None:
    _, _, truth, reference = matmul_case()
    assert "shape" in compare_leaf("out", reference[:1], truth, reference).reason
    assert "dtype" in compare_leaf("out", reference.half(), truth, reference).reason


def test_integers_are_exact_and_ties_may_follow_the_truth() -> None:
    reference, truth = torch.tensor([3, 5, 7]), torch.tensor([3, 6, 7])
    assert passes(torch.tensor([3, 6, 7]), truth, reference)
    assert not passes(torch.tensor([3, 4, 7]), truth, reference)


def test_paper_tolerance_is_loose() -> None:
    x, w, truth, reference = matmul_case()
    coarse = rounded(x, 10) @ rounded(w, 10).T
    assert compare_leaf("out", coarse / 30, truth / 30, reference / 30, paper=True).passed
    assert not compare_leaf("out", coarse / 30 + 1, truth / 30, reference / 30, paper=True).passed


def test_complex_and_empty() -> None:
    value = torch.randn(8, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(5))
    assert passes(value.clone(), value.to(torch.complex128), value)
    assert not passes(value * 1.01, value.to(torch.complex128), value)
    empty = torch.empty(0, 4)
    assert passes(empty, empty.double(), empty)


@pytest.mark.parametrize(
    ("shape", "block"), [((128, 1024), 1024), ((128, 10), 1280), ((5,), 5), ((), 1), ((4, 4, 4), 64)]
)
def test_blocks(shape: tuple[int, ...], block: int) -> None:
    assert block_size(torch.Size(shape)) == block


def test_stats_do_not_depend_on_slicing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, truth, reference = matmul_case()
    whole = error_stats(reference, truth)
    monkeypatch.setattr("drk.gym.compare.SLICE_ELEMENTS", 1000)
    parts = error_stats(reference, truth)
    assert parts.rms == pytest.approx(whole.rms) and parts.max == whole.max


def test_averages_of_coarse_products_may_err_by_the_products_unit():
    truth = torch.linspace(1.0, 2.0, 64, dtype=torch.float64)
    reference, truncated = truth.float(), (truth * (1 - 3.8e-4)).float()
    assert not compare_leaf("out", truncated, truth, reference).passed
    assert compare_leaf("out", truncated, truth, reference, own_unit=2.0**-11).passed
    assert not compare_leaf("out", (truth * (1 - 1.3e-3)).float(), truth, reference, own_unit=2.0**-11).passed


def test_truncated_products_pass_where_the_reference_rounds_them_and_coarser_ones_do_not():
    """What ``tl.dot`` does with float32 operands by default, beside a library that rounds to TF32."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))

    def product(change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return (change(a).double() @ change(b).double()).float()

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    truth = a.double() @ b.double()
    reference = product(lambda x: cut((x.view(torch.int32) + 0x1000).view(torch.float32)))
    assert compare_leaf("out", product(cut), truth, reference, own_unit=2.0**-11).passed
    assert not compare_leaf("out", product(lambda x: x.bfloat16().float()), truth, reference, own_unit=2.0**-11).passed
    assert not compare_leaf("out", product(cut), truth, (a @ b)).passed, "an exact reference asks for exact products"
