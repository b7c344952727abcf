"""The gym of a checkpoint's evaluation: short limits, and notes of where its time goes.

What a checkpoint writes hangs at times, in a kernel's loop or in a compilation of a size that never ends. Under the
limits of a developer's machine one such answer holds a whole set up for minutes; here for about as long as ten good
answers take. Judgement is not changed: what is within the limits is judged as anywhere else.

Left out: a served gym has limits and notes of its own. The interpreter keeps the usual limits, since it is slow itself.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

from drk.gym.engine import Gym
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.settings import GymSettings, Limits
from drk.training.config import TrainConfig
from drk.training.rl import gym_settings, open_gym

SHORT = Limits(compile_s=20.0, run_s=10.0, total_s=60.0)
SLOWEST = 5


class NotingGym(Gym):
    """A gym that notes how many candidates it judged, by status, how long each stage took, and which took longest."""

    def __init__(self, settings: GymSettings | None = None) -> None:
        super().__init__(settings)
        self._stages: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._slowest: list[tuple[float, str, str]] = []

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """See :meth:`drk.gym.engine.Gym.evaluate`."""
        begun = time.monotonic()
        verdict = await super().evaluate(task, candidate)
        self.note(task.name, verdict, time.monotonic() - begun)
        return verdict

    def note(self, name: str, verdict: Verdict, seconds: float) -> None:
        """Count one verdict; ``seconds`` are with the wait for a Runner."""
        cause = f"{verdict.error.stage}: {verdict.error.kind}" if verdict.error is not None else ""
        self._statuses[verdict.status] += 1
        self._stages.update(verdict.timings_s)
        self._stages["wait"] += seconds - verdict.timings_s.get("total", seconds)
        self._slowest.append((verdict.timings_s.get("total", seconds), name, cause or verdict.status))
        self._slowest = sorted(self._slowest, reverse=True)[:SLOWEST]

    @property
    def judged(self) -> int:
        """Verdicts since :meth:`take`."""
        return self._statuses.total()

    def take(self) -> dict[str, Any]:
        """Return the notes since the last call, and begin anew. Seconds are summed over candidates."""
        facts = {
            "judged": self.judged,
            "statuses": dict(self._statuses),
            "stages_s": {stage: round(seconds, 2) for stage, seconds in self._stages.most_common()},
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
