"""A checkpoint on a set of tasks, by the trainer's own rollouts and gym: figures by turn, for studies of small models.

Sampling is in this process, at any temperature (0: greedy); prompts, turns and policies are those of training. Figures
are those of :mod:`drk.gym.metrics` by turn and for the best of history, with the share of lazy answers (right, but
doing less than half of the work themselves) and distinct answers. For published figures across models use ``drk eval``,
whose protocol is fixed.

All answers of a set (and turn) are sampled together; each is judged as soon as it is there, and timed when nothing is
sampled. An answer that hangs costs its own limit (:mod:`drk.training.evaluation_gym`) and holds no other up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from drk.gym.engine import Gym
from drk.gym.metrics import Outcome, at_turn, best_of_history, correct_rate, fast_at_p, hack_rate
from drk.gym.schema import Task, UserFunction
from drk.training.answer_style import target_class
from drk.training.backends import WaveBackend
from drk.training.batch import lazy_share
from drk.training.config import TrainConfig
from drk.training.decode import Decoder
from drk.training.evaluation_gym import NotingGym, open_evaluation_gym
from drk.training.policy import load_policy
from drk.training.prompting import Prompter, PromptSettings, PromptTooLong, stop_ids
from drk.training.rl import Session, open_session
from drk.training.rollout import Clock, Collector, RolloutItem, Trajectory, TurnSample

FAST = (1.0, 1.2, 1.5)
PATIENCE_S = 20.0
"""A fault of the host is retried for so long, at most: a set must not wait for one answer."""
DECODED_ROWS = 512
TELL_S = 10.0
"""Seconds between two lines about a set that is under way."""


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
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Measured]:
    """Return figures for each set of tasks; ``config`` names the model, prompts, turns and gym.

    ``minutes`` above 0 leaves out sets whose turn has not come by then, and answers that are not judged by then;
    ``tell`` hears of each set when it is there, ``say`` gets lines about what is under way.

    Raises:
        TrainingError: the model cannot be loaded or sampled from.
        HostError: the gym cannot be opened.
    """
    begun, found = time.monotonic(), dict[str, Measured]()
    model, tokenizer = load_policy(config.model.path, config.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    config = replace(config, gym=replace(config.gym, patience_s=min(config.gym.patience_s, PATIENCE_S)))
    with open_session(config, open_evaluation_gym) as session:
        evaluation = _Evaluation(config, session, model, tokenizer, temperature, say)
        say(f"the model and the gym are there after {time.monotonic() - begun:.1f} s")
        for name, tasks in sets.items():
            left_s = 60 * minutes - (time.monotonic() - begun) if minutes else math.inf
            if left_s <= 0:
                break
            found[name] = evaluation.measured(name, tasks, samples=samples, seed=seed, left_s=left_s)
            tell(name, found[name])
    return found


class _Evaluation:
    """What all sets are measured with: one model, one sampler, one gym."""

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        model: Any,
        tokenizer: Any,
        temperature: float,
        say: Callable[[str], None],
    ) -> None:
        prompt, rollout = config.prompt, config.rollout
        self._config, self._session, self._tokenizer, self._say = config, session, tokenizer, say
        self._prompter = Prompter(
            tokenizer,
            PromptSettings(prompt.templates, prompt.policy, config.model.context_tokens, rollout.max_new_tokens),
        )
        self._decoder = Decoder(rows=max(rollout.batch_rows, DECODED_ROWS))  # nothing is trained beside
        self._backend = session.backend = WaveBackend(
            lambda: model,
            temperature=temperature,
            stop_ids=stop_ids(tokenizer, model),
            pad_id=tokenizer.pad_token_id,
            batch_rows=rollout.batch_rows,
            decoder=self._decoder,
            beside=session.gym.sharing if isinstance(session.gym, Gym) else nullcontext,
        )

    def measured(self, name: str, tasks: Sequence[Task], *, samples: int, seed: int, left_s: float) -> Measured:
        """Sample and judge one set."""
        session, config = self._session, self._config
        kept = [task for task in tasks if _fits(self._prompter, task)]
        items = [RolloutItem(task, n, n * samples + k) for n, task in enumerate(kept) for k in range(samples)]
        started, judged_s = time.monotonic(), session.judge.seconds
        self._decoder.count_anew()
        # all ask at once: whoever waited for a slot would be sampled in a wave of its own
        slots = max(len(items), config.rollout.concurrency)
        rollout = replace(
            config.rollout, concurrency=slots, trajectory_timeout_s=min(left_s, config.rollout.trajectory_timeout_s)
        )
        collector = Collector(self._backend, session.judge, self._prompter, self._tokenizer, rollout, config.reward)
        trajectories, clock = session.runner.run(self._watched(name, collector, items, seed))
        seconds = time.monotonic() - started
        figures = summarise(trajectories, config.rollout.turns) | choice_figures(trajectories)
        figures |= {"too_long": len(tasks) - len(kept), "seconds": round(seconds, 2)}
        figures |= {"sampling_s": round(clock.sampling_s, 2), "sampling": self._backend.facts()}
        figures |= {"judging_sum_s": round(session.judge.seconds - judged_s, 2)}
        if isinstance(session.gym, NotingGym):
            figures["judging"] = session.gym.take()
        return Measured(figures, trajectories)

    async def _watched(
        self, name: str, collector: Collector, items: Sequence[RolloutItem], seed: int
    ) -> tuple[list[Trajectory], Clock]:
        """Collect, and say now and then how far it is."""
        begun = time.monotonic()
        collecting = asyncio.create_task(collector.collect(items, seed=seed))
        try:
            while not (await asyncio.wait([collecting], timeout=TELL_S))[0]:
                gym, sampling = self._session.gym, self._backend.facts()
                answers = (
                    f"{sampling['answers']} answers" if sampling["decoder"] else f"no decoder ({sampling['why_not']})"
                )
                judged = f"{gym.judged} judged" if isinstance(gym, NotingGym) else "judged elsewhere"
                self._say(f"{name}: {time.monotonic() - begun:.0f} s, {len(items)} trajectories, {answers}, {judged}")
        finally:
            collecting.cancel()  # nothing where it is done
        return await collecting


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
    return {
        "lazy_share": lazy_share(covered) if covered else None,
        "distinct_share": len({row.source for row in rows}) / len(rows) if rows else None,
        "cut_share": sum(row.cut for row in rows) / len(rows) if rows else None,
    }
