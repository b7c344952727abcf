from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the train extra")

import torch
import transformers
from safetensors.torch import load_file

from drk.assistant.episode import Turn
from drk.gym.schema import Candidate, Failure, Verdict
from drk.training.config import load_config
from drk.training.dataset import Demonstration, write_demonstrations
from drk.training.dry_run import describe_sft
from drk.training.errors import OptionError
from drk.training.prompting import Prompter, PromptSettings, answer_text
from drk.training.sft import IGNORED, answer_row, as_record, demonstration_rows, sft_rows, train_sft
from drk.training.tasks import draw_tasks
from drk.training.tiny_model import answer_tokenizer, new_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
WRONG = Verdict("failed", "interpreter", "loaded", correct=False, honest=None, error=Failure("run", "Oops", "bad", 1))
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None)
SOURCES = ("class ModelNew:\n    wrong = 1\n", "class ModelNew:\n    right = 1\n")


def demonstrations(count: int = 3) -> list[Demonstration]:
    turns = (Turn(1, Candidate(SOURCES[0]), WRONG), Turn(2, Candidate(SOURCES[1]), RIGHT))
    return [Demonstration(task, turns) for task in draw_tasks(count, families=["pointwise"], rows=8)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft-policy")
    prompts = [one.task.task.files["model.py"] for one in demonstrations()]
    tokenizer = answer_tokenizer(prompts, [answer_text(source) for source in SOURCES], context_tokens=512)
    new_model(tokenizer, layers=1, width=32, heads=2, context_tokens=512, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tokenizer(policy: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(policy)


def prompter(tokenizer: Any) -> Prompter:
    return Prompter(tokenizer, PromptSettings("bare", "append-all", 512, 0))


def test_only_accepted_answers_are_learned_and_the_mistake_stands_in_the_prompt(tokenizer: Any) -> None:
    one = demonstrations(1)[0]
    (row,) = demonstration_rows(one, prompter(tokenizer), tokenizer)
    wrong, right = tokenizer.convert_tokens_to_ids([answer_text(source) for source in SOURCES])
    assert row.answer_ids == (right, tokenizer.eos_token_id)
    assert wrong in row.prompt_ids
    assert right not in row.prompt_ids
    # the prompt is the one that a rollout would show at this turn
    assert row.prompt_ids == prompter(tokenizer).prompt_ids(one.task.task, one.turns[:1])
    assert len(demonstration_rows(one, prompter(tokenizer), tokenizer, learn="all")) == 2


def test_labels_are_on_the_answer_only(tokenizer: Any) -> None:
    record = as_record(demonstration_rows(demonstrations(1)[0], prompter(tokenizer), tokenizer)[0])
    assert len(record["labels"]) == len(record["input_ids"])
    assert record["labels"][:-2] == [IGNORED] * (len(record["labels"]) - 2)
    assert record["labels"][-2:] == record["input_ids"][-2:]


def test_a_template_that_rewrites_answers_still_gives_the_answer(tokenizer: Any) -> None:
    from drk.assistant.llm.messages import Message

    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}w{% endif %}"
    )
    row = answer_row([Message("user", "hello")], SOURCES[1], tokenizer)
    assert row.answer_ids == tuple(tokenizer.convert_tokens_to_ids([answer_text(SOURCES[1]), "<|end|>"]))


def test_what_does_not_fit_is_left_out_and_counted(tokenizer: Any) -> None:
    rows, left_out = sft_rows(demonstrations(3), prompter(tokenizer), tokenizer, max_tokens=5)
    assert (rows, left_out) == ([], 3)


@pytest.mark.slow
def test_fine_tuning_learns_the_answers_resumes_and_gives_a_plain_folder(policy: Path, tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "d.jsonl", demonstrations(4))

    def run(name: str, *more: str) -> tuple[Any, list[float]]:
        losses: list[float] = []
        values = {
            "run.output_dir": str(tmp_path / name), "run.save_every": 3, "model.init": "checkpoint",
            "model.path": str(policy), "sft.path": str(tmp_path / "d.jsonl"), "sft.batch_rows": 4,
            "sft.micro_batches": 2, "sft.learning_rate": 0.02, "sft.max_tokens": 512,
        }  # fmt: skip
        overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        config = load_config("nano-cpu", [*overrides, *more])
        return train_sft(config, lambda _, numbers: losses.append(numbers["loss"])), losses

    whole, losses = run("whole", "sft.epochs=6.0")
    assert whole.steps == 6
    assert losses[-1] < losses[0] / 2
    model = transformers.AutoModelForCausalLM.from_pretrained(whole.final)
    assert transformers.AutoTokenizer.from_pretrained(whole.final).chat_template
    assert sum(p.numel() for p in model.parameters()) > 0
    import shutil

    shutil.copytree(tmp_path / "whole", tmp_path / "cut", ignore=shutil.ignore_patterns("checkpoint-6", "final"))
    again, later = run("cut", "sft.epochs=6.0")
    assert (again.resumed_at, again.steps) == (3, 6)
    assert later == pytest.approx(losses[3:], abs=1e-6)
    left, right = load_file(whole.final / "model.safetensors"), load_file(again.final / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_dry_run_says_what_would_be_learned(policy: Path, tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "d.jsonl", demonstrations(5))
    values = {"model.path": str(policy), "sft.path": str(tmp_path / "d.jsonl"), "sft.batch_rows": 4,
              "sft.micro_batches": 2, "sft.epochs": 3.0, "sft.max_tokens": 512}  # fmt: skip
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    facts = describe_sft(load_config("nano-cpu", overrides))
    assert (facts["demonstrations"], facts["rows"], facts["left_out"], facts["steps"]) == (5, 5, 0, 6)
    assert (facts["rows_per_micro_batch"], facts["answer_tokens"]) == (2, 10)
    assert facts["first_answer"].endswith("<|end|>") and "right = 1" in facts["first_answer"]
    assert "wrong = 1" in facts["first_prompt"]
    assert facts["memory_gb_estimate"]["states"] == pytest.approx(facts["parameters"] * 16 / 1e9, abs=1e-3)
    with pytest.raises(OptionError, match="5 were too long"):
        describe_sft(load_config("nano-cpu", [*overrides, "sft.max_tokens=5"]))


def test_nothing_to_learn_is_said(policy: Path, tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "d.jsonl", [])
    values = {"run.output_dir": str(tmp_path / "r"), "model.path": str(policy), "sft.path": str(tmp_path / "d.jsonl")}
    with pytest.raises(OptionError, match="no row of"):
        train_sft(load_config("nano-cpu", [f"{k}={json.dumps(v)}" for k, v in values.items()]), lambda _, __: None)
