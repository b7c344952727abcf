"""What an evaluation's samples amount to as answers of ``drk optimize``, and how sound the proposals were.

Fast@p looks at the fastest candidate over one baseline. An *answer* is what a user would be handed: the candidate whose
lower bound over the *fastest* baseline is best, and only where that bound is above 1 (``optimised``); else ``no-win``,
which leaves the user's module as it is and counts as 1 in the means here. Decided by the same code as in ``drk
optimize`` (:func:`drk.assistant.outcome.decide`).

Left out: intervals (those of Fast@p bound these too), and answers without a GPU beyond their counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from drk.assistant.episode import Episode, Turn, headline_interval
from drk.assistant.evaluation import SampleResult
from drk.assistant.outcome import Outcome, decide
from drk.assistant.search import Found
from drk.gym import metrics

_UNCOMPILED = ("parse", "load", "compile")
"""Stages at which a candidate that failed was not compiled yet."""
_STATUSES = ("optimised", "no-win", "failed", "unmeasured")
PACES = {"first_verdict_s": "first verdict", "first_win_s": "first win", "end_s": "end"}
"""Times from when a problem was begun, with their words for people."""


def answer_of(sample: SampleResult) -> Outcome:
    """Return what ``drk optimize`` would answer from what this sample found."""
    return decide(Found(Episode("", sample.turns), sample.ended))


def answers(samples: Sequence[SampleResult], *, measured: bool) -> dict[str, Any] | None:
    """Return counts of the answers by status, and the means of their speed-ups over the fastest baseline.

    Args:
        samples: those that were judged.
        measured: whether a GPU timed them; else the means are null.
    """
    if not samples:
        return None
    found = [answer_of(sample) for sample in samples]
    speeds = [_answered_speedup(one) for one in found]
    return {
        **{status: sum(one.status == status for one in found) for status in _STATUSES},
        "geometric_mean": round(metrics.geometric_mean(speeds), 6) if measured else None,
        "median": round(metrics.median(speeds), 6) if measured else None,
    }


def _answered_speedup(answer: Outcome) -> float:
    """Return the speed-up over the fastest baseline that a user gets: 1 where the answer is no win."""
    interval = None if answer.best is None else headline_interval(answer.best.verdict)
    return interval.value if answer.status == "optimised" and interval is not None else 1.0


def soundness(samples: Iterable[SampleResult]) -> dict[str, Any]:
    """Return the shares of proposals that parse, compile and are right (honest too): of all, and of the first ones."""
    turns = [turn for sample in samples for turn in sample.turns]
    first = [sample.turns[0] for sample in samples if sample.turns]
    return {"all": _shares(turns), "first": _shares(first)}


def _shares(turns: Sequence[Turn]) -> dict[str, Any] | None:
    if not turns:
        return None
    stages = [turn.verdict.error.stage if turn.verdict.error else "" for turn in turns]
    rows = {
        "parsed": sum(stage != "parse" for stage in stages),
        "compiled": sum(stage not in _UNCOMPILED for stage in stages),
        "right": sum(turn.verdict.accepted for turn in turns),
    }
    return {"candidates": len(turns), **{name: round(count / len(turns), 6) for name, count in rows.items()}}


def paces(samples: Iterable[SampleResult]) -> dict[str, Any]:
    """Return medians and maxima of the seconds from a problem's begin; null where nothing was judged now."""
    found = [sample.pace for sample in samples if sample.pace is not None]
    return {name: _spread([value for pace in found if (value := getattr(pace, name)) is not None]) for name in PACES}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": round(statistics.median(values), 3), "max": round(max(values), 3), "count": len(values)}


def answer_lines(data: dict[str, Any] | None, sound: dict[str, Any], times: dict[str, Any]) -> list[str]:
    """Return lines for people: answers, soundness of the proposals, times to a verdict."""
    lines = []
    if data is not None:
        counts = ", ".join(f"{count} {status}" for status, count in data.items() if status in _STATUSES and count)
        mean = data["geometric_mean"]
        over = f"; over the fastest baseline, 1 where there is no win: geometric mean {mean:.3f}" if mean else ""
        lines.append(f"answers: {counts}{over}" + (f", median {data['median']:.3f}" if mean else ""))
    for name, row in sound.items():
        if row is not None:
            shares = ", ".join(f"{word} {row[word]:.1%}" for word in ("parsed", "compiled", "right"))
            lines.append(f"{name} candidates ({row['candidates']}): {shares}")
    told = [f"{PACES[name]} {row['median']:.1f} s (max {row['max']:.1f} s)" for name, row in times.items() if row]
    return [*lines, f"median from a problem's begin: {', '.join(told)}"] if told else lines
