from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from policy_parts import make_policy

pytest.importorskip("transformers", reason="needs the train extra")

import torch
import transformers

from drk.gym.errors import TaskError, ZygoteError
from drk.gym.schema import Candidate, Task, Verdict
from drk.training import backends
from drk.training.backends import SamplerUnavailable
from drk.training.config import GymSection, RewardSection, RolloutSection
from drk.training.prompting import Prompter, PromptSettings, PromptTooLong
from drk.training.rollout import Collector, RolloutItem, fault_share, journal_row, row_seed, unequal_groups
from drk.training.sampling import Prompt, Sampled
from drk.training.scoring import PatientJudge

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None, coverage_estimate=0.5)


class Backend:
    """Answers with one token; counts, and hangs or fails for the seeds given."""

    def __init__(self, hang: frozenset[int] = frozenset(), fail: frozenset[int] = frozenset()) -> None:
        self.busy_s = 0.0
        self.outages = 0
        self.settled = False
        self.hang = hang
        self.fail = fail
        self.prompts: list[Prompt] = []
        self.live = 0

    def begin(self, trajectories: int) -> None:
        self.live = trajectories

    def leave(self) -> None:
        self.live -= 1

    async def generate(self, prompt: Prompt) -> Sampled:
        self.prompts.append(prompt)
        if prompt.seed in self.fail:
            raise SamplerUnavailable("gone")
        await asyncio.sleep(60 if prompt.seed in self.hang else 0.001)
        return Sampled((len(self.tokenizer) - 1, 2), (-0.5, -0.25), False)

    async def settle(self) -> None:
        self.settled = True

    async def close(self) -> None:
        """Hold nothing."""

    tokenizer: Any = None


class Judge:
    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.failing = failing
        self.together = self.most = 0

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        self.together += 1
        self.most = max(self.most, self.together)
        await asyncio.sleep(0.02)
        self.together -= 1
        if task.name in self.failing:
            raise ZygoteError("the gym is down") if task.name == "down" else TaskError("no such class")
        return RIGHT


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from drk.training.tiny_model import answer_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    answer_tokenizer(["w0 w1"], ["```python\nclass ModelNew: pass\n```"], context_tokens=64).save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def make(tokenizer: Any, backend: Backend, judge: Judge, context_tokens: int = 200, **rollout: Any) -> Collector:
    backend.tokenizer = tokenizer
    settings = RolloutSection(**{"turns": 2, "max_new_tokens": 4, **rollout})
    prompter = Prompter(tokenizer, PromptSettings("bare", "append-all", context_tokens, 4))
    patient = PatientJudge(judge, GymSection(patience_s=0.05), pause_s=0.01)
    return Collector(backend, patient, prompter, tokenizer, settings, RewardSection(proxy=True))


def items(*names: str) -> list[RolloutItem]:
    return [
        RolloutItem(Task(name, {"model.py": "class Model: pass\n"}, "model.py", "Model"), place, place)
        for place, name in enumerate(names)
    ]


async def test_two_turns_are_taken_and_the_second_sees_the_first(tokenizer: Any) -> None:
    backend, judge = Backend(), Judge()
    found, clock = await make(tokenizer, backend, judge).collect(items("a", "b"), seed=7)
    assert [(one.ending, len(one.turns)) for one in found] == [("done", 2), ("done", 2)]
    first, second = found[0].turns
    assert (first.turn, second.turn, first.prompt, first.sample) == (0, 1, 0, 0)
    assert first.source == "class ModelNew: pass\n"
    assert first.score.reward == pytest.approx(1.5)
    assert second.prompt_ids[: len(first.prompt_ids) - 1] == first.prompt_ids[:-1]
    assert len(tokenizer) - 1 in second.prompt_ids
    assert {prompt.seed for prompt in backend.prompts} == {row_seed(7, s, t) for s in (0, 1) for t in (0, 1)}
    assert clock.judging_sum_s > 0
    assert judge.most == 2
    assert backend.live == 0
    assert backend.settled
    assert clock.outages == 0
    assert journal_row(first, "a", 3)["coverage"] is None


async def test_faults_and_stragglers_are_left_out_and_counted(tokenizer: Any) -> None:
    backend = Backend(hang=frozenset([row_seed(0, 2, 1)]), fail=frozenset([row_seed(0, 3, 0)]))
    judge = Judge(failing=frozenset(["down", "bad task"]))
    collector = make(tokenizer, backend, judge, trajectory_timeout_s=1.0)
    found, _ = await collector.collect(items("a", "down", "slow", "sampler", "bad task"), seed=0)
    assert [one.ending for one in found] == ["done", "fault", "straggler", "fault", "fault"]
    assert [one.cause for one in found][1] == "the gym is down"
    assert len(found[2].turns) == 1
    assert all(turn.aborted for turn in found[2].turns)
    assert not any(turn.aborted for turn in found[0].turns)
    assert fault_share(found) == 0.8


async def test_a_full_context_ends_a_trajectory_whose_turns_count(tokenizer: Any) -> None:
    probe = Prompter(tokenizer, PromptSettings("bare", "append-all", 200, 4))
    size = len(probe.prompt_ids(items("a")[0].task))
    found, _ = await make(tokenizer, Backend(), Judge(), context_tokens=size + 4 + 6).collect(items("a"), seed=0)
    # what does not fit is dropped from the history first, so that the second turn may see the task alone
    assert found[0].ending in ("context", "done")
    assert not any(turn.aborted for turn in found[0].turns)
    assert all(len(turn.prompt_ids) + 4 <= size + 10 for turn in found[0].turns)


async def test_a_task_that_never_fits_is_refused(tokenizer: Any) -> None:
    with pytest.raises(PromptTooLong, match="only 4 are there"):
        await make(tokenizer, Backend(), Judge(), context_tokens=8).collect(items("a"), seed=0)


def test_tasks_that_do_not_fit_are_named_before_the_run(tokenizer: Any) -> None:
    prompter = Prompter(tokenizer, PromptSettings("bare", "append-all", 200, 4))
    short = items("a")[0].task
    long = Task("b", {"model.py": "class Model: pass\n" * 60}, "model.py", "Model")
    prompter.check([short, short])
    with pytest.raises(PromptTooLong, match="1 of 2 tasks leave no room to answer: b") as caught:
        prompter.check([short, long])
    assert "leave them out" in caught.value.help


async def test_no_more_trajectories_run_than_slots(tokenizer: Any) -> None:
    judge = Judge()
    await make(tokenizer, Backend(), judge, concurrency=3).collect(items(*"abcdefgh"), seed=0)
    assert judge.most <= 3


async def test_a_wave_does_not_wait_for_those_who_wait_for_a_slot(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def answer(_: Any, prompts: Sequence[Prompt], **__: Any) -> list[Sampled]:
        seen.append(len(prompts))
        return [Sampled((len(tokenizer) - 1, 2), (-0.5, -0.25), False) for _ in prompts]

    monkeypatch.setattr(backends, "sample", answer)
    model = torch.nn.Linear(1, 1)
    wave = backends.WaveBackend(lambda: model, temperature=1.0, stop_ids=frozenset([2]), pad_id=0)
    collector = make(tokenizer, wave, Judge(), concurrency=3, trajectory_timeout_s=60.0)  # type: ignore[arg-type]
    found, _ = await collector.collect(items(*"abcdefgh"), seed=0)
    assert [one.ending for one in found] == ["done"] * 8
    assert sum(seen) == 16
    assert max(seen) == 3


def test_the_bare_prompt_is_the_module_with_its_inputs_and_nothing_else(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_policy(tmp_path))
    prompter = Prompter(tokenizer, PromptSettings("bare", "append-all", 200, 4))
    (message,) = prompter.messages(items("a")[0].task)
    module, *inputs = message.content.split("\n\n\n")
    assert module == "class Model: pass"
    assert [text.partition("(")[0] for text in inputs] == ["def get_inputs", "def get_init_inputs"]


def test_unequal_groups_keep_the_number_of_samples() -> None:
    assert unequal_groups([7] * 4 + [3] * 4 + [5] * 4, 4) == [7] * 2 + [3] * 6 + [5] * 4
    # a task that was drawn twice has a group of twice the size to begin with
    assert unequal_groups([1, 1, 1, 2, 2, 2, 1, 1, 1], 3) == [1] * 5 + [2] * 4
