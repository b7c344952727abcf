"""Candidates that are judged together, what they amount to as answers, and the times until then."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from eval_parts import Scripted, plan_of, source, write_suite

from drk.assistant.eval_report import report, report_text
from drk.assistant.evaluation import evaluate
from drk.gym.errors import HostError
from drk.gym.schema import Candidate, Task


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path)


class Ordered:
    """Offers four candidates in each of four turns, best expected first; their numbers tell which."""

    name, ordered = "ordered", True

    def __init__(self) -> None:
        self.asked = 0

    async def propose(self, context: Any) -> list[Candidate]:
        self.asked += 1
        number, start = int(context.task.name[-1]), len(context.history)
        return [Candidate(source(number, start + place + 1)) for place in range(context.limit)]


@dataclass
class Together(Scripted):
    """Counts how many candidates it judges at the same time; ``begun`` are those that were asked for."""

    at_once: int = 4
    under_way: int = 0
    most: int = 0

    async def evaluate(self, task: Task, candidate: Candidate) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            return await super().evaluate(task, candidate)
        finally:
            self.under_way -= 1


STEPS = {(0, 2): 1.3, (0, 4): 1.1, (0, 5): 1.2, (1, 1): 0.8, (1, 6): 1.5, (1, 9): 1.4}
"""Problem 0: the second of the first turn is best; problem 1: the second of the second turn; 2 and 3: none is right."""


async def test_candidates_of_a_turn_are_judged_together_until_a_turn_brings_nothing_better(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    gym = Together(STEPS, verdicts)
    plan = plan_of(suite, turns=4, candidates=4, workers=1)
    result = await evaluate(plan, tmp_path / "out", gym, Ordered())
    assert gym.most == 4
    by_problem = {sample.problem[-1]: sample for sample in result.samples}
    assert {name: len(sample.turns) for name, sample in by_problem.items()} == {"0": 8, "1": 12, "2": 16, "3": 16}
    assert by_problem["0"].ended == "nothing after turn 1 was better"
    data = report(plan, result, {"proposer": "ordered"}, measured=True)
    # a turn counts as the best of its candidates
    rows = data["figures"]["compile"]["by_turn"]
    assert [row["best_so_far"]["fast_at"]["1.2"]["value"] for row in rows] == [0.25, 0.5, 0.5, 0.5]
    assert data["counts"]["samples"] == 4
    assert data["answers"]["optimised"] == 2 and data["answers"]["failed"] == 2
    assert data["answers"]["geometric_mean"] == pytest.approx((1.4 * 1.6) ** 0.25, abs=1e-6)
    assert data["soundness"]["first"]["right"] == 0.25
    assert data["protocol"]["candidates_a_turn"] == 4
    assert "answers: 2 optimised, 2 failed; over the fastest baseline" in report_text(data)


async def test_what_is_slower_than_the_fastest_baseline_is_no_win(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    plan = plan_of(suite, turns=1, candidates=2)
    slow = {(number, turn): 0.7 for number in range(4) for turn in (1, 2)}
    result = await evaluate(plan, tmp_path / "out", Together(slow, verdicts), Ordered())
    data = report(plan, result, {}, measured=True)
    assert data["figures"]["eager"]["best_of_history"]["fast_at"]["2"]["value"] == 1.0  # 2.5 times eager
    assert (data["answers"]["no-win"], data["answers"]["optimised"]) == (4, 0)
    assert data["answers"]["geometric_mean"] == data["answers"]["median"] == 1.0
    assert {sample["answer"] for problem in data["problems"] for sample in problem["samples"]} == {"no-win"}


async def test_an_interrupted_evaluation_judges_nothing_twice(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    stop = asyncio.Event()

    class Stopping(Together):
        ended = 0

        async def evaluate(self, task: Task, candidate: Candidate) -> Any:
            verdict = await super().evaluate(task, candidate)
            Stopping.ended += 1
            if Stopping.ended == 3:
                stop.set()
            return verdict

    plan, proposer = plan_of(suite, turns=4, candidates=4, workers=2), Ordered()
    first = await evaluate(plan, tmp_path / "out", Stopping(STEPS, verdicts), proposer, stop=stop)
    assert first.interrupted
    assert {sample.fault for sample in first.samples} == {"interrupted"}
    kept = len(list((tmp_path / "out").glob("runs/*/2*/verdicts/*.json")))
    gym = Together(STEPS, verdicts)
    again = await evaluate(plan, tmp_path / "out", gym, proposer)
    assert kept >= 3 and gym.evaluated == 8 + 12 + 16 + 16 - kept
    whole = await evaluate(plan, tmp_path / "whole", Together(STEPS, verdicts), Ordered())
    data, expected = (report(plan, one, {}, measured=True) for one in (again, whole))
    data.pop("times")
    expected.pop("times")
    assert data == expected


async def test_the_time_of_a_problem_counts_from_the_look_at_its_reference(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    class Hanging(Scripted):
        async def inspect(self, task: Task) -> Any:
            await asyncio.sleep(60.0 if task.name.endswith("p0") else 0.0)

    plan = plan_of(suite, max_time_s=1.0, turns=1)
    result = await evaluate(plan, tmp_path / "out", Hanging(STEPS, verdicts), Ordered())
    assert [sample.fault for sample in result.samples] == ["looking at the reference took all of the 1 s", "", "", ""]
    assert result.samples[1].pace is not None
    assert result.samples[1].pace.first_verdict_s is not None


async def test_a_host_that_fails_at_one_problem_does_not_end_the_others(
    suite: Path, tmp_path: Path, verdicts: Any
) -> None:
    class Failing(Scripted):
        failing: ClassVar[list[str]] = ["level1.p1"]

        async def inspect(self, task: Task) -> Any:
            if task.name in self.failing:
                raise HostError("the reference's process misbehaved")

    result = await evaluate(plan_of(suite, turns=1), tmp_path / "out", Failing(STEPS, verdicts), Ordered())
    data = report(plan_of(suite), result, {}, measured=True)
    assert (data["status"], data["counts"]["not_judged"], data["counts"]["samples"]) == ("partial", 1, 4)
    assert "the reference's process misbehaved" in report_text(data)
    Failing.failing += ["level1.p0", "level2.p2", "level2.p3"]  # a gym that is down
    with pytest.raises(HostError, match="misbehaved"):
        await evaluate(plan_of(suite, turns=1), tmp_path / "down", Failing(STEPS, verdicts), Ordered())


async def test_the_time_to_the_first_win_is_told(suite: Path, tmp_path: Path, verdicts: Any) -> None:
    plan = plan_of(suite, turns=1, candidates=4)
    result = await evaluate(plan, tmp_path / "out", Together(STEPS, verdicts), Ordered())
    paces = {sample.problem[-1]: sample.pace for sample in result.samples}
    assert all(pace is not None and pace.first_verdict_s is not None for pace in paces.values())
    assert [name for name, pace in paces.items() if pace is not None and pace.first_win_s is not None] == ["0"]
    times = report(plan, result, {}, measured=True)["times"]
    assert (times["first_win_s"]["count"], times["first_verdict_s"]["count"], times["end_s"]["count"]) == (1, 4, 4)
