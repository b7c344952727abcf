"""Speed by device time, for training: what a verdict's profile says against the reference's, measured once a task.

Timing a candidate with the GPU to itself takes some 0.7 s and bounds reinforcement; its profile is there anyway, for
coverage. The reference's kernels are profiled once a task, with the GPU to itself, and kept in a file that several runs
may share. The ratio of both device times then stands in the verdict as the speed-up over eager, with
:data:`BAND` around it in the place of an interval.

Honest limits: a profile is what the candidate's own process says, other processes use the GPU meanwhile (a kernel that
had to wait reads longer, never shorter), the L2 cache is warm, and launches cost nothing, so that tasks must be large.
Good enough to train by; what is reported is timed in pairs.
"""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from drk.gym.kernels import ReferenceProfile
from drk.gym.schema import Interval, Speedups, Task, Verdict
from drk.gym.wire import task_id
from drk.training.run_folder import append_line

BAND = 0.02
"""By so much device times of one kernel differ between profiles."""
NOTE = "speed by device time of the profile, not timed in pairs"


class ProfilingGym(Protocol):
    """A gym that profiles references."""

    async def kernels(self, task: Task) -> ReferenceProfile:
        """Return the reference's measured kernels."""
        ...


class ReferenceTimes:
    """Device times of references in microseconds a call, measured at first use and kept in ``path``."""

    def __init__(self, gym: ProfilingGym, path: Path) -> None:
        self._gym = gym
        self._path = path
        self._known = _read(path)
        self._under_way: dict[str, asyncio.Task[float]] = {}

    async def time_us(self, task: Task) -> float:
        """Return the reference's device time; NaN where nothing was measured.

        Raises:
            TaskError: the reference cannot be run.
            HostError: the host failed.
        """
        name = task_id(task)
        if name in self._known:
            return self._known[name]
        started = self._under_way.get(name)
        if started is None:
            started = self._under_way[name] = asyncio.create_task(self._measure(task, name))
            started.add_done_callback(lambda _: self._under_way.pop(name, None))
        return await asyncio.shield(started)

    async def _measure(self, task: Task, name: str) -> float:
        found = await self._gym.kernels(task)
        total = sum(row.time_us for row in found.kernels)
        if total > 0:
            self._known[name] = total
            self._path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self._path, {"task": name, "name": task.name, "gpu": found.gpu, "time_us": total})
        return total or math.nan


def _read(path: Path) -> dict[str, float]:
    known: dict[str, float] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return known
    for line in lines:
        try:
            row = json.loads(line)
            known[str(row["task"])] = float(row["time_us"])
        except (ValueError, TypeError, KeyError):
            continue  # a line that a kill left half written
    return known


def with_device_speed(verdict: Verdict, reference_us: float) -> Verdict:
    """Return ``verdict`` with its speed-up over eager by device time, where it is accepted and was not timed."""
    own_us = sum(row.time_us or 0.0 for row in verdict.kernels)
    if not verdict.accepted or verdict.evidence != "gpu" or verdict.speedups is not None:
        return verdict
    if not own_us > 0 or not reference_us > 0:
        return verdict
    value = reference_us / own_us
    band = Interval(value, value * (1 - BAND), value * (1 + BAND), 0)
    return replace(verdict, speedups=Speedups(eager=band), headline="eager", notes=(*verdict.notes, NOTE))
