"""Figures of merit: Fast@p, its per-problem and best-of-history forms, intervals, geometric mean, hack rate.

One :class:`Outcome` is one turn of one sample of one problem. Fast@p is the share of outcomes that are correct, honest
and *at least* p times faster (KernelBench's own fast_p asks for *more than* p: ``strict=True``). Which outcomes are
looked at, and what the share is divided by, changes the number more than most methods do; hence both are explicit:
:func:`at_turn`, :func:`last_turn` and :func:`best_of_history` choose one outcome a sample, ``among`` the denominator,
and :func:`fast_at_p_of_k` the best of k samples a problem (pass@k of arXiv 2107.03374). None of these may be compared
with another.

Intervals resample *problems*, since samples of one problem are alike. Honest limits: the percentile bootstrap is too
narrow below some 30 problems and collapses at shares of 0 and 1, where :func:`wilson` still says something.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np

from drk.gym.errors import HostError
from drk.gym.reward import Baseline, dishonest, earned, measured_speedup
from drk.gym.schema import Verdict

Among = Literal["all", "correct"]
THRESHOLDS = (1.0, 1.2, 1.5, 2.0, 3.0)
"""The p at which the paper reports Fast@p."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Outcome:
    """One turn. ``correct`` says correct *and* honest; ``speedup`` is a ratio (None: not measured).

    ``turn`` starts at 1. ``hacked`` marks fraud, which is never correct.
    """

    problem: str
    sample: int
    turn: int
    correct: bool
    speedup: float | None = None
    hacked: bool = False

    def fast(self, p: float, *, strict: bool = False) -> bool:
        """Correct, and at least (``strict``: more than) ``p`` times faster than the baseline."""
        if not self.correct or self.hacked or self.speedup is None:
            return False
        return self.speedup > p if strict else self.speedup >= p


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval. ``count`` is the number of units that were resampled, or of trials."""

    value: float
    low: float
    high: float
    count: int
    level: float = 0.95


def outcome(
    verdict: Verdict,
    *,
    problem: str,
    sample: int = 0,
    turn: int = 1,
    baseline: Baseline = "eager",
    bound: Literal["low", "value"] = "value",
) -> Outcome:
    """Return the outcome that a verdict stands for. Published tables use the median, hence ``bound`` ``value``.

    Raises:
        HostError: the verdict is a fault of the host, which is no outcome: judge the candidate again.
        NotRewardable: timing exists, but not over ``baseline``.
    """
    if verdict.status == "error":
        raise HostError("a fault of the host is no outcome", help="judge the candidate again")
    hacked = dishonest(verdict)
    correct = earned(verdict)
    speed = measured_speedup(verdict, baseline, bound=bound) if correct else None
    return Outcome(problem, sample, turn, correct, speed, hacked)


# --- One outcome a sample ------------------------------------------------------------------------------------


def at_turn(outcomes: Iterable[Outcome], turn: int) -> list[Outcome]:
    """Return the outcomes of turn ``turn``. Samples that did not get there are absent: mildly optimistic late."""
    return [one for one in outcomes if one.turn == turn]


def last_turn(outcomes: Iterable[Outcome], turns: int | None = None) -> list[Outcome]:
    """Return each sample's last outcome, within its first ``turns`` turns if given."""
    return [max(turn_list, key=lambda one: one.turn) for turn_list in _samples(outcomes, turns).values()]


def best_of_history(outcomes: Iterable[Outcome], turns: int | None = None) -> list[Outcome]:
    """Return each sample's fastest correct outcome within its first ``turns`` turns (else its last one).

    The paper's best of history: best within a *sample*, then the mean over samples and problems.
    """
    return [max(turn_list, key=_merit) for turn_list in _samples(outcomes, turns).values()]


def _merit(one: Outcome) -> tuple[bool, float, int]:
    good = one.correct and not one.hacked
    return (good, (one.speedup or 0.0) if good else 0.0, one.turn)


def _samples(outcomes: Iterable[Outcome], turns: int | None) -> dict[tuple[str, int], list[Outcome]]:
    samples: dict[tuple[str, int], list[Outcome]] = {}
    for one in outcomes:
        if turns is None or one.turn <= turns:
            samples.setdefault((one.problem, one.sample), []).append(one)
    return samples


# --- Shares --------------------------------------------------------------------------------------------------


def fast_at_p(outcomes: Sequence[Outcome], p: float, *, among: Among = "all", strict: bool = False) -> float:
    """Return the share (0..1) of outcomes that are correct, honest and at least ``p`` times faster.

    Args:
        outcomes: one a sample (choose by :func:`last_turn` and its kin).
        p: the speed-up asked for.
        among: denominator: ``all`` (the paper's Fast@p) or only ``correct`` ones (0 when there is none).
        strict: more than ``p``, as in KernelBench.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("Fast@p of no outcomes")
    fast = sum(one.fast(p, strict=strict) for one in outcomes)
    total = len(outcomes) if among == "all" else sum(one.correct and not one.hacked for one in outcomes)
    return fast / total if total else 0.0


def correct_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the share (0..1) that is correct and honest.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("correct rate of no outcomes")
    return sum(one.correct and not one.hacked for one in outcomes) / len(outcomes)


def hack_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the share (0..1) with proof of fraud, among all outcomes.

    Raises:
        ValueError: no outcomes.
    """
    if not outcomes:
        raise ValueError("hack rate of no outcomes")
    return sum(one.hacked for one in outcomes) / len(outcomes)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of ``k`` samples passes, ``1 - C(n-c, k) / C(n, k)``.

    Raises:
        ValueError: not ``0 <= passed <= samples`` or not ``1 <= k <= samples``.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"need 0 <= passed <= samples and 1 <= k <= samples, got {samples}, {passed}, {k}")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def fast_at_p_of_k(outcomes: Sequence[Outcome], p: float, k: int, *, strict: bool = False) -> float:
    """Return the mean over problems of pass@k for "at least ``p`` times faster"; one outcome a sample.

    With ``k = 1`` and equal numbers of samples this is Fast@p; with more it may not be compared with it.

    Raises:
        ValueError: no outcomes, two of one sample, or a problem with fewer than ``k`` samples.
    """
    if not outcomes:
        raise ValueError("Fast@p of no outcomes")
    problems: dict[str, dict[int, bool]] = {}
    for one in outcomes:
        samples = problems.setdefault(one.problem, {})
        if one.sample in samples:
            raise ValueError(f"{one.problem}: two outcomes of sample {one.sample}; choose one a sample first")
        samples[one.sample] = one.fast(p, strict=strict)
    return statistics.fmean(pass_at_k(len(passed), sum(passed.values()), k) for passed in problems.values())


def improvement(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the shares of samples right at the ``first`` and ``last`` turn, ``improved`` and ``regressed`` between.

    Raises:
        ValueError: no outcomes.
    """
    samples = _samples(outcomes, None).values()
    if not samples:
        raise ValueError("improvement of no outcomes")
    ends = [(min(turns, key=lambda one: one.turn), max(turns, key=lambda one: one.turn)) for turns in samples]
    right = [(a.correct and not a.hacked, b.correct and not b.hacked) for a, b in ends]
    return {
        "first": sum(a for a, _ in right) / len(right),
        "last": sum(b for _, b in right) / len(right),
        "improved": sum(b and not a for a, b in right) / len(right),
        "regressed": sum(a and not b for a, b in right) / len(right),
    }


# --- Averages and intervals ----------------------------------------------------------------------------------


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean, the right average of speed-ups.

    Raises:
        ValueError: no ratios, or one that is not positive and finite.
    """
    if not ratios or not all(math.isfinite(ratio) and ratio > 0 for ratio in ratios):
        raise ValueError("a geometric mean needs ratios that are positive and finite")
    return math.exp(math.fsum(math.log(ratio) for ratio in ratios) / len(ratios))


def median(values: Sequence[float]) -> float:
    """Return the median (the mean of the middle two for an even number).

    Raises:
        ValueError: no values, or one is NaN.
    """
    if not values or any(math.isnan(value) for value in values):
        raise ValueError("a median needs values, none of them NaN")
    return float(statistics.median(values))


def bootstrap(
    items: Sequence[_Item],
    statistic: Callable[[list[_Item]], float],
    *,
    unit: Callable[[_Item], Hashable] | None = None,
    resamples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Return ``statistic(items)`` with its percentile bootstrap interval.

    Args:
        items: anything; the same seed gives the same interval.
        statistic: from a list of items to a number.
        unit: what is drawn together (``lambda one: one.problem``); None: each item alone.
        resamples: number of draws.
        level: coverage asked of the interval, 0..1.
        seed: of the draws.

    Raises:
        ValueError: no items, or ``level`` or ``resamples`` out of range.
    """
    if not items or not 0 < level < 1 or resamples < 1:
        raise ValueError("a bootstrap needs items, 0 < level < 1 and resamples >= 1")
    clusters: dict[Hashable, list[_Item]] = {}
    for index, item in enumerate(items):
        clusters.setdefault(index if unit is None else unit(item), []).append(item)
    groups = list(clusters.values())
    draws = np.random.default_rng(seed).integers(len(groups), size=(resamples, len(groups)))
    values = [statistic([item for group in draw for item in groups[group]]) for draw in draws.tolist()]
    tail = (1 - level) / 2
    low, high = np.quantile(values, [tail, 1 - tail]).tolist()
    return Estimate(float(statistic(list(items))), low, high, len(groups), level)


def fast_at_p_interval(
    outcomes: Sequence[Outcome], p: float, *, k: int | None = None, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Return Fast@p, or with ``k`` its best of k a problem, with a 95 % interval over problems.

    Raises:
        ValueError: as :func:`fast_at_p` and :func:`fast_at_p_of_k`.
    """
    fast: dict[str, list[Outcome]] = {}
    for one in outcomes:
        fast.setdefault(one.problem, []).append(one)
    if k is None:
        pairs = [(sum(one.fast(p) for one in group), len(group)) for group in fast.values()]
        estimate = bootstrap(pairs, _pooled_share, resamples=resamples, seed=seed) if pairs else None
    else:
        shares = [fast_at_p_of_k(group, p, k) for group in fast.values()]
        estimate = bootstrap(shares, statistics.fmean, resamples=resamples, seed=seed) if shares else None
    if estimate is None:
        raise ValueError("Fast@p of no outcomes")
    return replace(estimate, count=len(fast))


def _pooled_share(pairs: list[tuple[int, int]]) -> float:
    return sum(hit for hit, _ in pairs) / sum(total for _, total in pairs)


def wilson(successes: int, trials: int, *, level: float = 0.95) -> Estimate:
    """Return a share with Wilson's score interval: sound for few trials and at 0 and 1, but it presumes independence.

    Raises:
        ValueError: not ``0 <= successes <= trials``, no trials, or ``level`` out of range.
    """
    if trials < 1 or not 0 <= successes <= trials or not 0 < level < 1:
        raise ValueError(f"need 0 <= successes <= trials, trials >= 1, got {successes} of {trials} at level {level}")
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    share, shrink = successes / trials, 1 + z * z / trials
    middle = (share + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / shrink
    # At the ends the formula gives 0 and 1 but for rounding.
    low = middle - half if successes > 0 else 0.0
    high = middle + half if successes < trials else 1.0
    return Estimate(share, low, high, trials, level)
