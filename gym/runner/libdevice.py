"""CUDA's libdevice in numpy and torch, by symbol: what Triton's interpreter needs for ``libdevice.tanh`` and the like.

``tl.extra.cuda.libdevice`` functions end in a symbol such as ``__nv_tanhf`` (float32) or ``__nv_tanh`` (float64). Here
:func:`call` runs the function of that symbol on numpy arrays of the operands' type. Results are correctly shaped and
typed; their last bits are numpy's, not libdevice's (which is within 1-4 ulp for most of them), so a verdict about
ulps is not to be drawn from them.

Source for names and meaning: NVIDIA's libdevice user guide. Left out (reported as unsupported): directed rounding,
saturating and packed integer intrinsics, Bessel functions of general order, ``modf``-like functions with pointers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Function = Callable[..., Any]


def _by_torch(function: Callable[..., torch.Tensor]) -> Function:
    def call_torch(*arrays: Array) -> Array:
        result: Array = function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()
        return result

    return call_torch


def _round_away(x: Array) -> Any:
    return np.trunc(
        x + np.copysign(np.asarray(0.49999997 if x.dtype == np.float32 else 0.49999999999999994, x.dtype), x)
    )


def _remainder(x: Array, y: Array) -> Any:
    return x - y * np.rint(x / y)


def _popcount(x: Array) -> Array:
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.dtype.itemsize)
    count: Array = np.unpackbits(octets, axis=-1).sum(axis=-1, dtype=np.int32)
    return count


def _leading_zeros(x: Array) -> Array:
    width = x.dtype.itemsize * 8
    value: Any = x.view(np.uint64 if width == 64 else np.uint32)
    for shift in (32, 16, 8, 4, 2, 1):
        if shift < width:
            value = value | (value >> value.dtype.type(shift))
    return np.int32(width) - _popcount(value)


_FLOAT: dict[str, Function] = {
    "abs": np.abs,
    "fabs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "copysign": np.copysign,
    "cos": np.cos,
    "cosh": np.cosh,
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "erf": _by_torch(torch.erf),
    "erfc": _by_torch(torch.erfc),
    "erfcinv": _by_torch(lambda x: torch.erfinv(1 - x)),
    "erfcx": _by_torch(torch.special.erfcx),
    "erfinv": _by_torch(torch.erfinv),
    "exp": np.exp,
    "exp10": lambda x: np.power(np.asarray(10, x.dtype), x),
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fdim": lambda x, y: np.maximum(x - y, 0),
    "floor": np.floor,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(z.dtype),
    "fmax": np.fmax,
    "fmin": np.fmin,
    "fmod": np.fmod,
    "hypot": np.hypot,
    "j0": _by_torch(torch.special.bessel_j0),
    "j1": _by_torch(torch.special.bessel_j1),
    "y0": _by_torch(torch.special.bessel_y0),
    "y1": _by_torch(torch.special.bessel_y1),
    "cyl_bessel_i0": _by_torch(torch.special.i0),
    "cyl_bessel_i1": _by_torch(torch.special.i1),
    "ldexp": np.ldexp,
    "lgamma": _by_torch(torch.lgamma),
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "nextafter": np.nextafter,
    "normcdf": _by_torch(torch.special.ndtr),
    "normcdfinv": _by_torch(torch.special.ndtri),
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(x.dtype)),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "remainder": _remainder,
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "rint": np.rint,
    "round": _round_away,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "scalbn": np.ldexp,
    "sin": np.sin,
    "sinh": np.sinh,
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)),
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "tgamma": lambda x: np.vectorize(_gamma, otypes=[x.dtype])(x),
    "trunc": np.trunc,
}
# One rounding mode only (to nearest), and the "fast" forms, which are the same function with fewer right bits.
_ALIASES = {
    **{f"fast_{name}": name for name in ("cos", "exp", "log", "log2", "log10", "pow", "sin", "tan", "exp10", "tanh")},
    "fast_fdivide": "div_rn",
    "frsqrt_rn": "rsqrt",
    "fma_rn": "fma",
    "fmaf_rn": "fma",
    "llrint": "rint",
    "llround": "round",
}
_ARITHMETIC: dict[str, Function] = {
    "add_rn": np.add,
    "sub_rn": np.subtract,
    "mul_rn": np.multiply,
    "div_rn": np.divide,
    "rcp_rn": lambda x: 1 / x,
    "sqrt_rn": np.sqrt,
}
# ``__nv_float2int_rz`` and the like: the result's type comes with the call.
_CONVERSION = re.compile(
    r"(?:float|double)2(?:int|uint|ll|ull)_(r[nzdu])|(?:int|uint|ll|ull|float|double)2(?:float|double)_rn"
)
_TO_INTEGER: dict[str | None, Function] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rd": np.floor,
    "ru": np.ceil,
    None: lambda x: x,
}
_EXACT: dict[str, Function] = {
    "__nv_popc": _popcount,
    "__nv_popcll": _popcount,
    "__nv_clz": _leading_zeros,
    "__nv_clzll": _leading_zeros,
    "__nv_abs": np.abs,
    "__nv_llabs": np.abs,
    "__nv_isinff": np.isinf,
    "__nv_isinfd": np.isinf,
    "__nv_isnanf": np.isnan,
    "__nv_isnand": np.isnan,
    "__nv_finitef": np.isfinite,
    "__nv_isfinited": np.isfinite,
    "__nv_signbitf": np.signbit,
    "__nv_signbitd": np.signbit,
    "__nv_float_as_int": lambda x: x.view(np.int32),
    "__nv_float_as_uint": lambda x: x.view(np.int32),
    "__nv_int_as_float": lambda x: x.view(np.float32),
    "__nv_uint_as_float": lambda x: x.view(np.float32),
    "__nv_double_as_longlong": lambda x: x.view(np.int64),
    "__nv_longlong_as_double": lambda x: x.view(np.float64),
    "__nv_ilogb": lambda x: np.frexp(x)[1] - 1,
    "__nv_ilogbf": lambda x: np.frexp(x)[1] - 1,
}


def _gamma(x: float) -> float:
    try:
        return math.gamma(x)
    except OverflowError:
        return math.inf
    except ValueError:
        return math.nan


def find(symbol: str) -> Function | None:
    """Return the function for a libdevice symbol (``__nv_tanhf``), or ``None`` when it is not stood in for."""
    if symbol in _EXACT:
        return _EXACT[symbol]
    stem = symbol.removeprefix("__nv_")
    conversion = _CONVERSION.fullmatch(stem)
    if conversion is not None:
        return _TO_INTEGER[conversion.group(1)]
    table = _FLOAT | _ARITHMETIC
    for name in (stem, stem.removesuffix("f"), _arithmetic_stem(stem)):
        function = table.get(_ALIASES.get(name, name))
        if function is not None:
            return function
    return None


def _arithmetic_stem(stem: str) -> str:
    """``fadd_rn`` (float32) and ``dadd_rn`` (float64) are both ``add_rn``."""
    return stem[1:] if stem[:1] in {"f", "d"} and stem.endswith("_rn") else stem


def call(symbol: str, arrays: list[Array], result_dtype: np.dtype[Any]) -> Array:
    """Run ``symbol`` on ``arrays`` and return an array of ``result_dtype``.

    Raises:
        KeyError: the symbol is not stood in for.
    """
    function = find(symbol)
    if function is None:
        raise KeyError(symbol)
    return np.asarray(function(*arrays)).astype(result_dtype, copy=False)
