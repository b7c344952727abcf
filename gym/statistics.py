"""Intervals for paired measurements: the median of ratios, and what groups of pairs say about it (DESIGN 4.6).

Sequential means of baseline and candidate carry clock drift into the ratio; pairs taken next to each other, in random
order, do not. But pairs of one run share what the next run draws anew, above all where buffers lie: on an H200 the
percentile bootstrap over pairs covered the truth in 5 to 92 % of runs where it promised 95. So the stop-watch draws it
anew every few pairs, and the interval comes from the medians of these groups, by Student's distribution.

Without groups the bootstrap over pairs stands (92-95 % in simulation, notes/gym-engine.md section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drk.gym.schema import Interval, Latency

RESAMPLES = 400
CONFIDENCE = 0.95
LEAST_GROUPS = 4
"""Fewer groups than these say too little about each other."""


def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, within 0.3 % from three degrees of freedom on.

    By the expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).

    Raises:
        ValueError: fewer than three degrees.
    """
    if degrees < LEAST_GROUPS - 1:
        raise ValueError("the expansion needs three degrees of freedom")
    z = 1.959963984540054
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / float(degrees) ** power for power, term in enumerate(terms))


def _median_interval(values: np.ndarray, seed: int) -> tuple[float, float, float]:
    generator = np.random.default_rng(seed)
    draws = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[draws], axis=1)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(np.median(values)), float(low), float(high)


def _grouped_interval(values: np.ndarray, groups: np.ndarray) -> tuple[float, float, float] | None:
    """The median, and Student's interval around it from the groups' medians in logarithms; none for few groups."""
    sizes = {int(group): int((groups == group).sum()) for group in np.unique(groups)}
    whole = [group for group, size in sizes.items() if 2 * size >= max(sizes.values())]
    if len(whole) < LEAST_GROUPS:
        return None
    medians = np.array([np.median(np.log(values[groups == group])) for group in whole])
    half = student_quantile(len(whole) - 1) * float(medians.std(ddof=1)) / math.sqrt(len(whole))
    middle = float(np.median(values))
    return middle, middle * math.exp(-half), middle * math.exp(half)


def ratio_interval(
    baseline: Sequence[float], candidate: Sequence[float], groups: Sequence[int] | None = None, *, seed: int = 0
) -> Interval:
    """Return the speed-up of ``candidate`` over ``baseline`` from times measured in pairs.

    Args:
        baseline: times of the baseline, one per pair, in any unit.
        candidate: times of the candidate, same order and unit.
        groups: which group each pair belongs to; a group shares what the next one draws anew.
        seed: of the bootstrap's resampling.

    Raises:
        ValueError: the lengths differ or are zero, or a time is not positive.
    """
    top, bottom = np.asarray(baseline, dtype=float), np.asarray(candidate, dtype=float)
    if top.shape != bottom.shape or not top.size or (groups is not None and len(groups) != top.size):
        raise ValueError("pairs need as many baseline as candidate times, at least one")
    if (top <= 0).any() or (bottom <= 0).any():
        raise ValueError("times must be positive")
    ratios = top / bottom
    grouped = None if groups is None else _grouped_interval(ratios, np.asarray(groups))
    value, low, high = grouped or _median_interval(ratios, seed)
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
