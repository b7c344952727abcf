"""Rounding, remainders and sign bits as source text of device functions.

Built from ``tl`` operations that exist both compiled and in Triton's interpreter, as in
:mod:`drk.assistant.synth.device_math`. Remainders of floats are exact, as C's and Python's are.

Left out: divisors below float32's normal range, whose remainders may be inexact.
"""

from __future__ import annotations

from collections.abc import Mapping

ROUNDING: Mapping[str, str] = {
    "with_sign": '''
@triton.jit
def with_sign(x, y):
    """|x| with the sign bit of y."""
    negative = tl.cast(y, tl.float32).to(tl.int32, bitcast=True) < 0
    return tl.where(negative, -tl.abs(x), tl.abs(x))
''',
    "rounded": '''
@triton.jit
def rounded(x):
    """The nearest integer, of two equally near the even one: adding 2**23 leaves no place for fractions."""
    size = tl.abs(x)
    return tl.where(size < 8388608.0, with_sign((size + 8388608.0) - 8388608.0, x), x)
''',
    "truncated": '''
@triton.jit
def truncated(x):
    """x without its fraction."""
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
''',
    "fraction": '''
@triton.jit
def fraction(x):
    """x less its integer part."""
    return x - truncated(x)
''',
    "has_sign": '''
@triton.jit
def has_sign(x):
    """Whether x has its sign bit set, as -0 has."""
    return x.to(tl.int32, bitcast=True) < 0
''',
    "larger_number": '''
@triton.jit
def larger_number(a, b):
    """The larger one; the other one where one is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))
''',
    "smaller_number": '''
@triton.jit
def smaller_number(a, b):
    """The smaller one; the other one where one is NaN."""
    return tl.where(a != a, b, tl.where(b != b, a, tl.minimum(a, b)))
''',
    "is_nan": '''
@triton.jit
def is_nan(x):
    """Whether x is no number."""
    return x != x
''',
    "product_rest": '''
@triton.jit
def product_rest(a, b, product):
    """a * b - product, exactly: both factors in two parts of 12 bits."""
    a_high, b_high = high_bits(a), high_bits(b)
    a_low, b_low = a - a_high, b - b_high
    return (((a_high * b_high - product) + a_high * b_low) + a_low * b_high) + a_low * b_low
''',
    "mod_step": '''
@triton.jit
def mod_step(rest, width):
    """rest less a multiple of width, both positive and finite; below 2**21 widths nothing is left but the remainder."""
    powers = (rest.to(tl.int32, bitcast=True) >> 23) - (width.to(tl.int32, bitcast=True) >> 23) - 21
    powers = tl.maximum(powers, 0)
    half = powers >> 1  # the power of two as two factors: it may be too large for one
    scaled = width * ((half + 127) << 23).to(tl.float32, bitcast=True)
    scaled = scaled * ((powers - half + 127) << 23).to(tl.float32, bitcast=True)
    count = tl.floor(tl.div_rn(rest, scaled))
    product = count * scaled
    left = (rest - product) - product_rest(count, scaled, product)
    left = tl.where(left < 0.0, left + scaled, left)
    return tl.where(left >= scaled, left - scaled, left)
''',
    "float_mod": '''
@triton.jit
def float_mod(x, y):
    """x - trunc(x / y) y with the sign of x, exact; only quotients above 2**21 take more than one step."""
    x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))
    size, width = tl.abs(x), tl.abs(y)
    defined = (size < float("inf")) & (width > 0.0)
    divisible = defined & (size >= width)
    step = tl.where(divisible, width, 1.0)
    rest = mod_step(tl.where(divisible, size, 1.0), step)
    while tl.max((rest >= step).to(tl.int32)) > 0:
        rest = tl.where(rest >= step, mod_step(rest, step), rest)
    return tl.where(defined, with_sign(tl.where(divisible, rest, size), x), float("nan"))
''',
    "floor_mod": '''
@triton.jit
def floor_mod(x, y):
    """Python's x % y: what is left has the sign of y."""
    rest = float_mod(x, y)
    return tl.where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), rest + y, rest)
''',
    "floor_divided": '''
@triton.jit
def floor_divided(x, y):
    """Python's x // y: the quotient of what is left when the remainder is taken off; x / y where y is 0."""
    quotient = tl.div_rn(x, y)
    rest = float_mod(x, y)
    exact = tl.div_rn(x - rest, y)
    exact = tl.where((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), exact - 1.0, exact)
    near = tl.floor(exact)
    near = tl.where(exact - near > 0.5, near + 1.0, near)
    return tl.where(y == 0.0, quotient, tl.where(exact == 0.0, with_sign(exact, quotient), near))
''',
    "whole_mod": '''
@triton.jit
def whole_mod(a, b):
    """Python's a % b of integers; 0 where b is 0."""
    b = b + a * 0  # as many as a
    divisor = tl.where(b == 0, 1, b)
    rest = a - a // divisor * divisor
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
''',
    "whole_divided": '''
@triton.jit
def whole_divided(a, b):
    """Python's a // b of integers; a where b is 0."""
    b = b + a * 0  # as many as a
    divisor = tl.where(b == 0, 1, b)
    count = a // divisor
    rest = a - count * divisor
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), count - 1, count)
''',
}
"""Source text of each device function by its name."""
