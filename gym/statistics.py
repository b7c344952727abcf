"""Intervals for paired measurements: median of ratios with a bootstrap interval (DESIGN 4.6).

Sequential means of baseline and candidate carry clock drift into the ratio; pairs taken next to each other, in random
order, do not. The percentile bootstrap over pairs covered 92-95 % in simulation (notes/gym-engine.md section 5), and
84 to 92 % on an H200, where something stays as it is within a run and differs in the next (where buffers lie). The
interval is therefore stretched by :data:`BIRGE_RATIO`, as metrology does with results that scatter by more than their
uncertainties say (R. T. Birge, 1932). And two processes with the same code keep differing by a little, however often
they are timed: :func:`resolution`, which is added as independent errors are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drk.gym.schema import Interval, Latency

RESAMPLES = 400
CONFIDENCE = 0.95
BIRGE_RATIO = 1.3
"""Scatter of repeated measurements over what their pairs imply: 1.1 to 1.4 on an H200 (docs/results/aa-h200)."""
RESOLUTION = 0.004
"""At 0.1 ms and below: twice the scatter of medians of pairs of processes (docs/results/aa-h200)."""
RESOLUTION_AT_MS = 0.1


def resolution(latency_ms: float) -> float:
    """Return the relative difference that two processes with the same code may keep, for calls that take so long.

    Measured on an H200: medians within 0.4 % at 0.1 ms, 0.11 % at 5 ms; in between, the cube root joins the two.
    """
    return RESOLUTION * math.pow(min(1.0, RESOLUTION_AT_MS / latency_ms), 1 / 3)


def _median_interval(values: np.ndarray, seed: int) -> tuple[float, float, float]:
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    middle = float(np.median(values))
    return middle, middle * (float(low) / middle) ** BIRGE_RATIO, middle * (float(high) / middle) ** BIRGE_RATIO


def ratio_interval(
    baseline: Sequence[float], candidate: Sequence[float], *, floor: float = 0.0, seed: int = 0
) -> Interval:
    """Return the speed-up of ``candidate`` over ``baseline`` from times measured in pairs.

    Args:
        baseline: times of the baseline, one per pair, in any unit.
        candidate: times of the candidate, same order and unit.
        floor: the relative difference that counts for none, however many pairs there are.
        seed: of the bootstrap's resampling.

    Raises:
        ValueError: the lengths differ or are zero, or a time is not positive.
    """
    top, bottom = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if top.shape != bottom.shape or not top.size:
        raise ValueError("pairs need as many baseline as candidate times, at least one")
    if (top <= 0).any() or (bottom <= 0).any():
        raise ValueError("times must be positive")
    value, low, high = _median_interval(top / bottom, seed)
    low = value * math.exp(-math.hypot(math.log(value / low), floor))
    high = value * math.exp(math.hypot(math.log(high / value), floor))
    return Interval(value=value, low=low, high=high, pairs=int(top.size))


def latency(times_ms: Sequence[float], *, seed: int = 0) -> Latency:
    """Return median and interval of latencies in milliseconds.

    Raises:
        ValueError: there are none.
    """
    values = np.asarray(times_ms, dtype=float)
    if not values.size:
        raise ValueError("no times")
    return Latency(*_median_interval(values, seed))


def settled(interval: Interval, halfwidth: float) -> bool:
    """Whether the interval is within ``halfwidth`` (relative) of its median on both sides."""
    spread = max(interval.high - interval.value, interval.value - interval.low)
    return spread <= halfwidth * interval.value
