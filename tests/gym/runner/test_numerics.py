from __future__ import annotations

import numpy as np
import pytest
import torch

from drk.gym.runner import numerics


def _torch_bits(values, dtype):
    kind = torch.int16 if dtype == torch.bfloat16 else torch.uint8
    return torch.from_numpy(values).to(dtype).view(kind).numpy()


def test_every_bfloat16_survives_a_round_trip():
    bits = np.arange(2**16, dtype=np.uint16)
    values = numerics.widen(bits, "bf16")
    finite = ~np.isnan(values)
    assert np.array_equal(numerics.narrow(values, "bf16")[finite], bits[finite])
    assert np.isnan(numerics.widen(numerics.narrow(values[~finite], "bf16"), "bf16")).all()


def test_bfloat16_rounds_to_nearest_even_as_torch_does():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    ties = (np.arange(2**15, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    for array in (values, ties[~np.isnan(ties)]):
        assert np.array_equal(numerics.narrow(array, "bf16").view(np.int16), _torch_bits(array, torch.bfloat16))


@pytest.mark.parametrize(("name", "dtype"), [("fp8e4nv", torch.float8_e4m3fn), ("fp8e5", torch.float8_e5m2)])
def test_every_float8_survives_a_round_trip(name, dtype):
    bits = np.arange(256, dtype=np.uint8)
    values = numerics.widen(bits, name)
    finite = np.isfinite(values)
    assert np.array_equal(numerics.narrow(values, name)[finite], bits[finite])
    top = np.array([np.inf, -np.inf, 1e30], dtype=np.float32)
    limit = torch.finfo(dtype).max
    assert numerics.widen(numerics.narrow(top, name), name).tolist() == [limit, -limit, limit]
    assert np.isnan(numerics.widen(numerics.narrow(np.array([np.nan], np.float32), name), name)).all()


def test_shapes_and_strides_do_not_matter():
    values = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32).T
    for name in sorted(numerics.NARROW_FORMATS):
        bits = numerics.narrow(values, name)
        assert bits.shape == values.shape
        assert np.array_equal(numerics.widen(bits[::2], name), numerics.widen(bits, name)[::2])


def test_tf32_keeps_ten_bits_and_drops_the_rest():
    step = 2.0**-10
    values = np.array([1 + step, 1 + step * 1.9, 1 + step / 4, -(1 + step * 1.5), np.inf, np.nan], dtype=np.float32)
    truncated = numerics.truncate_to_tf32(values)
    assert truncated[:5].tolist() == [1 + step, 1 + step, 1.0, -(1 + step), np.inf]
    assert np.isnan(truncated[5])


def test_tf32_error_of_a_product_is_the_one_measured_on_a_gpu():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 512)).astype(np.float32) for _ in range(2))
    truth = a.astype(np.float64) @ b.astype(np.float64)
    got = numerics.truncate_to_tf32(a).astype(np.float64) @ numerics.truncate_to_tf32(b).astype(np.float64)
    error = np.linalg.norm(got - truth) / np.linalg.norm(truth)
    assert 6.5e-4 < error < 9e-4
