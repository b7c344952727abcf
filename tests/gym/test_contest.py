"""The order of a contest, its clocks and what it checks, against handles that answer as Runners do."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drk.gym import measure
from drk.gym.draft import Draft, Stop
from drk.gym.measure import Contest, Measurement
from drk.gym.settings import GymSettings, Timing


class Handle:
    """Answers a Runner's timing commands; outputs are the key of the call, plus how often the module was called."""

    def __init__(
        self, late_s: float = 0.0, *, late_windows: int = 10**9, counts: bool = False, slow_windows: int = 0
    ) -> None:
        self.late_s = late_s
        self.late_windows = late_windows
        self.slow_windows = slow_windows
        self.counts = counts
        self.keys: list[int] = []
        self.values: list[int] = []
        self.asked: list[tuple[str, Any]] = []

    stopped_for = None
    pid = 0

    async def call(self, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
        assert timeout_s > 0
        self.asked.append((command, message))
        if command == "warm":
            return {"ok": True, "latency_s": 1e-4, "input_bytes": 4}
        if command == "prepare":
            self.keys = message["keys"]
        if command == "go":
            await asyncio.sleep(self.late_s if self.late_windows > 0 else 0.0)
            self.late_windows -= 1
            last, repeat = len(self.keys) - 1, message.get("repeat", 0)
            if repeat and self.slow_windows:
                self.slow_windows -= 1
                await asyncio.sleep(1.0)
            kept = [(repeat - 1) % len(self.keys)] if repeat else range(last + 1)
            self.values = [self.keys[index] + (index if self.counts else 0) for index in kept]
            return {"ok": True, "event_ms": 0.001, "lead_ms": 0.0005}
        if command == "outputs":
            return {"ok": True, "out": self.values[message["index"]]}
        return {"ok": True}


async def fetched(_handle: Any, answer: dict[str, Any], *_: Any) -> dict[str, torch.Tensor]:
    return {"out": torch.tensor([answer["out"]])}


def contest(monkeypatch: pytest.MonkeyPatch, candidate: Handle, eager: Handle, *, stateful: bool = False) -> Contest:
    monkeypatch.setattr(measure, "fetch", fetched)

    async def ask(handle: Handle, _stage: str, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
        return await handle.call(command, timeout_s, **message)

    timing = Timing(min_pairs=20, max_pairs=40, max_s=20.0, compile_baseline=False)
    evaluation = SimpleNamespace(
        task=SimpleNamespace(grad=False), settings=GymSettings(timing=timing), draft=Draft("gpu"), ask=ask
    )
    session = SimpleNamespace(
        handle=eager, stateful=stateful, baseline=None, compare_on="cpu", peak_bytes=0, sample=lambda _index: None,
        warm={}, strain=0.0,
    )  # fmt: skip
    return Contest(Measurement("none", timing, 1), evaluation, candidate, session)  # type: ignore[arg-type]


async def test_outputs_of_the_last_call_and_of_the_long_window_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, eager = Handle(), Handle()
    one = contest(monkeypatch, candidate, eager)
    await one.warm_up()
    assert (one.calls["candidate"], one.lead["candidate"]) == (8, 4)
    await one.run()
    await one.check_outputs()
    await one.check_clock()
    cells = one.evaluation.draft.cells
    assert len(one.times_ms["candidate"]) >= 20
    assert all(cell.passed for cell in cells), cells
    assert {cell.name for cell in cells} == {"timed out", "long window out"}
    shown = [message["index"] for command, message in candidate.asked if command == "outputs"]
    assert shown[measure.SPOT_CHECKS] == 11, "the last call of the window"


async def test_who_works_in_the_rounds_that_may_be_the_last_only_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(Handle):
        windows = 0

        async def call(self, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
            answer = await super().call(command, timeout_s, **message)
            self.windows += command == "go"
            return {**answer, "out": -1} if command == "outputs" and self.windows % 5 else answer

    one = contest(monkeypatch, Lazy(), Handle())
    one.owner.random = random.Random(3)  # type: ignore[assignment]
    one.timing = replace(one.timing, max_pairs=20)
    await one.warm_up()
    await one.run()
    found = len(one.evaluation.draft.cells)
    await one.check_outputs()
    assert [cell.passed for cell in one.evaluation.draft.cells[:found]].count(False) >= 1
    assert all(cell.passed for cell in one.evaluation.draft.cells[found:]), "the last round alone looks right"


async def test_a_stateful_reference_makes_the_calls_before(monkeypatch: pytest.MonkeyPatch) -> None:
    one = contest(monkeypatch, Handle(counts=True), Handle(counts=True), stateful=True)
    await one.warm_up()
    await one.run()
    await one.check_outputs()
    assert all(cell.passed for cell in one.evaluation.draft.cells)
    other = contest(monkeypatch, Handle(counts=True), Handle(counts=True), stateful=False)
    await other.warm_up()
    await other.run()
    await other.check_outputs()
    assert not all(cell.passed for cell in other.evaluation.draft.cells), "one call alone leaves another state"


async def test_windows_that_end_late_are_a_clock_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = contest(monkeypatch, Handle(late_s=0.02), Handle())
    await one.warm_up()
    with pytest.raises(Stop) as stop:
        await one.run()
    assert stop.value.failure.kind == "clock-mismatch"
    assert [(flag.kind, flag.severity) for flag in one.evaluation.draft.flags] == [("clock-mismatch", "fraud")]


async def test_a_process_that_was_held_up_for_a_moment_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = contest(monkeypatch, Handle(late_s=0.005, late_windows=50), Handle())
    await one.warm_up()
    await one.run()
    assert len(one.times_ms["candidate"]) >= 20
    assert one.evaluation.draft.flags == []


async def test_the_typical_excess_over_the_events_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    one = contest(monkeypatch, Handle(), Handle())
    await one.warm_up()
    await one.run()
    one.excess_ms = {"candidate": [2.6, 2.7, 0.3], "eager": [0.3, 0.3, 5.0]}
    await one.check_clock()
    assert any("2.60 ms after" in flag.proof for flag in one.evaluation.draft.flags)


@pytest.mark.parametrize(("slow_windows", "flags"), [(1, []), (99, ["clock-mismatch"])])
async def test_a_long_window_is_slow_each_time_or_it_was_the_host(
    monkeypatch: pytest.MonkeyPatch, slow_windows: int, flags: list[str]
) -> None:
    one = contest(monkeypatch, Handle(slow_windows=slow_windows), Handle())
    await one.warm_up()
    one.times_ms = {"candidate": [1.0], "eager": [1.0]}
    one.excess_ms = {"candidate": [0.1], "eager": [0.1]}
    one.window_keys = [1, 2, 3, 4]
    await one.check_clock()
    assert [flag.kind for flag in one.evaluation.draft.flags] == flags
    assert [cell.name for cell in one.evaluation.draft.cells] == ["long window out"]


@pytest.mark.parametrize(
    ("best_only", "best_low", "slowdown", "rounds", "than"),
    [
        (True, 1.5, 0.8, 20, "the best candidate so far"),  # 1.25 times eager: a win, but not the best
        (True, 0.0, 1.25, 20, "the fastest baseline"),
        (True, 1.0, 0.8, 40, ""),  # the best so far: timed to the end
        (True, 1.26, 0.8, 40, ""),  # not clearly slower
        (False, 1.5, 1.25, 40, ""),
    ],
)
async def test_losers_are_timed_no_longer_than_it_takes_to_see_it(
    monkeypatch: pytest.MonkeyPatch, best_only: bool, best_low: float, slowdown: float, rounds: int, than: str
) -> None:
    one = contest(monkeypatch, Handle(), Handle())
    one.timing = replace(one.timing, best_only=best_only, target_halfwidth=0.0)
    one.session.best_low = best_low
    one.forms["candidate"] = one.forms["eager"]
    monkeypatch.setattr(measure, "SPOT_CHECKS", 0)

    async def take_round(_turns: Any) -> None:
        place = len(one.times_ms["candidate"])
        one.times_ms["eager"].append(1.0)
        one.times_ms["candidate"].append(slowdown * (1.0 + 1e-3 * (place % 3 - 1)))

    monkeypatch.setattr(one, "_round", take_round)
    await one.run()
    one.conclude()
    draft = one.evaluation.draft
    assert len(one.times_ms["candidate"]) == rounds
    assert draft.notes == ([f"timed in {rounds} rounds only: clearly slower than {than}"] if than else [])
    assert draft.speedups is not None
    low = draft.speedups.eager.low
    assert one.session.best_low == (max(best_low, low) if best_only else best_low)


async def test_the_baseline_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = contest(monkeypatch, Handle(), Handle())
    timing = Timing(min_pairs=20, max_pairs=20, max_s=20.0)
    owner = Measurement("GPU-test", timing, 1)
    session: Any = first.session
    session.lock = asyncio.Lock()
    session.settings = first.evaluation.settings
    limits = first.evaluation.settings.limits
    ended: list[bool] = []

    async def finish() -> None:
        ended.append(session.lock.locked())

    for _ in range(2):
        await owner.measure(first.evaluation, Handle(), session, finish)  # type: ignore[arg-type]
    assert ended == [False, False], "the experiments that end an evaluation ask the reference too"
    patient = [m for c, m in session.handle.asked if c == "warm" and m["form"] == "compile"]
    assert len(patient) == 2, "once to compile, then once before the first contest"
    assert [m["form"] for c, m in session.handle.asked if c == "warm"].count("eager") == 1
    assert limits.compile_s > 0
    assert first.evaluation.draft.speedups is not None


@pytest.mark.parametrize("lead_ms", [-0.5, 1e6, float("nan")])
async def test_time_cannot_be_hidden_in_the_calls_before(monkeypatch: pytest.MonkeyPatch, lead_ms: float) -> None:
    class Liar(Handle):
        async def call(self, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
            answer = await super().call(command, timeout_s, **message)
            return {**answer, "lead_ms": lead_ms} if command == "go" else answer

    one = contest(monkeypatch, Liar(), Handle())
    await one.warm_up()
    with pytest.raises(Stop) as stop:
        await one.run()
    assert stop.value.failure.kind == "clock-mismatch"


@pytest.mark.parametrize(("waiting", "rounds"), [(0, 40), (2, 20)])
async def test_rounds_end_sooner_while_others_wait(monkeypatch: pytest.MonkeyPatch, waiting: int, rounds: int) -> None:
    one = contest(monkeypatch, Handle(), Handle())
    one.forms["candidate"] = one.forms["eager"]
    one.owner.turns._waiting = waiting
    monkeypatch.setattr(measure, "CROWDED_S", 0.0)
    monkeypatch.setattr(measure, "SPOT_CHECKS", 0)

    async def take_round(_turns: Any) -> None:
        one.times_ms["eager"].append(1.0)
        one.times_ms["candidate"].append(random.Random(len(one.times_ms["eager"])).uniform(0.2, 2.0))

    monkeypatch.setattr(one, "_round", take_round)
    await one.run()
    assert len(one.times_ms["candidate"]) == rounds
