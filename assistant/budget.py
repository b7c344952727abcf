"""Hard limits of a run, and what it spent: turns, samples, wall time, money, tokens, GPU seconds.

Money is counted in US dollars from the calls' token counts. A price that nobody knows makes the cost *unknown*: it is
null, never 0, and the calls that it concerns are counted. A limit on money is therefore refused where no price is known
(:func:`drk.assistant.llm.prices.require_price`).

GPU seconds are the seconds for which judging held a GPU. What other processes do on it, and the proposer's own GPU, are
left out. Limits are checked before a step begins; :class:`Reservations` keeps calls in flight from overshooting the
limit on money together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from drk.assistant.episode import Turn, is_usable
from drk.gym.schema import Verdict

_NOT_ITS_OWN = frozenset(("total", "reference", "baseline"))
"""Entries of a verdict's timings that are no stage of the candidate's own."""


class BudgetSpent(Exception):
    """A proposer may not make another call: the text says which limit it would break."""


@dataclass(frozen=True)
class Budget:
    """Hard limits: steps, candidates in each step, wall-clock seconds, dollars, GPU seconds; null is no limit.

    ``patience`` ends the search of an ordered proposer on a GPU after so many steps without a better candidate.
    """

    turns: int = 4
    samples: int = 4
    max_time_s: float = 600.0
    max_cost_usd: float | None = None
    max_gpu_s: float | None = None
    patience: int | None = None


@dataclass(frozen=True)
class Spending:
    """What was spent. ``cost_usd`` covers the priced calls only; see :attr:`cost_known`.

    ``lost_calls`` were begun and never answered (a killed process): whether they were paid, nobody can say.
    ``no_candidate`` counts answers that held none.
    """

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    unpriced_calls: int = 0
    lost_calls: int = 0
    no_candidate: int = 0
    gpu_s: float = 0.0

    def __add__(self, other: Spending) -> Spending:
        pairs = ((getattr(self, name), getattr(other, name)) for name in self.__dataclass_fields__)
        return Spending(*(one + two for one, two in pairs))

    @property
    def cost_known(self) -> bool:
        """Whether every call had a price."""
        return self.unpriced_calls == 0

    def to_json(self, wins: int) -> dict[str, Any]:
        """Return the public form; figures for each accepted win are null without a win, money where it is unknown."""
        cost = round(self.cost_usd, 6) if self.cost_known else None
        return {
            "calls": self.calls,
            "lost_calls": self.lost_calls,
            "no_candidate": self.no_candidate,
            "no_candidate_rate": round(self.no_candidate / self.calls, 4) if self.calls else None,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost_usd": cost,
            "gpu_s": round(self.gpu_s, 3),
            "wins": wins,
            "cost_usd_per_win": round(cost / wins, 6) if cost is not None and wins else None,
            "gpu_s_per_win": round(self.gpu_s / wins, 3) if wins else None,
        }


def gpu_seconds(turns: Iterable[Turn]) -> float:
    """Return the seconds that judging these turns held a GPU: the gym's own count where it has one.

    A turn's seconds also hold its wait for a free place; a verdict from the cache took none.
    """
    return math.fsum(worked_s(turn.verdict, turn.seconds) for turn in turns if _on_gpu(turn))


def worked_s(verdict: Verdict, seconds: float) -> float:
    """Return what judging took of ``seconds`` without waits: for a free place, the GPU, the reference, its baselines.

    The gym's own count where it has one: the sum of its stages, else its total.
    """
    timings = verdict.timings_s
    stages = [seconds for name, seconds in timings.items() if name not in _NOT_ITS_OWN]
    return min(seconds, timings.get("total", seconds), math.fsum(stages) if stages else seconds)


def _on_gpu(turn: Turn) -> bool:
    return turn.verdict.evidence == "gpu"


def accepted_wins(turns: Iterable[Turn]) -> int:
    """Return how many turns were accepted."""
    return sum(is_usable(turn.verdict) for turn in turns)


def spent_reason(budget: Budget, spending: Spending) -> str:
    """Say which limit on money or GPU seconds is reached, or return an empty string."""
    if budget.max_cost_usd is not None and spending.cost_usd >= budget.max_cost_usd:
        return f"the budget of {budget.max_cost_usd:g} dollars is spent"
    if budget.max_gpu_s is not None and spending.gpu_s >= budget.max_gpu_s:
        return f"the budget of {budget.max_gpu_s:g} GPU seconds is spent"
    return ""


def spending_line(figures: dict[str, Any]) -> str:
    """Return one line for people from :meth:`Spending.to_json`."""
    cost = "cost unknown" if figures["cost_usd"] is None else f"{figures['cost_usd']:.4f} dollars"
    parts = [
        f"{figures['calls']} model call{'' if figures['calls'] == 1 else 's'}",
        f"{figures['prompt_tokens']} + {figures['completion_tokens']} tokens",
        cost,
    ]
    if figures["cost_usd_per_win"] is not None:
        parts.append(f"{figures['cost_usd_per_win']:.4f} dollars for each accepted candidate")
    if figures["gpu_s"]:
        parts.append(f"{figures['gpu_s']:.1f} GPU s")
    if figures["no_candidate"]:
        parts.append(f"{figures['no_candidate_rate']:.0%} of the answers held no candidate")
    if figures["lost_calls"]:
        parts.append(f"{figures['lost_calls']} begun and never answered")
    return ", ".join(parts)


class Reservations:
    """Money set aside for calls in flight, so that parallel calls cannot overshoot a limit together."""

    def __init__(self, limit_usd: float | None, spent_usd: float) -> None:
        self._limit_usd = limit_usd
        self._spent_usd = spent_usd
        self._held_usd = 0.0

    def hold(self, at_most_usd: float | None) -> bool:
        """Set ``at_most_usd`` aside; say whether the limit allows it (an unknown price is held at nothing)."""
        amount = at_most_usd or 0.0
        if self._limit_usd is not None and self._spent_usd + self._held_usd + amount > self._limit_usd:
            return False
        self._held_usd += amount
        return True

    def settle(self, held_usd: float | None, paid_usd: float | None) -> None:
        """Replace what was held for a call by what it cost."""
        self._held_usd -= held_usd or 0.0
        self._spent_usd += paid_usd or 0.0
