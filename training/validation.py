"""Validation while training: the policy on held-out tasks, one sample each, by the same rollouts and the same gym.

Every ``run.validate_every`` steps a line goes to ``validation.jsonl``: reward, share correct, Fast@p and hack rate, at
each turn and for the best of history, with the number of tasks and of trajectories that were left out. Draws are those
of a fixed seed, so that two lines differ by the policy. The first process does it alone; the others wait.

Honest limits: one sample a task, at the temperature of training; for published figures use ``drk eval`` on a
checkpoint, whose protocol is printed beside every number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback

from drk.gym.metrics import Outcome, at_turn, best_of_history, correct_rate, fast_at_p, hack_rate
from drk.gym.schema import Task
from drk.training.config import TrainConfig
from drk.training.rollout import RolloutItem, Trajectory, TurnSample
from drk.training.run_folder import RunFolder, append_line
from drk.training.trainer import Collect

SEED = 7_777_777
FAST = (1.0, 1.2, 1.5)


class Validation(TrainerCallback):  # type: ignore[misc] # the library has no types
    """Collects on held-out tasks every so many steps and writes a line."""

    def __init__(self, tasks: Sequence[Task], collect: Collect, config: TrainConfig, folder: RunFolder) -> None:
        self._tasks = tasks
        self._collect = collect
        self._config = config
        self._path = folder.path / "validation.jsonl"

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Validate when it is due."""
        if state.global_step % self._config.run.validate_every:
            return
        items = [RolloutItem(task, place, place) for place, task in enumerate(self._tasks)]
        found, _clock = self._collect(items, seed=SEED)
        append_line(self._path, {"step": state.global_step, **summarise(found, self._config.rollout.turns)})


def summarise(trajectories: Sequence[Trajectory], turns: int) -> dict[str, Any]:
    """Return what a line says. Trajectories that were left out count in no share."""
    rows = [row for one in trajectories for row in one.turns if not row.aborted]
    outcomes = [_outcome(row) for row in rows]
    gone = sum(one.ending in ("fault", "straggler") for one in trajectories)
    facts: dict[str, Any] = {"tasks": len(trajectories), "left_out": gone}
    if not outcomes:
        return facts
    for turn in range(1, turns + 1):
        here = at_turn(outcomes, turn)
        rewards = [row.score.reward for row in rows if row.turn == turn - 1]
        if here:
            facts[f"reward/turn_{turn}"] = sum(rewards) / len(rewards)
            facts |= _shares(here, f"turn_{turn}")
    return facts | _shares(best_of_history(outcomes), "best")


def _shares(outcomes: Sequence[Outcome], name: str) -> dict[str, float]:
    shares = {f"correct/{name}": correct_rate(outcomes), f"hack_rate/{name}": hack_rate(outcomes)}
    if any(one.speedup is not None for one in outcomes):
        shares |= {f"fast@{p:g}/{name}": fast_at_p(outcomes, p) for p in FAST}
    return shares


def _outcome(row: TurnSample) -> Outcome:
    speed = None if math.isnan(row.score.speedup) else row.score.speedup
    return Outcome(str(row.prompt), row.sample, row.turn + 1, row.score.correct, speed, row.score.hacked)
