"""From an answer to a scored turn: extraction, the gym (with retries and a cache), and the reward.

Three outcomes are kept apart: what the kernel earned, what the policy did wrong (also earned: mostly 0), and a fault of
the host. The last is retried with growing pauses for as long as the settings' patience lasts, and then raised as
:class:`HostError`; whoever collects leaves the trajectory out. It never becomes a reward.

A cache keeps verdicts by task and candidate with the run, so that a resumed run meets the same ones (the gym's secret
draws, and with them the error figures that feedback shows, differ from process to process). It repeats a measured
speed, too: right where the gym's noise is small against the reward's spread, and off by default.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

from drk.assistant.answer_parser import missing_candidate, missing_reason, missing_verdict, parse_answer
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.errors import HostError
from drk.gym.reward import NotRewardable, RewardOptions, RewardParts, dishonest, earned, measured_speedup, reward_parts
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.wire import candidate_id, task_id
from drk.training.config import GymSection, RewardSection
from drk.training.device_speed import ReferenceTimes, with_device_speed


class Judge(Protocol):
    """Anything that judges: :class:`drk.gym.Gym`, or a client of a served one."""

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate.

        Raises:
            HostError: the host failed.
        """
        ...


@dataclass(frozen=True)
class Score:
    """What a verdict is worth. ``coverage`` (measured) and ``speedup`` are NaN where they were not measured."""

    reward: float
    correct: bool
    hacked: bool
    coverage: float
    speedup: float


def score(verdict: Verdict, section: RewardSection) -> Score:
    """Return the reward and what rejection needs.

    Raises:
        NotRewardable: the fault is ours, or the evidence is lacking.
    """
    options = RewardOptions(cap=section.cap, floor=section.floor, bound=section.bound, proxy=section.proxy)
    paid = _as_honest(verdict) if section.pay_dishonest else verdict
    parts = reward_parts(paid, form=section.form, baseline=section.baseline, options=options)
    right = earned(verdict)
    speed = measured_speedup(verdict, section.baseline, bound=section.bound) if right else None
    cover = verdict.coverage if verdict.evidence == "gpu" else None
    return Score(
        reward=parts.total if section.pay_coverage else _without_coverage(parts, section),
        correct=right,
        hacked=dishonest(verdict),
        coverage=math.nan if cover is None else cover,
        speedup=math.nan if speed is None else speed,
    )


def _as_honest(verdict: Verdict) -> Verdict:
    """Return what a gym without honesty checks would have said: flags gone, a right result accepted."""
    if not (verdict.correct and dishonest(verdict)):
        return verdict
    return replace(verdict, status="accepted", honest=None, flags=())


def _without_coverage(parts: RewardParts, section: RewardSection) -> float:
    """Return the reward less what coverage adds in this form."""
    weight = {"paper": 1.0, "recipe": 0.5, "weighted": 0.5, "ladder": 0.0}[section.form]
    return parts.total - weight * parts.coverage


def read_answer(text: str, *, cut: bool, mark: str) -> Candidate:
    """Return the candidate in ``text``, or one that stands for an answer without any."""
    found = parse_answer(text, cut=cut)
    if found.source is None:
        return missing_candidate(found.reason, proposer="policy", mark=mark)
    return Candidate(found.source, proposer="policy")


class PatientJudge:
    """Judges through faults of the host. ``retries`` counts them, ``asked`` the evaluations, ``seconds`` their time.

    ``times`` gives verdicts without timing their speed by device time; ``kept`` counts those that the cache had.
    """

    def __init__(
        self,
        judge: Judge,
        section: GymSection,
        *,
        cache: VerdictCache | None = None,
        times: ReferenceTimes | None = None,
        pause_s: float = 0.5,
    ) -> None:
        self._judge = judge
        self._section = section
        self._cache = cache
        self._times = times
        self._pause_s = pause_s
        self._under_way: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self.retries = 0
        self.asked = 0
        self.kept = 0
        self.seconds = 0.0

    async def verdict(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate; an answer without any is judged here.

        Raises:
            HostError: the host failed for longer than the settings' patience.
            TaskError: the reference cannot be judged.
        """
        if missing_reason(candidate) is not None:
            return missing_verdict(candidate)
        verdict = await self._judged(task, candidate)
        if self._times is None or not verdict.accepted:
            return verdict
        return with_device_speed(verdict, await self._times.time_us(task))

    async def _judged(self, task: Task, candidate: Candidate) -> Verdict:
        if self._cache is None:
            return await self._patiently(task, candidate)
        key = (task_id(task), candidate_id(candidate))
        started = self._under_way.get(key)
        if started is None:
            started = self._under_way[key] = asyncio.create_task(self._cached(task, candidate, self._cache))
            started.add_done_callback(lambda _: self._under_way.pop(key, None))
        return await asyncio.shield(started)

    async def _cached(self, task: Task, candidate: Candidate, cache: VerdictCache) -> Verdict:
        kept = await asyncio.to_thread(cache.get, task, candidate)
        if kept is not None:
            self.kept += 1
            return kept
        verdict = await self._patiently(task, candidate)
        await asyncio.to_thread(cache.put, task, candidate, verdict)
        return verdict

    async def _patiently(self, task: Task, candidate: Candidate) -> Verdict:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._section.patience_s
        pause = self._pause_s
        while True:
            fault: HostError
            begun = time.monotonic()
            try:
                self.asked += 1
                verdict = await self._judge.evaluate(task, candidate)
                if verdict.status != "error":
                    return verdict
                cause = verdict.error.message if verdict.error else "no cause given"
                fault = NotRewardable(f"the gym failed: {cause}", kind="host")
            except HostError as error:
                fault = error
            finally:
                self.seconds += time.monotonic() - begun
            if clock() + pause > deadline:
                raise fault
            self.retries += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)
