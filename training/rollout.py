"""Collecting trajectories: one coroutine each, from prompt to answer to verdict to the next prompt.

Sampling and judging overlap between trajectories as far as the backend allows; both are bounded. A trajectory ends

- ``done``: all its turns were taken;
- ``context``: the next prompt would leave no room for an answer (its turns count);
- ``fault``: the gym or the sampler failed for longer than patience lasts, or the task itself cannot be judged (none of
  its turns count);
- ``straggler``: it took longer than the settings allow (none of its turns count).

A :class:`TurnSample` is one row of the batch. What a row says depends on the run's seed, the step, the sample's number
and the turn only, so that a resumed run collects what the first would have.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from drk.assistant.episode import Turn
from drk.gym.errors import HostError, TaskError
from drk.gym.schema import Task
from drk.training.backends import PolicyBackend, SamplerUnavailable
from drk.training.config import RewardSection, RolloutSection
from drk.training.prompting import Prompter, PromptTooLong
from drk.training.sampling import Prompt
from drk.training.scoring import PatientJudge, Score, read_answer, score

Ending = Literal["done", "context", "fault", "straggler"]


@dataclass(frozen=True)
class RolloutItem:
    """One trajectory to collect. ``prompt`` numbers the task, ``sample`` is unique over the whole step."""

    task: Task
    prompt: int
    sample: int


@dataclass(frozen=True)
class TurnSample:
    """One turn: what the trainer needs (ids, log-probabilities, score) and what a journal tells."""

    prompt: int
    sample: int
    turn: int
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampling_logps: tuple[float, ...]
    score: Score
    source: str
    status: str
    reached: str
    cut: bool
    aborted: bool = False


@dataclass(frozen=True)
class Trajectory:
    """The turns of one sample, and how it ended. ``cause`` explains a fault."""

    item: RolloutItem
    turns: tuple[TurnSample, ...]
    ending: Ending
    cause: str = ""


@dataclass
class Clock:
    """Seconds of a collection: sampling by the backend's own count, judging summed over trajectories.

    ``outages`` counts the times that the sampler was away meanwhile: it may have come back with other weights.
    ``judged`` counts evaluations, ``kept`` verdicts that were there before.
    """

    sampling_s: float = 0.0
    judging_sum_s: float = 0.0
    outages: int = 0
    judged: int = 0
    kept: int = 0


@dataclass
class _Slots:
    """``free`` are slots to be had, ``open`` the trajectories that have not ended."""

    free: asyncio.Semaphore
    open: int


class Collector:
    """Collects trajectories from a backend and a judge."""

    def __init__(
        self,
        backend: PolicyBackend,
        judge: PatientJudge,
        prompter: Prompter,
        tokenizer: Any,
        rollout: RolloutSection,
        reward: RewardSection,
    ) -> None:
        self._backend = backend
        self._judge = judge
        self._prompter = prompter
        self._tokenizer = tokenizer
        self._rollout = rollout
        self._reward = reward

    async def collect(self, items: Sequence[RolloutItem], *, seed: int) -> tuple[list[Trajectory], Clock]:
        """Return one trajectory an item, in order, and the time that they took.

        Raises:
            PromptTooLong: a task does not fit the context even alone.
        """
        clock = Clock()
        slots = _Slots(asyncio.Semaphore(self._rollout.concurrency), len(items))
        busy_s, outages = self._backend.busy_s, self._backend.outages
        judged, kept = self._judge.asked, self._judge.kept
        # a sampler that waits for all who will ask must not wait for those who wait for a slot
        self._backend.begin(min(len(items), self._rollout.concurrency))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._bounded(item, seed, slots, clock)) for item in items]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors  # what is not a fault of the host stops the run: the first tells why
        finally:
            await self._backend.settle()
        clock.sampling_s = self._backend.busy_s - busy_s
        clock.outages = self._backend.outages - outages
        clock.judged, clock.kept = self._judge.asked - judged, self._judge.kept - kept
        return [task.result() for task in tasks], clock

    async def _bounded(self, item: RolloutItem, seed: int, slots: _Slots, clock: Clock) -> Trajectory:
        """Run one trajectory under the time limit. A limit counts from its own start, not from its wait for a slot."""
        turns: list[TurnSample] = []
        try:
            async with slots.free, asyncio.timeout(self._rollout.trajectory_timeout_s):
                return await self._run(item, seed, turns, clock)
        except TimeoutError:
            return _aborted(item, turns, "straggler", f"took longer than {self._rollout.trajectory_timeout_s:g} s")
        except (HostError, TaskError, SamplerUnavailable) as error:
            return _aborted(item, turns, "fault", str(error))
        finally:
            slots.open -= 1
            if slots.open < self._rollout.concurrency:  # else one that waited takes this slot and asks
                self._backend.leave()

    async def _run(self, item: RolloutItem, seed: int, turns: list[TurnSample], clock: Clock) -> Trajectory:
        history: list[Turn] = []
        for number in range(self._rollout.turns):
            try:
                prompt_ids = self._prompter.prompt_ids(item.task, history)
            except PromptTooLong:
                if not history:
                    raise
                return Trajectory(item, tuple(turns), "context")
            turn, sampled = await self._turn(item, number, prompt_ids, seed, clock)
            turns.append(sampled)
            history.append(turn)
        return Trajectory(item, tuple(turns), "done")

    async def _turn(
        self, item: RolloutItem, number: int, prompt_ids: tuple[int, ...], seed: int, clock: Clock
    ) -> tuple[Turn, TurnSample]:
        mark = f"turn {item.sample}.{number}"
        prompt = Prompt(prompt_ids, row_seed(seed, item.sample, number), self._rollout.max_new_tokens)
        answer = await self._backend.generate(prompt)
        between = time.monotonic()
        text = self._tokenizer.decode(list(answer.ids), skip_special_tokens=True)
        candidate = read_answer(text, cut=answer.cut, mark=mark)
        verdict = await self._judge.verdict(item.task, candidate)
        clock.judging_sum_s += time.monotonic() - between
        row = TurnSample(
            prompt=item.prompt,
            sample=item.sample,
            turn=number,
            prompt_ids=prompt_ids,
            completion_ids=answer.ids,
            sampling_logps=answer.logps,
            score=score(verdict, self._reward),
            source=candidate.source,
            status=verdict.status,
            reached=verdict.reached or "",
            cut=answer.cut,
        )
        return Turn(number + 1, candidate, verdict, sample=item.sample), row


def unequal_groups(tasks: Sequence[int], samples: int) -> list[int]:
    """Return the step's task numbers, one a sample, with groups of unequal size and equal sum.

    Every second task gives all but two of its samples to the next one: groups of ``samples`` become 2 and 2 ``samples``
    - 2. That is where GRPO and TRLOO differ by more than a constant. A task without a partner keeps its samples.

    Args:
        tasks: the step's samples on all processes, each task's side by side.
        samples: of one task.
    """
    counts: dict[int, int] = {}
    for task in tasks:
        counts[task] = counts.get(task, 0) + 1
    names = list(counts)
    for giver, taker in zip(names[::2], names[1::2], strict=False):
        moved = min(samples - 2, counts[giver])
        counts[giver] -= moved
        counts[taker] += moved
    return [task for task, count in counts.items() for _ in range(count)]


def row_seed(seed: int, sample: int, turn: int) -> int:
    """Return the seed of one row's draws: 63 bits that depend on all three."""
    digest = hashlib.sha256(f"{seed}:{sample}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _aborted(item: RolloutItem, turns: Sequence[TurnSample], ending: Ending, cause: str) -> Trajectory:
    return Trajectory(item, tuple(replace(turn, aborted=True) for turn in turns), ending, cause)


def fault_share(trajectories: Sequence[Trajectory]) -> float:
    """Return the share of trajectories that were left out, 0..1; 0 of none."""
    gone = sum(one.ending in ("fault", "straggler") for one in trajectories)
    return gone / len(trajectories) if trajectories else 0.0


def journal_row(row: TurnSample, task: str, step: int) -> dict[str, Any]:
    """Return one turn as a JSON-able record: what was said and what it earned, without token ids."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {
        "step": step,
        "task": task,
        "sample": row.sample,
        "turn": row.turn,
        "reward": row.score.reward,
        "correct": row.score.correct,
        "hacked": row.score.hacked,
        "coverage": number(row.score.coverage),
        "speedup": number(row.score.speedup),
        "status": row.status,
        "reached": row.reached,
        "tokens": len(row.completion_ids),
        "cut": row.cut,
        "aborted": row.aborted,
        "source": row.source,
    }
