"""Speed by device time: measured once a task, kept, and only for what is accepted and was not timed."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from drk.assistant.errors import ConfigError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Call, Candidate, Interval, KernelRow, Speedups, Task, Verdict
from drk.training.config import GymSection, RewardSection, load_config
from drk.training.device_speed import NOTE, ReferenceTimes, with_device_speed
from drk.training.scoring import PatientJudge, score

KERNELS = (KernelRow("mine", owned=True, launches=1, time_us=30.0), KernelRow("rest", owned=False, time_us=10.0))


def task(name: str = "t") -> Task:
    return Task(name, {"model.py": f"# {name}\nclass Model: ...\n"}, "model.py", "Model", inputs=Call(()))


def verdict(**changes: object) -> Verdict:
    right = Verdict("accepted", "gpu", "honest", correct=True, honest=True, coverage=0.75, kernels=KERNELS)
    return replace(right, **changes)


@dataclass
class Profiler:
    """Profiles and judges; counts how often."""

    time_us: float = 100.0
    profiled: list[str] = field(default_factory=list)

    async def kernels(self, one: Task) -> ReferenceProfile:
        self.profiled.append(one.name)
        await asyncio.sleep(0)
        rows = [ReferenceKernel(name, 1, self.time_us / 2) for name in "ab"] if self.time_us else []
        return ReferenceProfile("GPU", tuple(rows))

    async def evaluate(self, _task: Task, candidate: Candidate) -> Verdict:
        return verdict() if "right" in candidate.source else verdict(status="rejected", correct=False)


def test_the_ratio_of_device_times_stands_for_the_speed_up() -> None:
    found = with_device_speed(verdict(), 100.0)
    assert found.speedups is not None
    assert found.speedups.eager.value == pytest.approx(2.5)
    assert found.speedups.eager.low < 2.5 < found.speedups.eager.high
    assert (found.headline, found.notes, found.reached) == ("eager", (NOTE,), "honest")
    earned = score(found, RewardSection(bound="value", speed="device"))
    assert earned.reward == pytest.approx(1 + 2.5 + 0.75)
    assert earned.speedup == pytest.approx(2.5)


@pytest.mark.parametrize(
    "one",
    [
        verdict(status="rejected", correct=False),
        verdict(evidence="interpreter"),
        verdict(kernels=()),
        verdict(speedups=Speedups(eager=Interval(1.2, 1.1, 1.3, 20))),
    ],
    ids=["rejected", "interpreter", "no kernels", "timed"],
)
def test_nothing_is_said_where_nothing_was_measured(one: Verdict) -> None:
    assert with_device_speed(one, 100.0) is one


def test_no_reference_time_means_no_speed() -> None:
    assert with_device_speed(verdict(), math.nan).speedups is None


async def test_a_reference_is_profiled_once_and_kept(tmp_path: Path) -> None:
    gym, path = Profiler(), tmp_path / "kept" / "times.jsonl"
    times = ReferenceTimes(gym, path)
    assert await asyncio.gather(*(times.time_us(task()) for _ in range(4))) == [100.0] * 4
    assert gym.profiled == ["t"]
    with path.open("a") as file:
        file.write('{"task": "ot')  # what a kill leaves
    again = ReferenceTimes(gym, path)
    assert await again.time_us(task()) == 100.0
    assert await again.time_us(task("other")) == 100.0
    assert gym.profiled == ["t", "other"]


async def test_what_was_not_measured_is_asked_again(tmp_path: Path) -> None:
    gym = Profiler(time_us=0.0)
    times = ReferenceTimes(gym, tmp_path / "times.jsonl")
    assert math.isnan(await times.time_us(task()))
    gym.time_us = 8.0
    assert await times.time_us(task()) == 8.0


async def test_a_judge_adds_speed_to_right_answers_only(tmp_path: Path) -> None:
    gym = Profiler()
    judge = PatientJudge(gym, GymSection(timing=False), times=ReferenceTimes(gym, tmp_path / "times.jsonl"))
    wrong = await judge.verdict(task(), Candidate("wrong"))
    assert (wrong.speedups, gym.profiled) == (None, [])
    right = await judge.verdict(task(), Candidate("right"))
    assert right.speedups is not None
    assert right.speedups.eager.value == pytest.approx(2.5)


def test_device_speed_is_for_gyms_that_do_not_time() -> None:
    with pytest.raises(ConfigError, match="needs gym"):
        load_config("nano", ['reward.speed="device"'])
    assert load_config("nano", ['reward.speed="device"', "gym.timing=false"]).reward.speed == "device"
    with pytest.raises(ConfigError, match="min_pairs is above"):
        load_config("nano", ["gym.min_pairs=9", "gym.max_pairs=8"])
