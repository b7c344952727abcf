"""Small device functions that emitted kernels call: activations and accurate elementary functions, as source text.

Triton's ``tl.exp`` is the hardware's ``ex2.approx`` after one rounded multiplication, so its relative error grows with
the argument; the gym compares errors with PyTorch's own, so kernels split the argument first. That is left out where
the error cannot show: in a softmax and in results of 16 bits (``exp_below``, ``short_...``). Kernels are bound by
instructions, no longer by memory, from some 25 for each float32 on.
``tl.log``, ``tl.erf``, ``tl.sin`` and ``tl.cos`` are libdevice's accurate ones already. All of it is built from ``tl``
operations that exist both compiled and in Triton's interpreter; libdevice is not called by name, since the interpreter
has no results for it.

Left out: float64 variants (float64 graphs are not fused) and denormal results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from drk.assistant.synth.gamma_math import GAMMA
from drk.assistant.synth.rounding_math import ROUNDING
from drk.assistant.synth.special_math import SPECIAL

_TWO_POWERS = """\
    t = high_bits(x * 1.4426950408889634)
    r = (x - t * 0.693359375) + t * 2.12194440e-4
    p = r * 0.166666667 + 0.5
    p = p * r + 1.0
    return tl.exp2(t) * (p * r + 1.0)
"""

FUNCTIONS: Mapping[str, str] = {
    "reduced_expm1": '''
@triton.jit
def reduced_expm1(x):
    """(k, e**r - 1) with x = k log(2) + r and |r| <= log(2) / 2; log(2) is subtracted in two exact parts."""
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    r = (x - k * 0.693359375) + k * 2.12194440e-4
    p = r * 0.000198412698 + 0.00138888889
    p = p * r + 0.00833333333
    p = p * r + 0.0416666667
    p = p * r + 0.166666667
    p = p * r + 0.5
    return k, p * r * r + r
''',
    "exp": '''
@triton.jit
def exp(x):
    """e**x = 2**t e**r: t has the 12 leading bits of x / log(2), so that r = x - t log(2) is exact, and below 0.05."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, 89.0, propagate_nan=tl.PropagateNan.ALL)
'''
    + _TWO_POWERS,
    "exp_below": '''
@triton.jit
def exp_below(x):
    """e**min(x, 0), NaN for NaN, to 2**-24 of 1: what a softmax needs, whose largest weights have x near 0."""
    return tl.exp2(tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634)
''',
    "expm1": '''
@triton.jit
def expm1(x):
    """e**x - 1 = 2**k (e**r - 1) + (2**k - 1), without cancellation near 0."""
    k, p = reduced_expm1(x)
    half = tl.exp2(k - 1.0)
    difference = 2.0 * (half * p + (half - 0.5))
    return tl.where(x > 88.8, float("inf"), tl.where(x < -20.0, -1.0, difference))
''',
    "log1p": '''
@triton.jit
def log1p(x):
    """log(1 + x), corrected by what the rounding of 1 + x has lost."""
    u = 1.0 + x
    exact = (u == 1.0) | (u == float("inf"))
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1.0, u - 1.0)))
''',
    "exp_down": '''
@triton.jit
def exp_down(x):
    """exp(x) for x <= 0: e**x = 2**t e**r as there."""
    x = tl.maximum(x, -104.0, propagate_nan=tl.PropagateNan.ALL)
'''
    + _TWO_POWERS,
    "near_inverse": '''
@triton.jit
def near_inverse(x):
    """1 / x for 1 <= x <= 1e30: what the hardware's reciprocal root gives, and one step of Newton's."""
    root = tl.rsqrt(x)
    guess = root * root
    return guess * (2.0 - x * guess)
''',
    "log1p_below": '''
@triton.jit
def log1p_below(x):
    """log(1 + x) for 0 <= x <= 1, which is 2 atanh(z) with z = x / (2 + x) <= 1/3."""
    z = x * near_inverse(2.0 + x)
    s = z * z
    p = s * 0.26867549 + 0.28233956
    p = p * s + 0.40007671
    p = p * s + 0.66666640
    return z * (p * s + 2.0)
''',
    "tanh": '''
@triton.jit
def tanh(x):
    """Hyperbolic tangent: a polynomial near 0, else (1 - e) / (1 + e) with e = exp(-2 |x|)."""
    s = x * x
    p = 0.0157394409 * s - 0.0523025580
    p = p * s + 0.1331524700
    p = p * s - 0.3333276810
    small = x + x * s * p
    e = exp_down(-2.0 * tl.abs(x))
    large = (1.0 - e) * near_inverse(1.0 + e)
    return tl.where(tl.abs(x) < 0.55, small, tl.where(x < 0.0, -large, large))
''',
    "sigmoid": '''
@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by way of exp(-|x|), which other functions of x take as well."""
    e = exp_down(-tl.abs(x))
    r = near_inverse(1.0 + e)
    return tl.where(x < 0.0, e * r, r)
''',
    "log_sigmoid": '''
@triton.jit
def log_sigmoid(x):
    """log(sigmoid(x)) = min(x, 0) - log(1 + exp(-|x|))."""
    return tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - log1p_below(exp_down(-tl.abs(x)))
''',
    "silu": '''
@triton.jit
def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)
''',
    "short_exp": '''
@triton.jit
def short_exp(x):
    """e**x to |x| 2**-24 of itself: enough where x <= 0 and 1 is what counts, or where results have 16 bits."""
    return tl.exp2(x * 1.4426950408889634)
''',
    "short_sigmoid": '''
@triton.jit
def short_sigmoid(x):
    """1 / (1 + exp(-x)) to 2**-17, for results that are rounded to 16 bits."""
    root = tl.rsqrt(1.0 + short_exp(-x))
    return root * root
''',
    "short_silu": '''
@triton.jit
def short_silu(x):
    """x sigmoid(x) to 2**-17, for results that are rounded to 16 bits."""
    return x * short_sigmoid(x)
''',
    "short_tanh": '''
@triton.jit
def short_tanh(x):
    """1 - 2 / (1 + exp(2 x)), near 0 x - x**3 / 3: to 2**-16 of itself, for results that are rounded to 16 bits."""
    large = 1.0 - 2.0 * short_sigmoid(-2.0 * x)
    return tl.where(tl.abs(x) < 0.0625, x - x * x * (x * 0.333333333), large)
''',
    "gelu": '''
@triton.jit
def gelu(x):
    """x Phi(x), with the exact error function."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
''',
    "gelu_tanh": '''
@triton.jit
def gelu_tanh(x):
    """The tanh approximation of GELU: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x**3)))."""
    return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
''',
    "short_gelu_tanh": '''
@triton.jit
def short_gelu_tanh(x):
    """The tanh approximation of GELU, x sigmoid(2 y) y as there, for results that are rounded to 16 bits."""
    return x * short_sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
''',
    "relu": '''
@triton.jit
def relu(x):
    """max(x, 0); NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)
''',
    "clamp_min": '''
@triton.jit
def clamp_min(x, low):
    """max(x, low); NaN stays NaN."""
    return tl.where(x < low, low, x)
''',
    "clamp_max": '''
@triton.jit
def clamp_max(x, high):
    """min(x, high); NaN stays NaN."""
    return tl.where(x > high, high, x)
''',
    "leaky_relu": '''
@triton.jit
def leaky_relu(x, slope):
    """x where x > 0, slope x elsewhere."""
    return tl.where(x > 0.0, x, x * slope)
''',
    "elu": '''
@triton.jit
def elu(x, alpha, scale, input_scale):
    """scale x where x > 0, scale alpha (exp(input_scale x) - 1) elsewhere."""
    return tl.where(x > 0.0, x * scale, alpha * scale * expm1(x * input_scale))
''',
    "softplus": '''
@triton.jit
def softplus(x, beta, threshold):
    """log(1 + exp(beta x)) / beta; x itself where beta x > threshold."""
    scaled = x * beta
    above = tl.maximum(scaled, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(scaled > threshold, x, (above + log1p_below(exp_down(-tl.abs(scaled)))) / beta)
''',
    "mish": '''
@triton.jit
def mish(x):
    """x tanh(log(1 + e**x)), which is x n / (n + 2) with n = e**x (e**x + 2); x itself where e**x is large."""
    power = exp(tl.where(x > 20.0, 0.0, x))
    n = power * (power + 2.0)
    return tl.where(x > 20.0, x, x * (n * near_inverse(n + 2.0)))
''',
    "hardtanh": '''
@triton.jit
def hardtanh(x, low, high):
    """x limited to [low, high]; NaN stays NaN."""
    return clamp_max(clamp_min(x, low), high)
''',
    "hardsigmoid": '''
@triton.jit
def hardsigmoid(x):
    """clamp(x + 3, 0, 6) / 6."""
    return hardtanh(x + 3.0, 0.0, 6.0) * 0.16666666666666666
''',
    "softshrink": '''
@triton.jit
def softshrink(x, width):
    """x moved towards 0 by width, 0 within it."""
    return tl.where(x > width, x - width, tl.where(x < -width, x + width, x * 0.0))
''',
    "multiplied": '''
@triton.jit
def multiplied(a, b):
    """a times b: what a product reduction or scan combines by."""
    return a * b
''',
    "added": '''
@triton.jit
def added(a, b):
    """a plus b: what a sum's scan combines by."""
    return a + b
''',
    "larger": '''
@triton.jit
def larger(a, b):
    """The larger one, NaN where either is: what a running maximum combines by."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "smaller": '''
@triton.jit
def smaller(a, b):
    """The smaller one, NaN where either is: what a running minimum combines by."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
''',
    "log_add_exp": '''
@triton.jit
def log_add_exp(a, b):
    """log(e**a + e**b), without overflow; equal ones may be infinite, whose difference is no number."""
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(a == b, a + 0.6931471805599453, top + log1p(exp(-tl.abs(a - b))))
''',
    "high_bits": '''
@triton.jit
def high_bits(x):
    """x cut to its 12 leading bits, so that the product of two such numbers is exact."""
    return (x.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
''',
    "log2_parts": '''
@triton.jit
def log2_parts(x):
    """log2(x) for x >= 0 as (the 12 leading bits, the rest), good to about 2**-29; +-3e38 for infinity and 0."""
    tiny = x < 1.1754944e-38
    bits = tl.where(tiny, x * 16777216.0, x).to(tl.int32, bitcast=True)
    e = (bits - 0x3F3504F3) >> 23
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)  # sqrt(1/2) to sqrt(2)
    exponent = e.to(tl.float32) - tl.where(tiny, 24.0, 0.0)
    # log(m) = 2 atanh(z) with z = (m - 1) / (m + 1) in two parts.
    f = m - 1.0
    d = m + 1.0
    d_high = high_bits(d)
    inverse = 1.0 / d
    z_high = high_bits(f * inverse)
    z_rest = (((f - z_high * d_high) - z_high * (d - d_high)) - z_high * (m - (d - 1.0))) * inverse
    z = z_high + z_rest
    s = z * z
    p = s * 0.0769230769 + 0.0909090909
    p = p * s + 0.111111111
    p = p * s + 0.142857143
    p = p * s + 0.2
    p = p * s + 0.333333333
    top = z_high * 2.884765625  # the 12 leading bits of 2 / log(2)
    rest = z_rest * 2.88539008 + (z_high * 6.24456e-4 + z * 2.88539008 * (s * p))
    total = exponent + top
    high = high_bits(total + rest)
    rest = ((total - high) + (top - (total - exponent))) + rest
    return tl.where(x == 0.0, -3.0e38, tl.where(x == float("inf"), 3.0e38, high)), rest
''',
    "power": '''
@triton.jit
def power(x, y):
    """x**y as C and PyTorch define it: 1 where y is 0 or x is 1, NaN for negative x and an y that is no integer."""
    x, y = tl.broadcast(tl.cast(x, tl.float32), tl.cast(y, tl.float32))
    high, rest = log2_parts(tl.abs(x))
    size = tl.minimum(tl.maximum(tl.abs(y), 1.0e-30), 1.0e10)
    bounded = tl.where(y < 0.0, -size, size)
    y_high = high_bits(bounded)
    top = y_high * high
    low = (bounded - y_high) * high + bounded * rest
    near = (top + low) + 12582912.0  # the sum's nearest integer k stands in the last bits
    r = (top - (near - 12582912.0)) + low
    p = r * 1.5252734e-5 + 1.5403530e-4
    p = p * r + 1.33335581e-3
    p = p * r + 9.61812911e-3
    p = p * r + 5.55041087e-2
    p = p * r + 2.40226507e-1
    p = p * r + 6.93147181e-1
    bits = (p * r + 1.0).to(tl.int32, bitcast=True) + (near.to(tl.int32, bitcast=True) << 23)
    result = tl.where(top + low < -126.0, 0.0, bits.to(tl.float32, bitcast=True))
    result = tl.where(top + low >= 128.0, float("inf"), result)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    special = (x == 0.0) | (x == float("-inf"))
    negative = tl.where(odd, result * -1.0, tl.where(whole | special, result, float("nan")))
    result = tl.where(x.to(tl.int32, bitcast=True) < 0, negative, result)
    result = tl.where((x != x) | (y != y), float("nan"), result)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, result)
''',
    "sign": '''
@triton.jit
def sign(x):
    """-1, 0 or 1."""
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))
''',
    **ROUNDING,
    **SPECIAL,
    **GAMMA,
}
"""Source text of each device function by its name."""

_DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
_CALL = re.compile(r"(?<![\w.])([a-z_0-9]+)\(|, (multiplied|added|larger|smaller|log_add_exp)\b")


def closure(texts: Iterable[str]) -> list[str]:
    """Return the names of all device functions that ``texts`` call, directly or not, callees first."""
    found: list[str] = []
    visiting: set[str] = set()

    def visit(text: str) -> None:
        for called, passed in _CALL.findall(_DOCSTRING.sub("", text)):
            name = called or passed
            if name in FUNCTIONS and name not in found and name not in visiting:
                visiting.add(name)
                visit(FUNCTIONS[name])
                found.append(name)

    for text in texts:
        visit(text)
    return found
