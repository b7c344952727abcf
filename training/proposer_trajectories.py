"""Demonstrations by any proposer: episodes of ``drk eval``'s own loop on a task set, every turn judged by the gym.

A language model's real mistakes and what it made of the gym's answer to them, or the fusion compiler's variants, where
:mod:`drk.training.trajectories` gives planted faults. Runs are kept in a folder: what was asked and judged before a
kill is neither asked nor judged again. :func:`filtered` chooses what to learn from.

Left out: choosing tasks by difficulty, and several machines at once (several folders, several files).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from drk.assistant.episode import Episode, best_of_history, headline_interval
from drk.assistant.evaluation import EvalPlan, Problem, SampleResult, evaluate
from drk.assistant.optimize import OptimizeGym
from drk.assistant.proposers import Proposer
from drk.gym.settings import LEAST_SESSIONS
from drk.training.dataset import Demonstration
from drk.training.errors import OptionError
from drk.training.tasks import TrainingTask
from drk.training.trajectories import Collection

Keep = Literal["all", "solved", "improved"]


@dataclass(frozen=True)
class EpisodePlan:
    """``samples`` episodes a task of ``turns`` at most; ``max_time_s`` and ``max_cost_usd`` hold for each of them.

    ``judging`` names what else verdicts depend on (seeds, sandbox level).
    """

    turns: int = 3
    samples: int = 1
    workers: int = 2
    max_time_s: float = 600.0
    max_cost_usd: float | None = None
    judging: Mapping[str, Any] = field(default_factory=dict)


async def collect_episodes(
    gym: OptimizeGym,
    tasks: Sequence[TrainingTask],
    proposer: Proposer,
    plan: EpisodePlan,
    folder: Path,
    *,
    tell: Callable[[SampleResult], None] = lambda _: None,
) -> Collection:
    """Return one demonstration an episode with a turn, in the order of tasks; others are counted by reason.

    Args:
        gym: an entered gym.
        tasks: with distinct names.
        proposer: an opened proposer.
        plan: how much.
        folder: holds the runs; an earlier collection of the same tasks in it goes on.
        tell: is called with each episode that is done.

    Raises:
        OptionError: two tasks have one name.
        HostError: the gym failed.
    """
    by_name = {one.task.name: one for one in tasks}
    if len(by_name) < len(tasks):
        raise OptionError("two tasks have one name, by which their runs are kept", help="collect them apart")
    whole = EvalPlan(
        problems=tuple(Problem(one.task.name, one.family, one.task) for one in tasks),
        turns=plan.turns,
        samples=plan.samples,
        workers=plan.workers,
        problems_at_once=LEAST_SESSIONS,
        max_time_s=plan.max_time_s,
        max_cost_usd=plan.max_cost_usd,
        judging=plan.judging,
    )
    result = await evaluate(whole, folder, gym, proposer, tell=tell)
    without = {"the task cannot be judged": len(result.unusable)} if result.unusable else {}
    found = []
    for sample in result.samples:
        if sample.turns and not sample.fault:
            turns = tuple(replace(turn, index=number) for number, turn in enumerate(sample.turns, 1))
            found.append(Demonstration(by_name[sample.problem], turns))
            continue
        reason = "a fault of the host or the model" if sample.fault else "nothing was proposed"
        without[reason] = without.get(reason, 0) + 1
    return Collection(tuple(found), without)


def filtered(demonstrations: Sequence[Demonstration], keep: Keep, *, min_speedup: float = 0.0) -> list[Demonstration]:
    """Return those to learn from.

    Args:
        demonstrations: as collected.
        keep: ``all``; ``solved``: those with a right turn, cut after the best one; ``improved``: of these, those whose
            best turn came after another one.
        min_speedup: above 0, the best turn's lower bound must reach it; what was not measured does not.
    """
    if keep == "all" and not min_speedup:
        return list(demonstrations)
    found = []
    for one in demonstrations:
        best = best_of_history(Episode("", one.turns))
        if best is None:
            continue
        interval = headline_interval(best.verdict)
        if min_speedup and (interval is None or interval.low < min_speedup):
            continue
        if keep == "all":
            found.append(one)
        elif keep == "solved" or best is not one.turns[0]:
            found.append(Demonstration(one.task, one.turns[: one.turns.index(best) + 1]))
    return found
