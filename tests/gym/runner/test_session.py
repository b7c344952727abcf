"""What a Runner keeps from one call to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drk.gym.runner.session import Session


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = float(x[0])
        return x * self.calls


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    made = Session("interpret", "candidate", tmp_path, -1)
    made.meta = {"mode": "eval"}
    made.adopt(Counting())
    monkeypatch.setattr(made, "draw", lambda key: ([torch.full((4,), float(key))], {}))
    return made


def calls(session: Session, **message: Any) -> int:
    session.run({"key": 1, **message}, [])
    module: Any = session.built
    return int(module.calls)


def test_nothing_of_a_candidate_is_wound_back_unasked(session: Session) -> None:
    assert [calls(session), calls(session)] == [1, 2]


def test_what_is_to_be_restored_holds_for_the_calls_after(session: Session) -> None:
    assert calls(session, restore=[["", "calls"]]) == 1
    assert calls(session) == 1, "ablation, other shapes and timing ask without saying it again"
    module: Any = session.built
    assert module.seen == 1.0
    assert calls(session, restore=[]) == 2
