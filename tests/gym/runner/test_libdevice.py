from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import triton

from drk.gym.runner import libdevice

SYMBOLS = re.findall(r'\("(__nv_\w+)"', (Path(triton.__file__).parent / "language/extra/cuda/libdevice.py").read_text())


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("tanh", math.tanh),
        ("erf", math.erf),
        ("erfc", math.erfc),
        ("exp", math.exp),
        ("exp2", lambda x: 2**x),
        ("exp10", lambda x: 10**x),
        ("expm1", math.expm1),
        ("log", math.log),
        ("log1p", math.log1p),
        ("log2", math.log2),
        ("log10", math.log10),
        ("rsqrt", lambda x: 1 / math.sqrt(x)),
        ("sqrt", math.sqrt),
        ("cbrt", lambda x: x ** (1 / 3)),
        ("sin", math.sin),
        ("sinpi", lambda x: math.sin(math.pi * x)),
        ("cospi", lambda x: math.cos(math.pi * x)),
        ("asinh", math.asinh),
        ("lgamma", math.lgamma),
        ("tgamma", math.gamma),
        ("normcdf", lambda x: 0.5 * math.erfc(-x / math.sqrt(2))),
        ("floor", math.floor),
        ("trunc", math.trunc),
        ("rint", round),
    ],
)
@pytest.mark.parametrize(("suffix", "dtype", "tolerance"), [("f", np.float32, 3e-6), ("", np.float64, 1e-13)])
def test_values(name, function, suffix, dtype, tolerance):
    x = np.linspace(0.05, 3.3, 64).astype(dtype)
    got = libdevice.call(f"__nv_{name}{suffix}", [x], np.dtype(dtype))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, [function(float(v)) for v in x], rtol=tolerance, atol=tolerance)


def test_rounding_halves():
    x = np.array([-2.5, -0.5, 0.5, 1.5, 2.5, 0.49999997], dtype=np.float32)
    call = libdevice.call
    assert call("__nv_roundf", [x], x.dtype).tolist() == [-3.0, -1.0, 1.0, 2.0, 3.0, 0.0]
    assert call("__nv_rintf", [x], x.dtype).tolist() == [-2.0, 0.0, 0.0, 2.0, 2.0, 0.0]
    assert call("__nv_float2int_rz", [x], np.dtype(np.int32)).tolist() == [-2, 0, 0, 1, 2, 0]
    assert call("__nv_float2int_rn", [x], np.dtype(np.int32)).tolist() == [-2, 0, 0, 2, 2, 0]
    assert call("__nv_float2int_ru", [x], np.dtype(np.int32)).tolist() == [-2, 0, 1, 2, 3, 1]


@pytest.mark.parametrize(("dtype", "suffix"), [(np.int32, ""), (np.int64, "ll")])
def test_bits(dtype, suffix):
    width = np.dtype(dtype).itemsize * 8
    x = np.array([0, 1, 2, 255, 2**30, -1], dtype=dtype)
    counts = libdevice.call(f"__nv_popc{suffix}", [x], np.dtype(np.int32))
    zeros = libdevice.call(f"__nv_clz{suffix}", [x], np.dtype(np.int32))
    assert counts.tolist() == [0, 1, 1, 8, 1, width]
    assert zeros.tolist() == [width, width - 1, width - 2, width - 8, width - 31, 0]


def test_two_operands_and_fast_forms():
    x, y = np.array([2.0, -3.5], np.float32), np.array([3.0, 2.0], np.float32)
    f32 = np.dtype(np.float32)
    assert libdevice.call("__nv_powf", [x, y], f32).tolist() == [8.0, 12.25]
    assert libdevice.call("__nv_fmodf", [x, y], f32).tolist() == [2.0, -1.5]
    assert libdevice.call("__nv_copysignf", [y, x], f32).tolist() == [3.0, -2.0]
    assert libdevice.call("__nv_fadd_rn", [x, y], f32).tolist() == [5.0, -1.5]
    assert libdevice.call("__nv_fast_fdividef", [x, y], f32).tolist() == [np.float32(2 / 3), -1.75]
    assert libdevice.call("__nv_fmaf", [x, y, y], f32).tolist() == [9.0, -5.0]


def test_what_is_missing_is_said():
    assert libdevice.find("__nv_fmul_rd") is None
    with pytest.raises(KeyError, match="__nv_jn"):
        libdevice.call("__nv_jn", [], np.dtype(np.float64))


def test_all_common_functions_of_the_installed_triton_are_covered():
    missing = {symbol for symbol in SYMBOLS if libdevice.find(symbol) is None}
    directed = {symbol for symbol in missing if re.search(r"_r[zdu]$", symbol)}
    assert len(SYMBOLS) > 250
    assert len(missing - directed) < 45
