from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from policy_parts import MadeUp, make_tasks

pytest.importorskip("trl", reason="needs the train extra")

from drk.gym.engine import Gym
from drk.gym.errors import ZygoteError
from drk.gym.schema import Candidate, Failure, Task, Verdict
from drk.training import backends, evaluate_policy
from drk.training.config import load_config
from drk.training.evaluate_policy import choice_figures, file_tasks, measure, summarise
from drk.training.evaluation_gym import SHORT, NotingGym, TaskTurns, open_evaluation_gym
from drk.training.sampling import Prompt, Sampled
from drk.training.tiny_model import answer_tokenizer, new_model


def test_shares_are_of_what_was_judged() -> None:
    found, _ = MadeUp(turns=1)([SimpleNamespace(prompt=i, sample=i) for i in range(3)], seed=0)
    gone = replace(found[0], turns=tuple(replace(row, aborted=True) for row in found[0].turns), ending="fault")
    wrong = replace(found[1].turns[0], score=replace(found[1].turns[0].score, correct=False, reward=0.0))
    fast = replace(found[2].turns[0], score=replace(found[2].turns[0].score, speedup=1.3, reward=2.0))
    facts = summarise([gone, replace(found[1], turns=(wrong,)), replace(found[2], turns=(fast,))], 2)
    assert (facts["tasks"], facts["left_out"], facts["correct/turn_1"], facts["reward/turn_1"]) == (3, 1, 0.5, 1.0)
    assert (facts["fast@1.2/best"], facts["fast@1.5/best"]) == (0.5, 0.0)
    assert "correct/turn_2" not in facts
    assert summarise([gone], 2) == {"tasks": 1, "left_out": 1}


def test_lazy_answers_are_a_share_of_right_ones_whose_coverage_was_measured() -> None:
    found, _ = MadeUp(turns=1)([SimpleNamespace(prompt=i, sample=i) for i in range(4)], seed=0)

    def with_score(place: int, **changes: float) -> object:
        row = found[place].turns[0]
        return replace(found[place], turns=(replace(row, score=replace(row.score, **changes), source=str(place % 2)),))

    nan = float("nan")
    rows = [
        with_score(0, coverage=0.1),
        with_score(1, coverage=0.9),
        with_score(2, coverage=nan),
        with_score(3, correct=False),
    ]
    assert choice_figures(rows) == {"lazy_share": 0.5, "distinct_share": 0.5, "cut_share": 0.0}  # type: ignore[arg-type]
    assert choice_figures([])["lazy_share"] is None


def test_files_become_tasks_by_their_last_class(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        "class A(nn.Module):\n    pass\n\n\nclass Model(nn.Module):\n    pass\n\n\nclass Options:\n    pass\n"
    )
    (one,) = file_tasks(tmp_path)
    assert (one.name, one.target, one.entry) == ("b", "Model", "model.py")


ANSWER = "```python\nclass ModelNew: pass\n```"
RIGHT = Verdict(
    "accepted", "gpu", "correct", correct=True, honest=True, coverage=0.8, timings_s={"run": 0.5, "total": 1.0}
)
SLOW = replace(
    RIGHT, status="failed", correct=False, error=Failure("run", "timeout", "over 10 s"), timings_s={"total": 9.0}
)


class MadeUpGym(NotingGym):
    """Judges nothing, and no one before all that it waits for are there; names decide what is wrong."""

    async def __aenter__(self) -> MadeUpGym:
        self.there = asyncio.Event()
        self.asked = self.wanted = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        """Hold nothing."""

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        self.asked += 1
        if self.asked >= self.wanted:
            self.there.set()
        await self.there.wait()
        if task.name == "task-3":
            raise ZygoteError("it is gone")
        if task.name == "task-4":
            await asyncio.sleep(3600)
        verdict = SLOW if task.name == "task-2" else RIGHT
        self.note(task.name, verdict, verdict.timings_s["total"] + (0.5 if verdict is RIGHT else 0.0))
        return verdict


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> MadeUpGym:
    """Replace model, sampling and gym."""
    tokenizer = answer_tokenizer(["w0 w1"], [ANSWER], context_tokens=256)
    model = new_model(tokenizer, layers=1, width=16, heads=2, context_tokens=256, seed=0)
    gym = MadeUpGym()
    said = Sampled((len(tokenizer) - 1, tokenizer.eos_token_id), (-0.5, -0.25), False)

    def answer(_: Any, prompts: Sequence[Prompt], **__: Any) -> list[Sampled]:
        return [said] * len(prompts)

    monkeypatch.setattr(backends, "sample", answer)
    monkeypatch.setattr(evaluate_policy, "load_policy", lambda *_: (model, tokenizer))
    monkeypatch.setattr(evaluate_policy, "open_evaluation_gym", lambda _: gym)
    monkeypatch.setattr(evaluate_policy, "PATIENCE_S", 0.05)
    monkeypatch.setattr(evaluate_policy, "TELL_S", 0.1)
    return gym


def test_no_answer_holds_a_set_up(made_up: MadeUpGym) -> None:
    overrides = ("rollout.turns=1", "rollout.max_new_tokens=8", "model.context_tokens=200", "rollout.concurrency=2",
                 "gym.timing=false", "gym.cache=false", "rollout.trajectory_timeout_s=6.0")  # fmt: skip
    tasks, said, told = make_tasks(30), list[str](), list[str]()
    made_up.wanted = 30  # whoever judged a few at a time would never get there
    found = measure(
        load_config("nano", overrides), {"first": tasks, "second": tasks[:2]},
        tell=lambda name, _: told.append(name), say=said.append,
    )  # fmt: skip
    figures = found["first"].figures
    endings = {one.item.task.name: one.ending for one in found["first"].trajectories if one.ending != "done"}
    assert endings == {"task-3": "fault", "task-4": "straggler"}
    assert (figures["tasks"], figures["left_out"]) == (30, 2)
    assert figures["correct/turn_1"] == pytest.approx(27 / 28)
    judging = figures["judging"]
    assert judging["statuses"] == {"accepted": 27, "failed": 1}
    assert judging["stages_s"] == {"total": 36.0, "run": 13.5, "wait": 13.5}
    assert judging["slowest"][0] == {"seconds": 9.0, "task": "task-2", "outcome": "run: timeout"}
    assert figures["sampling"] == {"decoder": False, "why_not": "the model is not on a GPU"}
    assert told == ["first", "second"]
    assert any("30 trajectories" in line for line in said)
    assert found["second"].figures["judging"]["statuses"] == {"accepted": 2}


async def test_candidates_of_one_task_are_let_through_together() -> None:
    turns, order, go_on = TaskTurns(1), list[str](), asyncio.Event()

    async def judge(task: str) -> None:
        async with turns.of(task):
            order.append(task)
            await go_on.wait()

    tasks = {name: asyncio.create_task(judge(name[0])) for name in ("a1", "b1", "c1", "a2", "c2", "d1", "c3")}
    await asyncio.sleep(0.05)
    assert order == ["a", "a"]
    tasks["b1"].cancel()
    tasks["c3"].cancel()
    go_on.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert order == ["a", "a", "c", "c", "d"]
    async with turns.of("e"):  # nothing was left behind by those who gave up
        order.append("e")


def test_limits_are_short_on_a_gpu_only() -> None:
    found = {}
    for device in ("auto", "interpret"):
        gym = open_evaluation_gym(load_config("nano", [f"gym.device={device}", "gym.timing=false"]))
        assert isinstance(gym, Gym)
        assert not gym.settings.timing.enabled
        found[device] = gym.settings.limits
    assert found["auto"] == SHORT
    assert found["interpret"].run_s > SHORT.run_s
