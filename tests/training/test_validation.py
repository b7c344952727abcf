from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the train extra")

import transformers

from drk.gym.errors import TaskError, ZygoteError
from drk.gym.schema import Candidate, Interval, Speedups, Task, Verdict
from drk.training.backends import SamplerUnavailable
from drk.training.config import RewardSection, load_config
from drk.training.prompting import Prompter, PromptSettings
from drk.training.run_folder import RunFolder
from drk.training.sampling import Prompt, Sampled
from drk.training.tasks import TrainingTask, draw_tasks
from drk.training.tiny_model import answer_tokenizer
from drk.training.validation import PolicyProposer, Validation

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WRONG = Verdict("rejected", "interpreter", "ran", correct=False, honest=None)
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None, coverage_estimate=0.5)
SOURCES = ("class ModelNew:\n    size = 1\n", "class ModelNew:\n    size = 2\n")


class Gym:
    """Accepts the second source; ``unusable`` is a task that cannot be judged, ``down`` makes every call fail."""

    def __init__(self, unusable: str = "", *, down: bool = False) -> None:
        self.device_facts: dict[str, Any] = {"device": "interpret", "gpu": None}
        self.unusable = unusable
        self.down = down

    async def inspect(self, task: Task) -> Any:
        if self.down:
            raise ZygoteError("the gym is down")
        if task.name == self.unusable:
            raise TaskError("no such class")

    async def capture(self, task: Task) -> Any:
        raise TaskError("not captured here")

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        return RIGHT if candidate.source == SOURCES[1] else WRONG


class Backend:
    """Says the first source at turn 1 and the second at turn 2: the prompt holds what was said before."""

    busy_s, outages = 0.0, 0

    def __init__(self, tokenizer: Any, *, fail: bool = False) -> None:
        self.ids = [tokenizer.convert_tokens_to_ids(f"```python\n{source}```") for source in SOURCES]
        self.fail = fail
        self.begun: list[int] = []
        self.prompts: list[Prompt] = []

    def begin(self, trajectories: int) -> None:
        self.begun.append(trajectories)

    def leave(self) -> None:
        raise AssertionError("nobody was announced")

    async def generate(self, prompt: Prompt) -> Sampled:
        if self.fail:
            raise SamplerUnavailable("no sampler")
        self.prompts.append(prompt)
        return Sampled((self.ids[self.ids[0] in prompt.ids], 2), (-0.5, -0.1), False)

    async def settle(self) -> None:
        self.begun.append(-1)

    async def close(self) -> None:
        """Hold nothing."""


@pytest.fixture(scope="module")
def tasks() -> list[TrainingTask]:
    return draw_tasks(3, families=["pointwise"], rows=8, split="held-out")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, tasks: list[TrainingTask]) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    prompts = [one.task.files[one.task.entry] for one in tasks]
    answers = [f"```python\n{source}```" for source in SOURCES]
    answer_tokenizer(prompts, answers, context_tokens=512).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def make(
    folder: Path, tasks: list[TrainingTask], gym: Gym, backend: Backend, tokenizer: Any, context: int = 512
) -> tuple[Validation, list[dict[str, float]]]:
    config = load_config("nano-cpu", ["run.validate_every=2", "tasks.held_out=3"])
    told: list[dict[str, float]] = []
    proposer = PolicyProposer(
        backend, Prompter(tokenizer, PromptSettings("bare", "append-all", context, 4)), tokenizer, 4
    )
    place = RunFolder(folder)
    return Validation(tasks, gym, proposer, config, place, asyncio.run, lambda _, facts: told.append(facts)), told


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


def test_lines_and_reports_are_written_when_they_are_due(tmp_path: Path, tasks: Any, tokenizer: Any) -> None:
    backend = Backend(tokenizer)
    callback, told = make(tmp_path, tasks, Gym(), backend, tokenizer)
    for step in (1, 2, 3, 4):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    first, second = lines(tmp_path)
    assert (first["step"], second["step"]) == (2, 4)
    assert (first["tasks"], first["left_out"], first["unusable"]) == (3, 0, 0)
    assert (first["correct/turn_1"], first["correct/turn_2"], first["correct/best"]) == (0.0, 1.0, 1.0)
    assert (first["reward/turn_1"], first["reward/turn_2"]) == (0.0, pytest.approx(1.5))
    assert not any(name.startswith("fast@") for name in first)  # no GPU: no speed
    assert told[0]["validation/correct/best"] == 1.0
    # equal draws at both validations, and nothing of the first is taken for the second
    assert [one.seed for one in backend.prompts[:6]] == [one.seed for one in backend.prompts[6:]]
    assert len({one.seed for one in backend.prompts}) == 6
    assert backend.begun == [0, -1, 0, -1]
    report = json.loads((tmp_path / "validation" / "step-2" / "report.json").read_text())
    assert (report["protocol"]["split"], report["protocol"]["turns"], report["counts"]["problems"]) == (
        "held-out",
        2,
        3,
    )
    assert report["groups"]["pointwise"]
    assert not (tmp_path / "validation" / "step-2" / "runs").exists()
    assert (tmp_path / "validation" / "step-4" / "runs").is_dir()


def test_what_cannot_be_judged_counts_in_no_share(tmp_path: Path, tasks: Any, tokenizer: Any) -> None:
    callback, _ = make(tmp_path, tasks, Gym(unusable=tasks[0].task.name), Backend(tokenizer), tokenizer)
    callback.on_step_end(None, SimpleNamespace(global_step=2), None)
    (line,) = lines(tmp_path)
    assert (line["tasks"], line["unusable"], line["correct/turn_2"]) == (3, 1, 1.0)
    failing, _ = make(tmp_path / "b", tasks, Gym(), Backend(tokenizer, fail=True), tokenizer)
    failing.on_step_end(None, SimpleNamespace(global_step=2), None)
    (line,) = lines(tmp_path / "b")
    assert (line["tasks"], line["left_out"]) == (3, 3)
    assert "correct/best" not in line


def test_a_gym_that_is_down_costs_the_validation_and_not_the_run(tmp_path: Path, tasks: Any, tokenizer: Any) -> None:
    callback, _ = make(tmp_path, tasks, Gym(down=True), Backend(tokenizer), tokenizer)
    callback.on_step_end(None, SimpleNamespace(global_step=2), None)
    (line,) = lines(tmp_path)
    assert line["not_done"] == "the gym is down"


def test_a_task_without_room_for_an_answer_is_one_without_an_answer(tmp_path: Path, tasks: Any, tokenizer: Any) -> None:
    backend = Backend(tokenizer)
    callback, _ = make(tmp_path, tasks, Gym(), backend, tokenizer, context=8)
    callback.on_step_end(None, SimpleNamespace(global_step=2), None)
    (line,) = lines(tmp_path)
    assert (line["correct/best"], line["left_out"]) == (0.0, 0)
    assert backend.prompts == []


def test_a_sampler_that_was_away_is_not_believed(tmp_path: Path, tasks: Any, tokenizer: Any) -> None:
    backend = Backend(tokenizer)
    generate = backend.generate

    async def away(prompt: Prompt) -> Sampled:
        backend.outages += 1
        return await generate(prompt)

    backend.generate = away  # type: ignore[method-assign]
    callback, _ = make(tmp_path, tasks, Gym(), backend, tokenizer)
    callback.on_step_end(None, SimpleNamespace(global_step=2), None)
    assert "away" in lines(tmp_path)[0]["not_done"]


def test_rewards_are_over_the_baseline_that_is_paid_for() -> None:
    from drk.training.validation import line_of, reward_by_turn

    speed = Speedups(Interval(2.1, 2.0, 2.2, 50))
    fast = Verdict(
        "accepted", "gpu", "measured", correct=True, honest=True, speedups=speed, headline="eager", coverage=0.8
    )
    turn = SimpleNamespace(index=1, verdict=fast)
    broken = SimpleNamespace(fault="the gym was down", turns=[turn])
    result: Any = SimpleNamespace(samples=[SimpleNamespace(fault="", turns=[turn]), broken])
    assert reward_by_turn(result, RewardSection()) == {"reward/turn_1": pytest.approx(3.8)}
    shares = {"correct": 1.0, "hacked": 0.0, "fast_at": {"1": {"value": 0.25}, "1.2": None}}
    table = {"by_turn": [{"turn": 1, "at_turn": shares}, {"turn": 2, "at_turn": None}], "best_of_history": shares}
    counts = {"samples": 4, "unusable": 0, "not_judged": 1}
    whole = {"counts": counts, "figures": {"eager": {}, "compile": {}, "fastest": table}}
    found = line_of(whole, RewardSection(baseline="headline"))
    assert (found["fast@1/turn_1"], found["fast@1/best"], "fast@1.2/best" in found) == (0.25, 0.25, False)
    assert "correct/turn_2" not in found
