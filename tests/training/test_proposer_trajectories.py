"""Demonstrations by any proposer: episodes are kept and gone on with, filtered, and exported as conversations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.cli import run
from drk.assistant.episode import Turn
from drk.assistant.proposers import ProposeContext
from drk.gym.errors import TaskError
from drk.gym.schema import Candidate, Interval, Speedups, Task, Verdict
from drk.training.dataset import Demonstration, read_demonstrations, write_demonstrations, write_tasks
from drk.training.errors import OptionError
from drk.training.export import export_demonstrations
from drk.training.proposer_trajectories import EpisodePlan, collect_episodes, filtered
from drk.training.tasks import TrainingTask, draw_tasks

WRONG = Verdict("rejected", "interpreter", "ran", correct=False, honest=None)
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None, coverage_estimate=0.5)


def fast(low: float) -> Verdict:
    speed = Speedups(Interval(low + 0.1, low, low + 0.2, 50))
    return Verdict("accepted", "gpu", "measured", correct=True, honest=True, speedups=speed, headline="eager")


class Gym:
    """Accepts sources that say so; cannot judge the task named ``unusable``."""

    device_facts: dict[str, Any] = {"device": "interpret", "gpu": None}  # noqa: RUF012 - never changed

    def __init__(self, unusable: str = "") -> None:
        self.unusable = unusable
        self.judged = 0

    async def inspect(self, task: Task) -> Any:
        if task.name == self.unusable:
            raise TaskError("no such class")

    async def capture(self, task: Task) -> Any:
        raise TaskError("not captured here")

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        self.judged += 1
        return RIGHT if "right" in candidate.source else WRONG


class Learner:
    """Is wrong at first and right at its second turn; says nothing about the task named ``silent``."""

    name, ordered = "learner", False

    def __init__(self, silent: str = "") -> None:
        self.silent = silent
        self.asked = 0

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        if context.task.name == self.silent:
            return []
        self.asked += 1
        word = "right" if context.history else "wrong"
        return [Candidate(f"class ModelNew:\n    word = '{word} {len(context.history)}'\n", proposer="learner")]


@pytest.fixture(scope="module")
def tasks() -> list[TrainingTask]:
    return draw_tasks(4, families=["pointwise", "row"], rows=8)


async def test_episodes_become_demonstrations_and_a_second_start_asks_for_nothing_again(
    tmp_path: Path, tasks: list[TrainingTask]
) -> None:
    names = [one.task.name for one in tasks]
    gym, proposer = Gym(unusable=names[0]), Learner(silent=names[1])
    plan, told = EpisodePlan(turns=2, samples=2), []
    found = await collect_episodes(gym, tasks, proposer, plan, tmp_path, tell=told.append)
    assert [one.task.task.name for one in found.demonstrations] == [names[2], names[2], names[3], names[3]]
    assert found.without == {"the task cannot be judged": 1, "nothing was proposed": 2}
    for one in found.demonstrations:
        assert [(turn.index, turn.verdict.accepted) for turn in one.turns] == [(1, False), (2, True)]
    assert len(told) == 6
    asked, judged = proposer.asked, gym.judged
    again = await collect_episodes(gym, tasks, proposer, plan, tmp_path)
    assert again.demonstrations == found.demonstrations
    assert (proposer.asked, gym.judged) == (asked, judged)
    with pytest.raises(OptionError, match="one name"):
        await collect_episodes(gym, [tasks[0], tasks[0]], proposer, plan, tmp_path)


def demonstration(task: TrainingTask, *verdicts: Verdict) -> Demonstration:
    turns = [Turn(n, Candidate(f"class ModelNew:\n    n = {n}\n"), verdict) for n, verdict in enumerate(verdicts, 1)]
    return Demonstration(task, tuple(turns))


def test_what_is_kept_ends_with_its_best_turn(tasks: list[TrainingTask]) -> None:
    made = [
        demonstration(tasks[0], WRONG, fast(1.5), fast(1.2)),
        demonstration(tasks[1], fast(2.0), WRONG),
        demonstration(tasks[2], WRONG, WRONG),
        demonstration(tasks[3], WRONG, RIGHT),
    ]

    def kept(*arguments: Any, **options: Any) -> list[tuple[str, int]]:
        return [(one.task.task.name, len(one.turns)) for one in filtered(made, *arguments, **options)]

    names = [one.task.name for one in tasks]
    assert filtered(made, "all") == made
    assert kept("solved") == [(names[0], 2), (names[1], 1), (names[3], 2)]
    assert kept("improved") == [(names[0], 2), (names[3], 2)]
    # what was not measured has no speed; with all, turns are not cut
    assert kept("all", min_speedup=1.0) == [(names[0], 3), (names[1], 2)]
    assert kept("solved", min_speedup=1.6) == [(names[1], 1)]


def test_conversations_hold_every_turn_and_its_digest(tmp_path: Path, tasks: list[TrainingTask]) -> None:
    made = [demonstration(tasks[0], WRONG, fast(1.5)), demonstration(tasks[1], RIGHT)]
    assert export_demonstrations(made, tmp_path / "new" / "c.jsonl", templates="bare") == 2
    first, second = [json.loads(line) for line in (tmp_path / "new" / "c.jsonl").read_text().splitlines()]
    assert [one["role"] for one in first["messages"]] == ["user", "assistant", "user", "assistant"]
    assert tasks[0].task.files["model.py"].strip() in first["messages"][0]["content"]
    assert "n = 1" in first["messages"][1]["content"]
    assert "n = 2" in first["messages"][3]["content"]
    assert (first["accepted"], first["speedup_low"], first["family"]) == ([False, True], [None, 1.5], tasks[0].family)
    assert [one["role"] for one in second["messages"]] == ["user", "assistant"]
    export_demonstrations(made, tmp_path / "full.jsonl")
    full = json.loads((tmp_path / "full.jsonl").read_text().splitlines()[0])
    assert len(full["messages"][0]["content"]) > len(first["messages"][0]["content"])
    assert full["templates"] != first["templates"]


def test_the_command_filters_and_exports_both_forms(
    tmp_path: Path, tasks: list[TrainingTask], capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the train extra")
    made = [demonstration(tasks[0], WRONG, RIGHT), demonstration(tasks[1], WRONG)]
    write_demonstrations(tmp_path / "d.jsonl", made)
    words = ["data", "export", str(tmp_path / "d.jsonl"), "--keep", "solved", "--format", "json", "--out"]
    assert run([*words, str(tmp_path / "c.jsonl")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["conversations"], facts["left_out"]) == (1, 1)
    assert run([*words, str(tmp_path / "folder")]) == 0
    (row,) = datasets.load_from_disk(tmp_path / "folder")
    assert row["messages"] == json.loads((tmp_path / "c.jsonl").read_text())["messages"]


@pytest.mark.slow
@pytest.mark.long
def test_the_builtin_proposer_demonstrates_against_the_real_gym(
    tmp_path: Path, tasks: list[TrainingTask], capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "tasks.jsonl", [replace(one) for one in tasks[:2]])
    words = ["data", "trajectories", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "d.jsonl"), "--model",
             "builtin", "--device", "interpret", "--turns", "2", "--keep", "solved", "--format", "json"]  # fmt: skip
    assert run(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["demonstrations"], facts["left_out"], facts["without"]) == (2, 0, "none")
    assert all(one.turns[-1].verdict.accepted for one in read_demonstrations(tmp_path / "d.jsonl"))
    assert (tmp_path / "d.jsonl.runs" / "runs").is_dir()
