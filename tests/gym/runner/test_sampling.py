"""Rows and digests of large tensors: what they show, wherever it is."""

from __future__ import annotations

import pytest
import torch

from drk.gym.compare import compare_named
from drk.gym.runner.sampling import BLOCK, DIGEST, SHAPE, digest, fingerprint, shape_in, shrink

SAMPLE = {"seed": 0x1234_5678_9ABC_DEF0, "above": 10_000, "elements": 2_000}


def shown(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(shrink([("out", tensor)], SAMPLE))


def test_small_tensors_stay_whole() -> None:
    small = torch.randn(100, 100)
    assert shown(small)["out"] is small
    assert shrink([("out", torch.randn(200, 200))], None)[0][1].shape == (200, 200)


@pytest.mark.parametrize("shape", [(700, 64), (41_003,), (3, 5, 7, 11, 13, 3), (2, 30_000)])
def test_rows_and_shape(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    found = shown(tensor)
    assert shape_in(found, "out") == shape
    assert found["out"].numel() < tensor.numel()
    flat = tensor.flatten()
    assert found["out"][0, 0] == flat[0] and found["out"][-1, -1] >= flat[-BLOCK]
    again = shown(tensor.clone())
    assert all(torch.equal(found[name], again[name]) for name in found)
    other = dict(shrink([("out", tensor)], {**SAMPLE, "seed": 99}))
    assert not torch.equal(found["out" + DIGEST], other["out" + DIGEST])


def test_views_and_other_layouts_show_the_same() -> None:
    tensor = torch.randn(4, 30, 20, 20)
    last = tensor.contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(shown(tensor)[name], value) for name, value in shown(last).items())


def judged(value: torch.Tensor, truth: torch.Tensor, native: torch.Tensor) -> bool:
    mine, exact, own = shown(value), shown(truth), shown(native)
    return all(compare_named(name, name, mine, exact, own).passed for name in own)


def test_right_values_pass_and_a_single_wrong_tile_anywhere_does_not() -> None:
    truth = torch.randn(40, 32, 64, dtype=torch.float64)
    native = truth.float()
    assert judged(native, truth, native)
    assert judged((truth * (1 + 2**-24)).float(), truth, native), "round-off of its own"
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        wrong = native.clone()
        row = int(torch.randint(40 * 32, (1,), generator=generator))
        wrong.reshape(-1, 64)[row, :16] = 0.0
        assert not judged(wrong, truth, native)


def test_coarser_rounding_and_other_shapes_do_not_pass() -> None:
    truth = torch.randn(400, 64, dtype=torch.float64)
    native = truth.float()
    assert not judged(native.bfloat16().float(), truth, native)
    assert not judged(native.reshape(200, 128), truth, native)
    mine, exact, own = shown(native.reshape(800, 32)), shown(truth), shown(native)
    assert "(800, 32) instead of (400, 64)" in compare_named("c", "out", mine, exact, own).reason


def test_what_is_not_finite_is_compared_in_the_rows() -> None:
    truth = torch.randn(400, 64, dtype=torch.float64)
    truth[3] = float("-inf")
    native = truth.float()
    assert judged(native, truth, native)
    assert torch.isfinite(digest(native.flatten(), 1)).all()


def test_integers_have_rows_only() -> None:
    found = shown(torch.arange(50_000))
    assert set(found) == {"out", "out" + SHAPE}


def test_half_precision_keeps_its_own_floor() -> None:
    truth = torch.randn(400, 64, dtype=torch.float64).half().double()
    native = truth.half()
    near = torch.where(torch.rand(400, 64) > 0.2, native, (truth * (1 + 2**-11)).half())
    assert judged(near, truth, native)


def test_a_change_of_a_large_input_is_seen() -> None:
    tensor = torch.randn(300, 100)
    before = fingerprint(tensor, 1000)
    assert before.numel() < tensor.numel()
    assert torch.equal(before, fingerprint(tensor, 1000))
    tensor[200, 7] += 1.0
    assert not torch.equal(before, fingerprint(tensor, 1000))
