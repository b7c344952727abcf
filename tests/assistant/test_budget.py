from __future__ import annotations

from typing import Any

import pytest

from drk.assistant.budget import (
    Budget,
    Reservations,
    Spending,
    accepted_wins,
    gpu_seconds,
    spending_line,
    spent_reason,
)
from drk.assistant.episode import Turn
from drk.gym.schema import Candidate


def test_spending_adds_up_and_tells_each_win() -> None:
    one = Spending(2, 100, 50, 0.5, 0, 1, 1, 3.0)
    assert one + one == Spending(4, 200, 100, 1.0, 0, 2, 2, 6.0)
    figures = one.to_json(wins=2)
    assert (figures["cost_usd"], figures["cost_usd_per_win"], figures["gpu_s_per_win"]) == (0.5, 0.25, 1.5)
    assert figures["no_candidate_rate"] == 0.5
    line = spending_line(figures)
    assert "2 model calls, 100 + 50 tokens, 0.5000 dollars" in line
    assert "50% of the answers held no candidate" in line
    assert "1 begun and never answered" in line


def test_an_unknown_price_is_null_and_never_zero() -> None:
    figures = Spending(calls=3, cost_usd=0.2, unpriced_calls=1).to_json(wins=1)
    assert figures["cost_usd"] is None
    assert figures["cost_usd_per_win"] is None
    assert "cost unknown" in spending_line(figures)


def test_nothing_won_has_no_price() -> None:
    figures = Spending(calls=1, cost_usd=0.2).to_json(wins=0)
    assert (figures["cost_usd"], figures["cost_usd_per_win"]) == (0.2, None)
    assert Spending().to_json(0)["no_candidate_rate"] is None


@pytest.mark.parametrize(
    ("spending", "says"),
    [
        (Spending(), ""),
        (Spending(cost_usd=0.99, gpu_s=9.9), ""),
        (Spending(cost_usd=1.0), "1 dollars"),
        (Spending(gpu_s=10.0), "10 GPU seconds"),
    ],
)
def test_limits(spending: Spending, says: str) -> None:
    reason = spent_reason(Budget(max_cost_usd=1.0, max_gpu_s=10.0), spending)
    assert says in reason
    assert bool(says) == bool(reason)
    assert spent_reason(Budget(), Spending(cost_usd=1e9, gpu_s=1e9)) == ""


def test_calls_in_flight_cannot_overshoot_together() -> None:
    money = Reservations(1.0, 0.5)
    assert money.hold(0.3)
    assert not money.hold(0.3)
    money.settle(0.3, 0.1)
    assert money.hold(0.3)
    assert not money.hold(0.3)
    assert Reservations(None, 5.0).hold(100.0)
    assert Reservations(1.0, 0.0).hold(None)


def test_turns_are_counted_by_what_they_used(verdicts: Any) -> None:
    turns = [
        Turn(1, Candidate("a"), verdicts.accepted(1.5), 2.0),
        Turn(1, Candidate("b"), verdicts.accepted(), 4.0),
        Turn(2, Candidate("c"), verdicts.refused(), 8.0),
        Turn(2, Candidate("d"), verdicts.refused(evidence="gpu", timings_s={"total": 0.5}), 8.0, 1),
        Turn(2, Candidate("e"), verdicts.refused(evidence="gpu", timings_s={"total": 0.5}), 0.0, 2),
    ]
    assert gpu_seconds(turns) == 2.5
    assert accepted_wins(turns) == 2
