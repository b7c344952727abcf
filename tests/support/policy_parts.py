"""A small random policy and made-up turns, for tests of the trainer that need no gym."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from drk.gym.schema import Task
from drk.training.rollout import Clock, RolloutItem, Trajectory, TurnSample
from drk.training.scoring import Score

WORDS = [f"w{i}" for i in range(12)]


def make_policy(folder: Path, seed: int = 0) -> Path:
    """Save a two-layer model with a vocabulary of some twenty words; return its folder."""
    from drk.training.tiny_model import answer_tokenizer, new_model

    tokenizer = answer_tokenizer([" ".join(WORDS)], ["a", "b"], context_tokens=256)
    model = new_model(tokenizer, layers=2, width=32, heads=2, context_tokens=256, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tasks(count: int) -> list[Task]:
    """Return tasks that nobody judges."""
    return [Task(f"task-{i}", {"model.py": f"class Model: pass  # {i}\n"}, "model.py", "Model") for i in range(count)]


class MadeUp:
    """Collects trajectories without model or gym: tokens and rewards from the seed. ``exact`` is set by the test.

    ``coverage`` (and so rejection by PRS at a hard cut) is drawn from 0 and 1.
    """

    def __init__(self, turns: int = 2, vocabulary: int = 17, change_rejected: int = 0) -> None:
        self.turns = turns
        self.vocabulary = vocabulary
        self.change_rejected = change_rejected
        self.calls: list[tuple[list[RolloutItem], int]] = []
        self.rows: list[TurnSample] = []

    def __call__(self, items: Any, *, seed: int) -> tuple[list[Trajectory], Clock]:
        self.calls.append((list(items), seed))
        found = [self._trajectory(item, seed) for item in items]
        self.rows = [turn for one in found for turn in one.turns]
        return found, Clock(1.0, 2.0)

    def _trajectory(self, item: RolloutItem, seed: int) -> Trajectory:
        rng = random.Random(f"{seed}:{item.sample}")
        turns = []
        for number in range(1 + rng.randrange(self.turns)):
            coverage = float(rng.random() < 0.6)
            prompt = tuple(rng.randrange(5, self.vocabulary) for _ in range(rng.randint(2, 6)))
            answer = tuple(rng.randrange(5, self.vocabulary) for _ in range(rng.randint(1, 5)))
            if coverage == 0.0 and self.change_rejected:
                answer = tuple(5 + (token + self.change_rejected) % (self.vocabulary - 5) for token in answer)
            score = Score(rng.random() * 3, correct=True, hacked=False, coverage=coverage, speedup=math.nan)
            logps = tuple(-1.0 for _ in answer)
            turns.append(
                TurnSample(item.prompt, item.sample, number, prompt, answer, logps, score, "", "accepted", "", False)
            )
        return Trajectory(item, tuple(turns), "done")
