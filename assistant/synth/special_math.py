"""Rarer elementary functions that emitted kernels call, as source text: inverses, hyperbolic and error functions.

As in :mod:`drk.assistant.synth.device_math` all of it is built from ``tl`` operations that exist both compiled and in
Triton's interpreter. Results are float32, within two or three units in the last place; NaN stays NaN, and signs,
infinities and what is undefined come out as PyTorch has them. Polynomials are minimax ones: those of the arcus
functions are Cephes', those of the inverse error function (in w = -log(1 - x**2), as Giles' single precision ones) and
of the complementary one (a scaled ``erfcx``) were fitted for here.

Left out: Bessel functions; the gamma function's are in :mod:`drk.assistant.synth.gamma_math`.
"""

from __future__ import annotations

from collections.abc import Mapping

SPECIAL: Mapping[str, str] = {
    "hardshrink": '''
@triton.jit
def hardshrink(x, width):
    """0 within [-width, width], x elsewhere."""
    return tl.where((x >= -width) & (x <= width), 0.0, x)
''',
    "threshold": '''
@triton.jit
def threshold(x, edge, value):
    """value where x <= edge, x elsewhere."""
    return tl.where(x <= edge, value, x)
''',
    "replaced": '''
@triton.jit
def replaced(x, nan, positive, negative):
    """x with numbers in the place of NaN, infinity and its negative."""
    x = tl.where(x != x, nan, x)
    return tl.where(x == float("inf"), positive, tl.where(x == float("-inf"), negative, x))
''',
    "logit": '''
@triton.jit
def logit(x):
    """log(x / (1 - x))."""
    return tl.log(tl.div_rn(x, 1.0 - x))
''',
    "tan": '''
@triton.jit
def tan(x):
    """Tangent."""
    return tl.div_rn(tl.sin(x), tl.cos(x))
''',
    "sinc": '''
@triton.jit
def sinc(x):
    """sin(pi x) / (pi x), 1 at 0."""
    angle = x * 3.141592653589793
    return tl.where(x == 0.0, 1.0, tl.div_rn(tl.sin(angle), tl.where(x == 0.0, 1.0, angle)))
''',
    "heaviside": '''
@triton.jit
def heaviside(x, middle):
    """0 for x < 0 and for NaN, 1 for x > 0, middle at 0."""
    return tl.where(x == 0.0, middle, tl.where(x > 0.0, 1.0, 0.0))
''',
    "xlogy": '''
@triton.jit
def xlogy(x, y):
    """x log(y), 0 where x is; NaN where y is."""
    return tl.where((x == 0.0) & (y == y), 0.0, x * tl.log(y))
''',
    "xlog1py": '''
@triton.jit
def xlog1py(x, y):
    """x log(1 + y), 0 where x is; NaN where y is."""
    return tl.where((x == 0.0) & (y == y), 0.0, x * log1p(y))
''',
    "entropy_term": '''
@triton.jit
def entropy_term(x):
    """-x log(x), 0 at 0, -inf for x < 0."""
    return tl.where(x < 0.0, float("-inf"), tl.where(x == 0.0, 0.0, -x * tl.log(x)))
''',
    "mirrored": '''
@triton.jit
def mirrored(x, low, span):
    """x led back to between low and low + span, as by mirrors at both ends; 0 where there is nothing between."""
    far = tl.abs(x - low)
    turns = tl.floor(far / span)
    rest = far - turns * span
    back = tl.where(tl.floor(turns * 0.5) * 2.0 == turns, rest, span - rest) + low
    return tl.where(span == 0.0, 0.0, back)
''',
    "ordered_bits": '''
@triton.jit
def ordered_bits(x):
    """The bits of x as an integer that sorts as x does: zeros of both signs are equal, NaN is above all else."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(x != x, 2147483647, bits ^ ((bits >> 31) & 2147483647))
''',
    "from_ordered_bits": '''
@triton.jit
def from_ordered_bits(bits):
    """The number whose ordered_bits these are."""
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.float32, bitcast=True)
''',
    "log2_add_exp2": '''
@triton.jit
def log2_add_exp2(a, b):
    """log2(2**a + 2**b), without overflow; equal ones may be infinite, whose difference is no number."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    apart = log1p(tl.exp2(-tl.abs(a - b))) * 1.4426950408889634
    return tl.where(a == b, a + 1.0, top + apart)
''',
    "interpolated": '''
@triton.jit
def interpolated(a, b, weight):
    """a + weight (b - a), from b for weights of a half and more, as PyTorch has it."""
    return tl.where(tl.abs(weight) < 0.5, a + weight * (b - a), b - (b - a) * (1.0 - weight))
''',
    "hypotenuse": '''
@triton.jit
def hypotenuse(a, b):
    """sqrt(a**2 + b**2), scaled by a power of two where squares would leave the range; infinite if either is."""
    a, b = tl.abs(a), tl.abs(b)
    top = tl.maximum(a, b)
    scale = tl.where(top > 1.0e18, 5.421010862427522e-20, tl.where(top < 1.0e-18, 1.8446744073709552e19, 1.0))
    back = tl.where(top > 1.0e18, 1.8446744073709552e19, tl.where(top < 1.0e-18, 5.421010862427522e-20, 1.0))
    a_scaled, b_scaled = a * scale, b * scale
    length = tl.sqrt_rn(a_scaled * a_scaled + b_scaled * b_scaled) * back
    return tl.where((a == float("inf")) | (b == float("inf")), float("inf"), length)
''',
    "sinh": '''
@triton.jit
def sinh(x):
    """(e**x - e**-x) / 2, by way of e**|x| - 1; halves of the exponent where e**|x| would be too large."""
    size = tl.abs(x)
    e = expm1(tl.minimum(size, 80.0, propagate_nan=tl.PropagateNan.ALL))
    root = exp(0.5 * size)
    return with_sign(tl.where(size > 80.0, (0.5 * root) * root, 0.5 * (e + tl.div_rn(e, e + 1.0))), x)
''',
    "cosh": '''
@triton.jit
def cosh(x):
    """(e**x + e**-x) / 2; halves of the exponent where e**|x| would be too large."""
    size = tl.abs(x)
    e = exp(tl.minimum(size, 80.0, propagate_nan=tl.PropagateNan.ALL))
    root = exp(0.5 * size)
    return tl.where(size > 80.0, (0.5 * root) * root, 0.5 * e + tl.div_rn(0.5, e))
''',
    "asinh": '''
@triton.jit
def asinh(x):
    """log(x + sqrt(x**2 + 1)), odd and without cancellation near 0."""
    size = tl.abs(x)
    a = tl.minimum(size, 1.0e9, propagate_nan=tl.PropagateNan.ALL)
    near = log1p(a + tl.div_rn(a * a, 1.0 + tl.sqrt_rn(a * a + 1.0)))
    return with_sign(tl.where(size > 1.0e9, tl.log(size) + 0.6931471805599453, near), x)
''',
    "acosh": '''
@triton.jit
def acosh(x):
    """log(x + sqrt(x**2 - 1)); NaN below 1."""
    t = tl.minimum(x - 1.0, 1.0e9, propagate_nan=tl.PropagateNan.ALL)
    near = log1p(t + tl.sqrt_rn(t * (t + 2.0)))
    result = tl.where(x > 1.0e9, tl.log(x) + 0.6931471805599453, near)
    return tl.where(x < 1.0, float("nan"), result)
''',
    "atanh": '''
@triton.jit
def atanh(x):
    """log((1 + x) / (1 - x)) / 2; NaN beyond 1."""
    a = tl.abs(x)
    result = 0.5 * log1p(tl.div_rn(2.0 * a, 1.0 - a))
    return tl.where(a > 1.0, float("nan"), with_sign(result, x))
''',
    "atan": '''
@triton.jit
def atan(x):
    """Arcus tangent: a polynomial below tan(pi / 8), to which larger ones are brought by turns of pi / 4 and pi / 2."""
    a = tl.abs(x)
    large, middle = a > 2.414213562373095, a > 0.4142135623730950
    turned = tl.div_rn(tl.where(large, -1.0, a - 1.0), tl.where(large, a, a + 1.0))
    u = tl.where(middle, turned, a)
    base = tl.where(large, 1.5707963267948966, tl.where(middle, 0.7853981633974483, 0.0))
    z = u * u
    p = z * 8.05374449538e-2 - 1.38776856032e-1
    p = p * z + 1.99777106478e-1
    p = p * z - 3.33329491539e-1
    return tl.where(x != x, x, with_sign(base + (p * z * u + u), x))
''',
    "atan2": '''
@triton.jit
def atan2(y, x):
    """The angle of the point (x, y), in (-pi, pi]; signs of zeros count."""
    y, x = tl.broadcast(tl.cast(y, tl.float32), tl.cast(x, tl.float32))
    a, b = tl.abs(y), tl.abs(x)
    top = tl.maximum(a, b)
    ratio = tl.where(top == 0.0, 0.0, tl.div_rn(tl.minimum(a, b), tl.where(top == 0.0, 1.0, top)))
    ratio = tl.where((a == float("inf")) & (b == float("inf")), 1.0, ratio)
    angle = atan(ratio)
    angle = tl.where(a > b, 1.5707963267948966 - angle, angle)
    angle = tl.where(x.to(tl.int32, bitcast=True) < 0, 3.141592653589793 - angle, angle)
    return tl.where((x != x) | (y != y), float("nan"), with_sign(angle, y))
''',
    "asin_core": '''
@triton.jit
def asin_core(z, root):
    """asin(root) for root = sqrt(z) <= 1/2."""
    p = z * 4.2163199048e-2 + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    return p * z * root + root
''',
    "asin": '''
@triton.jit
def asin(x):
    """Arcus sine; above a half by way of sqrt((1 - x) / 2). NaN beyond 1."""
    a = tl.abs(x)
    upper = a > 0.5
    z = tl.where(upper, 0.5 * (1.0 - a), a * a)
    part = asin_core(z, tl.where(upper, tl.sqrt_rn(z), a))
    # pi / 2 less the part, pi / 2 as the sum of two numbers.
    result = tl.where(upper, 1.5707963705062866 - (2.0 * part + 4.371139000186241e-08), part)
    return tl.where(a > 1.0, float("nan"), tl.where(x != x, x, with_sign(result, x)))
''',
    "acos": '''
@triton.jit
def acos(x):
    """Arcus cosine, near -1 and 1 by way of sqrt((1 - |x|) / 2). NaN beyond 1."""
    a = tl.abs(x)
    outer = a > 0.5
    z = tl.where(outer, 0.5 * (1.0 - a), x * x)
    part = asin_core(z, tl.where(outer, tl.sqrt_rn(z), x))
    low = 3.1415927410125732 - (2.0 * part + 8.742278000372482e-08)
    result = tl.where(outer, tl.where(x < 0.0, low, 2.0 * part), 1.5707963705062866 - (part + 4.371139000186241e-08))
    return tl.where(a > 1.0, float("nan"), result)
''',
    "cubic_inner": '''
@triton.jit
def cubic_inner(x):
    """Weight of an element at a distance up to 1 in cubic interpolation with a = -0.75."""
    return (1.25 * x - 2.25) * x * x + 1.0
''',
    "cubic_outer": '''
@triton.jit
def cubic_outer(x):
    """Weight of an element at a distance from 1 to 2."""
    return ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0
''',
    "erfcx_scaled": '''
@triton.jit
def erfcx_scaled(x):
    """e**(x**2) erfc(x) (1 + 2 x) for x >= 0, a polynomial in (x - 2) / (x + 2)."""
    t = tl.div_rn(x - 2.0, x + 2.0)
    p = t * -1.05314663e-06 + 8.1794815e-05
    p = p * t + 0.000179641133
    p = p * t - 0.000396480185
    p = p * t - 0.00142973497
    p = p * t + 0.00124675156
    p = p * t + 0.00871167032
    p = p * t - 0.00802870469
    p = p * t - 0.0542180733
    p = p * t + 0.164050766
    p = p * t - 0.166030518
    p = p * t - 0.0927638117
    return p * t + 1.27697838
''',
    "erfc": '''
@triton.jit
def erfc(x):
    """1 - erf(x), with all its digits where that is small: e**-(x**2) by two exponents, of which one is exact."""
    a = tl.minimum(tl.abs(x), 12.0, propagate_nan=tl.PropagateNan.ALL)
    high = high_bits(a)
    power = exp(-high * high) * exp((high - a) * (high + a))
    tail = tl.div_rn(erfcx_scaled(a), 1.0 + 2.0 * a) * power
    return tl.where(x < 0.0, 2.0 - tail, tail)
''',
    "erfinv": '''
@triton.jit
def erfinv(x):
    """The y whose error function is x: x times a polynomial in w = -log(1 - x**2), or in sqrt(w) from w = 5 on."""
    a = tl.abs(x)
    w = tl.where(a < 0.5, -log1p(-a * a), -tl.log((1.0 - a) * (1.0 + a)))
    u = w - 2.5
    p = u * 1.32859863e-10 + 4.37030328e-10
    p = p * u - 1.10232286e-08
    p = p * u + 1.64572427e-08
    p = p * u + 4.7969894e-07
    p = p * u - 3.42601223e-06
    p = p * u - 4.99875999e-06
    p = p * u + 0.000218263558
    p = p * u - 0.00125270488
    p = p * u - 0.00417732464
    p = p * u + 0.246640276
    p = p * u + 1.50140935
    s = tl.sqrt_rn(tl.minimum(w, 100.0)) - 3.0
    q = s * -2.82248773e-05 + 0.000159709148
    q = q * s - 0.000279764533
    q = q * s - 0.000118935778
    q = q * s + 0.00147658405
    q = q * s - 0.0035675445
    q = q * s + 0.00568729534
    q = q * s - 0.00764270496
    q = q * s + 0.00944534202
    q = q * s + 1.00167524
    q = q * s + 2.8329768
    edge = tl.where(a == 1.0, with_sign(float("inf") + a, x), float("nan"))
    return tl.where(a < 1.0, x * tl.where(w < 5.0, p, q), edge)
''',
}
"""Source text of each device function by its name."""
