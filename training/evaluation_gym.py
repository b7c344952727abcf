"""The gym of a checkpoint's evaluation: short limits, and notes of where its time goes.

What a checkpoint writes hangs at times, in a kernel's loop or in a compilation of a size that never ends. Under the
limits of a developer's machine one such answer holds a whole set up for minutes; here for about as long as ten good
answers take. Judgement is not changed: what is within the limits is judged as anywhere else.

Answers come in the order in which they end. Those of one task are let through together, so that its reference is loaded
once and not for each of them.

Left out: a served gym has limits and notes of its own. The interpreter keeps the usual limits, since it is slow itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from drk.gym.engine import Gym
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.settings import LEAST_SESSIONS, GymSettings, Limits
from drk.training.config import TrainConfig
from drk.training.rl import gym_settings, open_gym

SHORT = Limits(compile_s=20.0, run_s=10.0, total_s=60.0)
SLOWEST = 5


class TaskTurns:
    """Lets candidates of ``tasks`` tasks through at a time, then those of the task for which most wait."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def of(self, task: str) -> AsyncIterator[None]:
        """Be one of those let through."""
        if task in self._inside or len(self._inside) < self._tasks:
            self._inside[task] += 1
        else:
            await self._wait(task)
        try:
            yield
        finally:
            self._leave(task)

    async def _wait(self, task: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task, []).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                left = [one for one in self._waiting.get(task, []) if one is not turn]
                self._waiting.pop(task, None)
                self._waiting |= {task: left} if left else {}
            else:  # it was let through just before
                self._leave(task)
            raise

    def _leave(self, task: str) -> None:
        self._inside[task] -= 1
        if self._inside[task]:
            return
        del self._inside[task]
        while self._waiting and len(self._inside) < self._tasks:
            following = max(self._waiting, key=lambda name: len(self._waiting[name]))
            for turn in self._waiting.pop(following):
                if not turn.done():  # else it gave up
                    self._inside[following] += 1
                    turn.set_result(None)


class NotingGym(Gym):
    """A gym that notes how many candidates it judged, by status, how long each stage took, and which took longest."""

    def __init__(self, settings: GymSettings | None = None) -> None:
        super().__init__(settings)
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._statuses: Counter[str] = Counter()
        self._slowest: list[tuple[float, str, str]] = []
        self._turns = TaskTurns(self.sessions_at_once)

    @property
    def sessions_at_once(self) -> int:
        """As many references as there are candidates under way, those that wait to be timed among them."""
        return max(LEAST_SESSIONS, self.settings.parallel + self.settings.parallel // 2)

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """See :meth:`drk.gym.engine.Gym.evaluate`."""
        begun = time.monotonic()
        async with self._turns.of(task.name):
            verdict = await super().evaluate(task, candidate)
        self.note(task.name, verdict, time.monotonic() - begun)
        return verdict

    def note(self, name: str, verdict: Verdict, seconds: float) -> None:
        """Count one verdict; ``seconds`` are with the wait for a Runner."""
        cause = f"{verdict.error.stage}: {verdict.error.kind}" if verdict.error is not None else ""
        self._statuses[verdict.status] += 1
        for stage, took in verdict.timings_s.items():
            self._stages[stage] += took
        self._stages["wait"] += seconds - verdict.timings_s.get("total", seconds)
        self._slowest.append((verdict.timings_s.get("total", seconds), name, cause or verdict.status))
        self._slowest = sorted(self._slowest, reverse=True)[:SLOWEST]

    @property
    def judged(self) -> int:
        """Verdicts since :meth:`take`."""
        return self._statuses.total()

    def take(self) -> dict[str, Any]:
        """Return the notes since the last call, and begin anew. Seconds are summed over candidates."""
        by_time = sorted(self._stages, key=lambda stage: -self._stages[stage])
        facts = {
            "judged": self.judged,
            "statuses": dict(self._statuses),
            "stages_s": {stage: round(self._stages[stage], 2) for stage in by_time},
            "slowest": [{"seconds": round(took, 2), "task": name, "outcome": out} for took, name, out in self._slowest],
        }
        self._stages.clear()
        self._statuses.clear()
        self._slowest.clear()
        return facts


def open_evaluation_gym(config: TrainConfig) -> Any:
    """Return the gym that the settings name, with short limits where it is here and has a GPU."""
    if config.gym.url:
        return open_gym(config)
    settings = gym_settings(config.gym)
    return NotingGym(settings if settings.device == "interpret" else replace(settings, limits=SHORT))
