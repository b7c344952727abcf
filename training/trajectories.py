"""Demonstrations: turns on generated tasks by the builtin proposer, with faults and their repairs, judged by the gym.

A demonstration begins, as drawn, with a faulty candidate (a fault of :mod:`drk.training.faults` put into a right one)
or with one of the compiler's later variants, goes on to the repair, and ends with the variant that the gym measured as
fastest (without a GPU: the compiler's own first choice). Every turn is really judged; the labels are the gym's, never
the intention's: a "fault" that turns out right stays as what it is.

Honest limits: repairs are of planted faults, not of what a model gets wrong; style is the builtin compiler's; a task
that it cannot compile gives none (counted).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from drk.assistant.episode import Turn, headline_interval, is_usable
from drk.assistant.proposers import BuiltinProposer, ProposeContext
from drk.gym.devices import device_facts
from drk.gym.errors import HostError, TaskError
from drk.gym.graph import graph_from_json
from drk.gym.schema import Candidate, Task, Verdict
from drk.training.dataset import Demonstration
from drk.training.faults import KINDS, insert_fault
from drk.training.tasks import TrainingTask


class TeachingGym(Protocol):
    """A gym that also captures."""

    async def capture(self, task: Task) -> dict[str, Any]:
        """Return the graph of the task's reference."""
        ...

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate."""
        ...


@dataclass(frozen=True)
class DemonstrationPlan:
    """``turns`` at most; ``fault_share`` of the demonstrations begin with a planted fault; ``target`` names the GPU."""

    turns: int = 3
    fault_share: float = 0.6
    variants: int = 3
    target: str = "sm_90"
    seed: int = 0


@dataclass(frozen=True)
class Collection:
    """What was collected, and how many tasks gave nothing, by reason."""

    demonstrations: tuple[Demonstration, ...]
    without: dict[str, int]


async def builtin_candidates(gym: TeachingGym, task: Task, *, limit: int = 3, target: str = "sm_90") -> list[Candidate]:
    """Return the builtin compiler's first variants for ``task``; an empty list where it has none.

    Raises:
        TaskError: the reference cannot be captured.
        HostError: the host failed.
    """
    graph = graph_from_json(await gym.capture(task))
    return await BuiltinProposer().propose(ProposeContext(task, graph, device_facts(target), limit=limit))


async def demonstrate(gym: TeachingGym, task: TrainingTask, plan: DemonstrationPlan) -> Demonstration | None:
    """Return one demonstration on ``task``, or None when no candidate is right.

    Raises:
        TaskError: the reference cannot be judged.
        HostError: the host failed.
    """
    variants = await builtin_candidates(gym, task.task, limit=plan.variants, target=plan.target)
    rng = random.Random(f"{plan.seed}:{task.task.name}")
    judged = [Turn(0, one, await gym.evaluate(task.task, one)) for one in variants]
    right = [turn for turn in judged if is_usable(turn.verdict)]
    if not right:
        return None
    best = max(right, key=lambda turn: (_speed(turn.verdict), -right.index(turn)))
    turns: list[Turn] = []
    if rng.random() < plan.fault_share:
        fault = insert_fault(best.candidate.source, rng.choice(KINDS), seed=rng.getrandbits(32))
        if fault is not None:
            wrong = Candidate(fault.source, proposer="fault", note=f"{fault.kind}: {fault.what}")
            turns.append(Turn(0, wrong, await gym.evaluate(task.task, wrong)))
    others = [turn for turn in right if turn is not best]
    if others and len(turns) + 2 <= plan.turns and rng.random() < 0.5:
        turns.append(rng.choice(others))
    turns.append(best)
    numbered = [Turn(i, t.candidate, t.verdict) for i, t in enumerate(turns[-plan.turns :], 1)]
    return Demonstration(task, tuple(numbered))


async def collect_demonstrations(
    gym: TeachingGym, tasks: Sequence[TrainingTask], plan: DemonstrationPlan, *, parallel: int = 2
) -> Collection:
    """Demonstrate on every task, ``parallel`` at a time. A task that fails is counted and left out."""
    slots = asyncio.Semaphore(parallel)
    without: dict[str, int] = {}

    async def one(task: TrainingTask) -> Demonstration | None:
        async with slots:
            try:
                found = await demonstrate(gym, task, plan)
                reason = "no right candidate"
            except TaskError as error:
                found, reason = None, error.kind
            except HostError:
                found, reason = None, "host"
        if found is None:
            without[reason] = without.get(reason, 0) + 1
        return found

    made = await asyncio.gather(*(one(task) for task in tasks))
    return Collection(tuple(found for found in made if found is not None), without)


def _speed(verdict: Verdict) -> float:
    interval = headline_interval(verdict)
    return interval.low if interval is not None else 0.0
