"""A checkpoint on a set of tasks, by the trainer's own rollouts and gym: figures by turn, for studies of small models.

Sampling is in this process, at any temperature (0: greedy); prompts, turns and policies are those of training. Figures
are those of :mod:`drk.gym.metrics` by turn and for the best of history, with the share of lazy answers (right, but
doing less than half of the work themselves) and distinct answers. For published figures across models use ``drk eval``,
whose protocol is fixed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drk.gym.metrics import Outcome, at_turn, best_of_history, correct_rate, fast_at_p, hack_rate
from drk.gym.schema import Task, UserFunction
from drk.training.answer_style import target_class
from drk.training.backends import WaveBackend
from drk.training.config import TrainConfig
from drk.training.policy import load_policy
from drk.training.prompting import Prompter, PromptSettings, PromptTooLong, stop_ids
from drk.training.rl import open_gym, open_session
from drk.training.rollout import RolloutItem, Trajectory, TurnSample

LAZY_COVERAGE = 0.5
FAST = (1.0, 1.2, 1.5)


@dataclass(frozen=True)
class Measured:
    """Figures of one set, with every trajectory."""

    figures: dict[str, Any]
    trajectories: list[Trajectory]


def file_tasks(folder: Path) -> list[Task]:
    """Return one task for each module file in ``folder``: the last class in it, with the file's own inputs."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        init, inputs = UserFunction("get_init_inputs"), UserFunction("get_inputs")
        found.append(Task(path.stem, {"model.py": text}, "model.py", target_class(text), init=init, inputs=inputs))
    return found


def measure(
    config: TrainConfig,
    sets: dict[str, Sequence[Task]],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    seed: int = 7,
    minutes: float = 0.0,
    tell: Callable[[str, Measured], None] = lambda *_: None,
) -> dict[str, Measured]:
    """Return figures for each set of tasks; ``config`` names the model, prompts, turns and gym.

    ``minutes`` above 0 leaves out sets whose turn has not come by then; ``tell`` hears of each set when it is there.

    Raises:
        TrainingError: the model cannot be loaded or sampled from.
        HostError: the gym cannot be opened.
    """
    model, tokenizer = load_policy(config.model.path, config.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    settings = PromptSettings(
        config.prompt.templates, config.prompt.policy, config.model.context_tokens, config.rollout.max_new_tokens
    )
    prompter = Prompter(tokenizer, settings)
    backend = WaveBackend(
        lambda: model,
        temperature=temperature,
        stop_ids=stop_ids(tokenizer, model),
        pad_id=tokenizer.pad_token_id,
        batch_rows=config.rollout.batch_rows,
    )
    begun, found = time.monotonic(), {}
    with open_session(config, open_gym) as session:
        collector = session.collector(backend, prompter, tokenizer)
        for name, tasks in sets.items():
            if minutes and time.monotonic() - begun > 60 * minutes:
                break
            kept = [task for task in tasks if _fits(prompter, task)]
            started, judged_s = time.monotonic(), session.judge.seconds
            items = [RolloutItem(task, n, n * samples + k) for n, task in enumerate(kept) for k in range(samples)]
            trajectories, clock = session.collect(collector, items, seed=seed)
            figures = summarise(trajectories, config.rollout.turns) | choice_figures(trajectories)
            figures |= {"too_long": len(tasks) - len(kept), "sampling_s": round(clock.sampling_s, 2)}
            figures |= {"seconds": round(time.monotonic() - started, 2)}
            figures |= {"judging_sum_s": round(session.judge.seconds - judged_s, 2)}
            found[name] = Measured(figures, trajectories)
            tell(name, found[name])
    return found


def summarise(trajectories: Sequence[Trajectory], turns: int) -> dict[str, Any]:
    """Return shares by turn and for the best of history. Trajectories that were left out count in no share."""
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


def _fits(prompter: Prompter, task: Task) -> bool:
    try:
        prompter.prompt_ids(task)
    except PromptTooLong:
        return False
    return True


def choice_figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Return the share of right turns that are lazy (null where coverage was not measured), and of distinct sources."""
    rows = [row for one in trajectories for row in one.turns if not row.aborted]
    covered = [row.score.coverage for row in rows if row.score.correct and row.score.coverage == row.score.coverage]
    lazy = sum(one < LAZY_COVERAGE for one in covered) / len(covered) if covered else None
    return {
        "lazy_share": lazy,
        "distinct_share": len({row.source for row in rows}) / len(rows) if rows else None,
        "cut_share": sum(row.cut for row in rows) / len(rows) if rows else None,
    }
