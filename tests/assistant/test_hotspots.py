"""Measured kernels on their way to a prompt: put together, kept with the run, asked for once, failing softly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.budget import Budget
from drk.assistant.events import EventLog, read_events
from drk.assistant.hotspots import (
    SHOWN,
    Hotspot,
    Hotspots,
    hotspots_event,
    hottest,
    measure_hotspots,
    recorded_hotspots,
)
from drk.assistant.optimize import Plan, begin_run, optimize
from drk.assistant.proposers import BuiltinProposer, SeededProposer, reads_hotspots
from drk.assistant.runs import Run
from drk.gym.errors import BundleError, HostError, TaskError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Candidate, Task

GPU = {"device": "cuda:0", "gpu": "NVIDIA H200"}
TASK = Task("t", {"pkg/model.py": "import torch\n\n    y = self.fc(x)\n"}, "pkg/model.py", "Model")


def profile(*rows: tuple[Any, ...]) -> ReferenceProfile:
    return ReferenceProfile("NVIDIA H200", tuple(ReferenceKernel(*row) for row in rows))


def test_a_kernel_at_one_line_is_one_row() -> None:
    found = hottest(
        profile(
            ("void gemm<float>", 1, 30.0, 0.3, "layers.0.fc", "pkg/model.py:3"),
            ("void gemm<float>", 2, 20.0, 0.2, "layers.1.fc", "pkg/model.py:3"),
            ("softmax", 1, 40.0, 0.4, "", "pkg/model.py:9"),
            ("fill", 4, 10.0, 0.1),
        ),
        TASK,
    )
    assert [row.line() for row in found.rows] == [
        "gemm<float> (pkg/model.py:3 `y = self.fc(x)`, in layers.0.fc and 1 more): 50%, 50.0 us, 3 launches",
        "softmax (pkg/model.py:9): 40%, 40.0 us, 1 launch",
        "fill: 10%, 10.0 us, 4 launches",
    ]
    assert (found.kernels, found.launches, found.time_us) == (3, 8, 100.0)
    assert found.how == "measured on NVIDIA H200"
    assert "takes 100.0 us of GPU time, in 8 launches of 3 kernels" in found.note


def test_the_heaviest_are_kept_and_shares_are_of_all() -> None:
    found = hottest(profile(*((f"k{number:02d}" + "x" * 300, 1, 1.0 + number) for number in range(20))), TASK)
    assert [row.name[:3] for row in found.rows] == [f"k{number}" for number in range(19, 19 - SHOWN, -1)]
    assert max(len(row.name) for row in found.rows) == 120
    assert found.rows[0].share == pytest.approx(20 / 210, abs=1e-4)
    assert (found.kernels, found.time_us) == (20, 210.0)


@pytest.mark.parametrize("source", ["pkg/model.py:0", "pkg/model.py:77", "pkg/model.py:x", "other.py:1", "odd"])
def test_places_that_are_none_do_no_harm(source: str) -> None:
    assert hottest(profile(("k", 1, 1.0, 1.0, "", source)), TASK).rows[0].place == source


def test_a_log_gives_back_exactly_what_was_told(tmp_path: Path) -> None:
    told = hottest(profile(("a\ud800", 3, 1 / 3, None, "fc", "pkg/model.py:3"), ("b", 1, 2 / 7)), TASK)
    log = EventLog(tmp_path / "events.jsonl")
    log.append(hotspots_event(told))
    log.append(hotspots_event(Hotspots(reason="later")))
    assert recorded_hotspots(read_events(tmp_path / "events.jsonl")) == told
    assert recorded_hotspots([]) is None
    assert recorded_hotspots([hotspots_event(Hotspots())]) == Hotspots()


@pytest.mark.parametrize("error", [TaskError, HostError, BundleError])
async def test_what_hinders_a_profile_is_the_reason(make_gym: Any, error: type[Exception]) -> None:
    failing = make_gym({}, profile=error("the reference cannot be judged: RuntimeError: no CUPTI" + "!" * 999))
    found = await measure_hotspots(failing, TASK)
    assert found.rows == ()
    assert found.reason.startswith("RuntimeError: no CUPTI!")
    assert len(found.reason) == 300
    assert (await measure_hotspots(make_gym({}), TASK)).reason == "the profiler saw no kernel"


class Reading:
    """Proposes the given candidates turn by turn; keeps what it is told of hotspots."""

    name = "reading"
    ordered = False
    reads_hotspots = True

    def __init__(self, *turns: Sequence[str]) -> None:
        self.turns = turns
        self.told: list[Hotspots | None] = []

    async def propose(self, context: Any) -> list[Candidate]:
        self.told.append(context.hotspots)
        done = len({turn.index for turn in context.history})
        return [Candidate(source, "reading") for source in (self.turns[done] if done < len(self.turns) else [])]


@pytest.fixture
def plan(silu_task: Task) -> Plan:
    return Plan(silu_task, None, Budget(turns=3, samples=1))


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Run:
    return begin_run(plan, tmp_path / "runs", {})


async def go(plan: Plan, run: Run, gym: Any, proposer: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    await optimize(plan, run, gym, proposer, emit=events.append)
    return [event for event in events if event["event"] == "hotspots"]


async def test_a_run_asks_once_before_the_first_proposal(plan: Plan, run: Run, make_gym: Any, verdicts: Any) -> None:
    measured = profile(("silu", 1, 3.0, 1.0))
    gym = make_gym({"# a": verdicts.refused(), "# b": verdicts.refused()}, device_facts=GPU, profile=measured)
    proposer = Reading(["# a"], ["# b"])
    (event,) = await go(plan, run, gym, proposer)
    assert event["rows"] == [{"name": "silu", "launches": 1, "time_us": 3.0, "share": 1.0, "place": ""}]
    kinds = [event["event"] for event in run.events()]
    assert kinds.index("captured") < kinds.index("hotspots") < kinds.index("proposed")
    assert gym.profiled == 1
    assert proposer.told == [Hotspots("NVIDIA H200", (Hotspot("silu", 1, 3.0, 1.0),), 1, 1, 3.0)] * 3
    again = Reading(["# a"], ["# b"])
    assert await go(plan, run, gym, again) == []
    assert gym.profiled == 1
    assert again.told == proposer.told[:1]


async def test_a_failing_profile_is_told_and_the_run_goes_on(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any
) -> None:
    gym = make_gym({"# a": verdicts.accepted(1.5)}, device_facts=GPU, profile=TaskError("no CUPTI"))
    proposer = Reading(["# a"])
    (event,) = await go(plan, run, gym, proposer)
    assert (event["rows"], event["reason"]) == ([], "no CUPTI")
    assert run.result is not None and run.result["status"] == "optimised"
    await go(plan, run, gym, Reading(["# a"]))
    assert gym.profiled == 1


async def test_without_a_gpu_nothing_is_measured_even_when_one_comes_later(
    plan: Plan, run: Run, make_gym: Any, verdicts: Any
) -> None:
    table = {"# a": verdicts.refused()}
    without, later = make_gym(table), make_gym(table, device_facts=GPU, profile=profile(("silu", 1, 3.0)))
    proposer = Reading(["# a"])
    (event,) = await go(plan, run, without, proposer)
    assert (event["rows"], event["reason"], without.profiled) == ([], "", 0)
    again = Reading(["# a"])
    await go(plan, run, later, again)
    assert later.profiled == 0
    assert again.told == [Hotspots()]


async def test_proposers_that_do_not_read_them_cost_no_profile(plan: Plan, run: Run, make_gym: Any) -> None:
    class Blind(Reading):
        reads_hotspots = False

    gym = make_gym({}, device_facts=GPU)
    proposer = Blind()
    assert await go(plan, run, gym, proposer) == []
    assert (gym.profiled, proposer.told) == (0, [None])
    assert not reads_hotspots(BuiltinProposer())
    assert reads_hotspots(SeededProposer(BuiltinProposer(), Reading()))
    assert not reads_hotspots(SeededProposer(BuiltinProposer(), Blind()))
