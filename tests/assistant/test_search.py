"""Candidates of one step judged together: order, journal, interruption, resuming, and what is not begun."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.budget import Budget
from drk.assistant.runs import Proposal, Run, create_run
from drk.assistant.search import Found, Search
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.devices import device_facts
from drk.gym.errors import HostError
from drk.gym.schema import Candidate, Task

NAMES = ("# a", "# b", "# c", "# d")


class OneStep:
    """Proposes the same candidates once."""

    name = "scripted"

    def __init__(self, sources: Sequence[str], *, ordered: bool = False) -> None:
        self.sources = sources
        self.ordered = ordered

    async def propose(self, context: Any) -> list[Candidate]:
        return [] if context.history else [Candidate(source, "scripted") for source in self.sources]


class Gated:
    """A judge whose verdicts wait for their gates; counts how many it has in flight."""

    def __init__(self, gym: Any, closed: Sequence[str] = ()) -> None:
        self.gym = gym
        self.gates = {source: asyncio.Event() for source in gym.verdicts}
        for source, gate in self.gates.items():
            if source not in closed:
                gate.set()
        self.flying = self.most = 0
        self.cancelled: list[str] = []

    async def evaluate(self, task: Task, candidate: Candidate) -> Any:
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            await self.gates[candidate.source].wait()
            return await self.gym.evaluate(task, candidate)
        except asyncio.CancelledError:
            self.cancelled.append(candidate.source)
            raise
        finally:
            self.flying -= 1

    async def kernels(self, task: Task) -> Any:
        return await self.gym.kernels(task)


@pytest.fixture
def run(silu_task: Task, tmp_path: Path) -> Run:
    return create_run(tmp_path / "runs", silu_task, {})


@pytest.fixture
def search(silu_task: Task, tmp_path: Path) -> Any:
    def make(run: Run, judge: Any, proposer: Any, events: list[Any], **changes: Any) -> Search:
        facts = {"on_gpu": True, "at_once": 3, "budget": Budget(), **changes}
        cache = VerdictCache(None, {})
        return Search(run, silu_task, judge=judge, proposer=proposer, cache=cache, emit=events.append, **facts)

    return make


def work(one: Search) -> asyncio.Task[Found]:
    return asyncio.create_task(one.turns(None, device_facts("sm_90")))


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


def sources(found: Found) -> list[str]:
    return [turn.candidate.source for turn in found.episode.turns]


def judged(events: Sequence[Any]) -> list[int]:
    return [event["number"] for event in events if event["event"] == "judged"]


async def test_verdicts_are_journalled_as_they_come_and_taken_in_order(
    run: Run, search: Any, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({name: verdicts.accepted(1.0 + place / 10) for place, name in enumerate(NAMES)})
    judge, events = Gated(gym, closed=NAMES), []
    going = work(search(run, judge, OneStep(NAMES), events))
    await until(lambda: judge.flying == 3)
    judge.gates["# c"].set()
    await until((run.folder / "verdicts" / "003.json").exists)
    assert judged(events) == []
    await until(lambda: judge.flying == 3)  # the next has its place
    for name in ("# d", "# b", "# a"):
        judge.gates[name].set()
    found = await going
    assert gym.evaluated[0] == "# c"
    assert judge.most == 3
    assert sources(found) == list(NAMES)
    assert judged(events) == judged(run.events()) == [1, 2, 3, 4]
    assert [event["best"] for event in events if event["event"] == "judged"] == [True] * 4


async def test_what_was_judged_counts_when_another_is_interrupted(
    run: Run, search: Any, make_gym: Any, verdicts: Any
) -> None:
    script = {"# a": verdicts.accepted(1.1), "# b": verdicts.accepted(1.4), "# c": verdicts.refused()}
    stop, judge = asyncio.Event(), Gated(make_gym(script), closed=("# a",))
    going = work(search(run, judge, OneStep(list(script)), [], stop=stop))
    await until((run.folder / "verdicts" / "003.json").exists)
    await until((run.folder / "verdicts" / "002.json").exists)
    stop.set()
    found = await going
    assert found.interrupted
    assert judge.cancelled == ["# a"]
    assert sources(found) == ["# b", "# c"]
    assert judged(run.events()) == [2, 3]

    again = Gated(make_gym(script))
    events: list[Any] = []
    resumed = await work(search(Run(run.folder), again, OneStep(list(script)), events))
    assert again.gym.evaluated == ["# a"]
    assert sources(resumed) == ["# a", "# b", "# c"]
    assert judged(events) == [1, 2, 3]
    assert sorted(judged(run.events())) == [1, 2, 3]


async def test_a_verdict_that_was_recorded_but_not_told_is_told_by_the_next_start(
    run: Run, search: Any, make_gym: Any, verdicts: Any
) -> None:
    script = {"# a": verdicts.accepted(1.1), "# b": verdicts.refused()}
    judge = Gated(make_gym(script), closed=("# a",))
    going = work(search(run, judge, OneStep(list(script)), []))
    await until((run.folder / "verdicts" / "002.json").exists)
    going.cancel()  # as if killed
    with pytest.raises(asyncio.CancelledError):
        await going
    assert judge.flying == 0
    assert judged(run.events()) == []
    await work(search(Run(run.folder), Gated(make_gym(script)), OneStep(list(script)), []))
    assert judged(run.events()) == [1, 2]


async def test_without_a_gpu_an_ordered_proposers_candidates_are_judged_one_by_one(
    run: Run, search: Any, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({"# a": verdicts.refused(), "# b": verdicts.accepted(), "# c": verdicts.accepted()})
    judge = Gated(gym)
    found = await work(search(run, judge, OneStep(list(gym.verdicts), ordered=True), [], on_gpu=False))
    assert gym.evaluated == ["# a", "# b"]
    assert judge.most == 1
    assert "cannot be told apart" in found.ended


@pytest.mark.parametrize(("enough", "judged_steps"), [(0.85, 2), (0.95, 3), (None, 3)])
async def test_without_a_gpu_a_candidate_that_does_enough_of_the_work_ends_a_search(
    enough: float | None, judged_steps: int, run: Run, search: Any, make_gym: Any, verdicts: Any
) -> None:
    lazy, whole = verdicts.accepted(coverage=0.5), verdicts.accepted(coverage=0.9)
    gym = make_gym({"# a": lazy, "# b": whole, "# c": lazy})
    proposer = OneStep(list(gym.verdicts))
    if enough is not None:
        proposer.enough_coverage = enough  # type: ignore[attr-defined]
    found = await work(search(run, gym, proposer, [], on_gpu=False, at_once=1))
    assert len(gym.evaluated) == judged_steps
    assert ("cannot be told apart" in found.ended) == (judged_steps == 2)


async def test_a_fault_of_the_host_ends_the_others(run: Run, search: Any, make_gym: Any, verdicts: Any) -> None:
    gym = make_gym({"# a": verdicts.refused(), "# b": verdicts.refused()})
    judge = Gated(gym, closed=("# b",))
    evaluate = judge.evaluate

    async def broken(task: Task, candidate: Candidate) -> Any:
        if candidate.source == "# a":
            raise HostError("the zygote died")
        return await evaluate(task, candidate)

    judge.evaluate = broken  # type: ignore[method-assign]
    with pytest.raises(HostError):
        await work(search(run, judge, OneStep(["# a", "# b"]), []))
    assert judge.cancelled == ["# b"]


async def test_what_cannot_end_in_time_is_not_begun(run: Run, search: Any, make_gym: Any, verdicts: Any) -> None:
    proposals = [Proposal(number, 1, number - 1, Candidate(name, "scripted")) for number, name in enumerate(NAMES, 1)]
    run.record_proposals(1, proposals)
    for proposal in proposals[:2]:  # at the same time: 100 s together
        run.record_verdict(proposal, verdicts.refused(), 100.0)
    gym = make_gym({name: verdicts.refused() for name in NAMES})
    nearly = await work(search(Run(run.folder), gym, OneStep(NAMES), [], budget=Budget(max_time_s=150.0)))
    assert gym.evaluated == []
    assert sources(nearly) == ["# a", "# b"]
    assert "too little for another candidate" in nearly.ended
    assert not nearly.interrupted
    whole = await work(search(Run(run.folder), gym, OneStep(NAMES), [], budget=Budget(max_time_s=1000.0)))
    assert gym.evaluated == ["# c", "# d"]
    assert sources(whole) == list(NAMES)
