"""From a verdict to a reward: what training pays for (arXiv 2602.05885, section on rewards; DESIGN section 9).

With C = 1 for a candidate that is correct and not dishonest, s = min(speed-up, 3) over the named baseline and
PR = coverage (measured device-time share of its own kernels):

============  =====================================================================  ==========
form          reward                                                                 range
============  =====================================================================  ==========
``paper``     C + C s + C PR                                                         0 .. 5
``recipe``    half of it, as in the released code                                    0 .. 2.5
``weighted``  C/2 + [speed-up >= 1.01]/2 + PR/2                                      0 .. 1.5
``ladder``    -1 dishonest, unparsed or timed out; -0.5 not compiled; -0.3 wrong;    -1 .. 1
              correct: -0.1, 0.2, 0.4, 0.6, 0.8, 1 from 0, 1, 1.2, 1.5, 2, 3 times
============  =====================================================================  ==========

Wrong, dishonest or uncompiled is 0 in the first three. A verdict that is our fault, or that lacks the evidence, has no
reward at all: :class:`NotRewardable` is raised, and the turn must leave the batch. Speed is paid by the lower end of
its interval and on GPU evidence only. Honest limit: the first three pay for slow but correct kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from drk.gym.errors import GymError, HostError
from drk.gym.schema import RUNGS, Interval, Verdict

Form = Literal["paper", "recipe", "weighted", "ladder"]
Baseline = Literal["eager", "compile", "max_autotune", "cuda_graph", "headline"]

_LADDER = ((3.0, 1.0), (2.0, 0.8), (1.5, 0.6), (1.2, 0.4), (1.0, 0.2))
_MARGIN = 1.01
"""``weighted`` calls faster what is at least 1 % faster (released code)."""


class NotRewardable(HostError):
    """No reward can be derived from a verdict: retry it, or leave the turn out; it is never a 0.

    ``kind`` is ``host`` (status ``error``), ``evidence`` (not judged: compile-only, or numbers that are not finite) or
    ``baseline`` (the baseline asked for was not measured).
    """

    def __init__(self, message: str, *, kind: Literal["host", "evidence", "baseline"]) -> None:
        super().__init__(message)
        self.kind = kind


class RewardFormError(GymError, ValueError):
    """The form or baseline asked for does not exist."""


@dataclass(frozen=True)
class RewardOptions:
    """Choices beside the form; the defaults are the paper's, but for the interval's lower end.

    Attributes:
        cap: a speed-up counts up to this.
        floor: a speed-up below this counts as 0 (0.0 in the recipe, 1.0 in the released code's common default).
        bound: which end of the interval pays: ``low`` (claims must hold) or ``value`` (the median).
        untimed: an accepted GPU verdict without timing: ``zero`` speed (released code), or ``raise``.
        proxy: pay ``coverage_estimate`` where coverage was not measured (training without a GPU). A proxy: it rewards
            doing the work in own kernels, not speed.
    """

    cap: float = 3.0
    floor: float = 0.0
    bound: Literal["low", "value"] = "low"
    untimed: Literal["zero", "raise"] = "zero"
    proxy: bool = False


DEFAULT = RewardOptions()


@dataclass(frozen=True)
class RewardParts:
    """A reward and what it is made of, for logs: C (0 or 1), s (capped) and PR, before weights; ``total`` after."""

    correct: float
    speedup: float
    coverage: float
    total: float


def reward(
    verdict: Verdict, *, form: Form = "paper", baseline: Baseline = "eager", options: RewardOptions = DEFAULT
) -> float:
    """Return the reward of one turn.

    Args:
        verdict: the gym's evidence.
        form: see the module.
        baseline: whose time the speed-up is over; ``headline`` is the fastest one measured.
        options: caps, floors, and what to do about numbers that were not measured.

    Raises:
        NotRewardable: the fault is ours, or the evidence is lacking; never a 0.
        RewardFormError: no such form or baseline.
    """
    return reward_parts(verdict, form=form, baseline=baseline, options=options).total


def reward_parts(
    verdict: Verdict, *, form: Form = "paper", baseline: Baseline = "eager", options: RewardOptions = DEFAULT
) -> RewardParts:
    """Return the reward with its parts; arguments and errors are those of :func:`reward`."""
    if form not in get_args(Form):
        raise RewardFormError(f"unknown reward form {form!r}", help=f"one of {', '.join(get_args(Form))}")
    _check_rewardable(verdict)
    if not earned(verdict):
        return RewardParts(0.0, 0.0, 0.0, _failure_step(verdict) if form == "ladder" else 0.0)
    speed = _speedup(verdict, baseline, options)
    cover = _coverage(verdict, options)
    paid = 0.0 if speed < options.floor else min(speed, options.cap)
    if form == "ladder":
        total = next((step for least, step in _LADDER if speed >= least), -0.1)
    elif form == "weighted":
        total = 0.5 + 0.5 * (speed >= _MARGIN) + 0.5 * cover
    else:
        total = (1.0 + paid + cover) * (1.0 if form == "paper" else 0.5)
    return RewardParts(1.0, paid, cover, total)


def earned(verdict: Verdict) -> bool:
    """Whether the candidate is accepted, correct, and free of fraud: what anything is paid for."""
    return verdict.accepted and verdict.correct and not dishonest(verdict)


def dishonest(verdict: Verdict) -> bool:
    """Whether there is proof of fraud; false where honesty was not judged."""
    return verdict.honest is False or any(flag.severity == "fraud" for flag in verdict.flags)


def measured_speedup(
    verdict: Verdict, baseline: Baseline = "eager", *, bound: Literal["low", "value"] = "low"
) -> float | None:
    """Return the measured speed-up over ``baseline``, or None where the verdict has no GPU timing.

    Raises:
        NotRewardable: timing exists, but not over this baseline, or it is not finite.
        RewardFormError: no such baseline.
    """
    if baseline not in get_args(Baseline):
        raise RewardFormError(f"unknown baseline {baseline!r}", help=f"one of {', '.join(get_args(Baseline))}")
    if verdict.speedups is None or verdict.evidence != "gpu":
        return None
    name = verdict.headline if baseline == "headline" else baseline
    interval = getattr(verdict.speedups, name, None) if name is not None and name in get_args(Baseline) else None
    if not isinstance(interval, Interval):
        raise NotRewardable(f"the verdict has no speed-up over {name or baseline}", kind="baseline")
    value = interval.low if bound == "low" else interval.value
    if not math.isfinite(value) or value < 0:
        raise NotRewardable(f"the speed-up over {name} is {value}", kind="evidence")
    return value


def _check_rewardable(verdict: Verdict) -> None:
    if verdict.status == "error":
        cause = verdict.error.message if verdict.error else "no cause given"
        raise NotRewardable(f"a fault of the host is never rewarded: {cause}", kind="host")
    if verdict.evidence == "compile-only" and verdict.status != "failed":
        raise NotRewardable("the candidate was compiled but never run", kind="evidence")


def _speedup(verdict: Verdict, baseline: Baseline, options: RewardOptions) -> float:
    value = measured_speedup(verdict, baseline, bound=options.bound)
    if value is not None:
        return value
    if options.untimed == "raise" and verdict.evidence == "gpu":
        raise NotRewardable("the verdict has no timing", kind="evidence")
    return 0.0


def _coverage(verdict: Verdict, options: RewardOptions) -> float:
    value = verdict.coverage if verdict.evidence == "gpu" else None
    if value is None and options.proxy:
        value = verdict.coverage_estimate
    if value is None:
        return 0.0
    if not math.isfinite(value):
        raise NotRewardable(f"coverage is {value}", kind="evidence")
    return min(max(value, 0.0), 1.0)


def _failure_step(verdict: Verdict) -> float:
    """The ladder below success. A crash at run time stands with a wrong result: both compiled."""
    timed_out = verdict.error is not None and "timeout" in verdict.error.kind
    if dishonest(verdict) or timed_out or verdict.reached is None:
        return -1.0
    return -0.3 if RUNGS.index(verdict.reached) >= RUNGS.index("compiled") else -0.5
