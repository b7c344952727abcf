"""The logarithm of the gamma function and its derivative, as source text of device functions.

As in :mod:`drk.assistant.synth.device_math` they are built from ``tl`` operations that exist both compiled and in
Triton's interpreter. Near its zeros at 1 and 2 the logarithm is a polynomial times both distances (fitted for here in
float64); larger arguments walk down to it, from 8 on Stirling's series holds. The derivative walks up to its series, as
PyTorch's does. Negative arguments are reflected.

Honest limit: near the zeros between negative integers, where reflection cancels, errors are relative to its terms.
"""

from __future__ import annotations

from collections.abc import Mapping

GAMMA: Mapping[str, str] = {
    "log_gamma_above": '''
@triton.jit
def log_gamma_above(x):
    """log(Gamma(x)) for x > 0."""
    z = tl.where(x < 1.0, x + 1.0, x)
    product = x * 0.0 + 1.0
    for _ in tl.static_range(5):
        above = (z > 3.0) & (x < 8.0)
        z = tl.where(above, z - 1.0, z)
        product = tl.where(above, product * z, product)
    y = z - 2.0
    p = y * 1.93083982e-05 - 3.87340335e-05
    p = p * y + 2.02503454e-05
    p = p * y - 5.24198824e-05
    p = p * y + 1.95798484e-04
    p = p * y - 4.25570973e-04
    p = p * y + 9.10506771e-04
    p = p * y - 2.10206173e-03
    p = p * y + 4.99948042e-03
    p = p * y - 0.0123849751
    p = p * y + 0.0329649469
    p = p * y - 0.100317273
    p = p * y + 0.422784336
    near = y * (z - 1.0) * p + (tl.log(product) - tl.where(x < 1.0, tl.log(x), 0.0))
    inverse = 1.0 / x
    square = inverse * inverse
    series = inverse * (0.0833333333 - square * (0.00277777778 - square * 7.93650794e-4))
    far = ((x - 0.5) * tl.log(x) - x) + (0.918938533 + series)
    return tl.where(x < 8.0, near, far)
''',
    "log_gamma": '''
@triton.jit
def log_gamma(x):
    """log(abs(Gamma(x))); infinite at 0, at negative integers and at both infinities."""
    turned = x - tl.floor(x + 0.5)
    sine = tl.abs(tl.sin(turned * 3.14159265))
    above = log_gamma_above(tl.where(x > 0.0, x, 1.0 - x))
    result = tl.where(x > 0.0, above, 1.14472989 - tl.log(sine) - above)
    pole = (x <= 0.0) & (turned == 0.0)
    result = tl.where(pole | (tl.abs(x) == float("inf")), float("inf"), result)
    return tl.where(x != x, x, result)
''',
    "digamma": '''
@triton.jit
def digamma(x):
    """The derivative of log(Gamma(x)); NaN at negative integers, infinite at 0 with the sign opposite to 0's."""
    z = tl.where(x > 0.0, x, 1.0 - x)
    total = z * 0.0
    for _ in tl.static_range(10):
        low = z < 10.0
        total -= tl.where(low, 1.0 / z, 0.0)
        z = tl.where(low, z + 1.0, z)
    inverse = 1.0 / z
    square = inverse * inverse
    series = square * (0.0833333333 - square * (0.00833333333 - square * 0.00396825397))
    above = tl.log(z) - 0.5 * inverse - series + total
    turned = x - tl.floor(x + 0.5)
    cotangent = tl.cos(turned * 3.14159265) / tl.sin(turned * 3.14159265)
    below = tl.where(turned == 0.0, float("nan"), above - 3.14159265 * cotangent)
    result = tl.where(x > 0.0, above, below)
    result = tl.where(x == float("inf"), x, result)
    return tl.where(x == 0.0, -1.0 / x, result)
''',
}
"""Source text of each device function by its name."""
