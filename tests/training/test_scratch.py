from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the train extra")

from drk.assistant.episode import Turn
from drk.gym.schema import Candidate, Verdict
from drk.training.config import load_config
from drk.training.dataset import Demonstration, write_demonstrations
from drk.training.scratch import texts_of, train_scratch, train_tokenizer
from drk.training.tasks import draw_tasks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
RIGHT = Verdict("accepted", "interpreter", "correct", correct=True, honest=None)


def demonstrations(count: int) -> list[Demonstration]:
    return [
        Demonstration(task, (Turn(1, Candidate(f"class ModelNew:\n    size = {i}\n"), RIGHT),))
        for i, task in enumerate(draw_tasks(count, families=["pointwise"]))
    ]


def test_the_tokenizer_loses_nothing_and_copies_digits_one_by_one() -> None:
    tokenizer = train_tokenizer(list(texts_of(demonstrations(20))), vocabulary=600, context_tokens=512)
    for text in ("class Model:\n    x = self.unheard_of_9 * -1.25\n", "\t\u00e9\u4e2d\U0001f600  \n\n", "<|user|"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    digits = tokenizer.convert_ids_to_tokens(tokenizer("1250", add_special_tokens=False)["input_ids"])
    assert digits == ["1", "2", "5", "0"]
    known = tokenizer(demonstrations(1)[0].task.task.files["model.py"], add_special_tokens=False)["input_ids"]
    assert len(known) < len(demonstrations(1)[0].task.task.files["model.py"]) / 2
    assert tokenizer("<|end|>", add_special_tokens=False)["input_ids"] == [tokenizer.eos_token_id]


@pytest.mark.slow
def test_a_model_from_nothing_learns(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "d.jsonl", demonstrations(6))
    values = {
        "run.output_dir": str(tmp_path / "run"), "run.save_every": 0, "model.init": "checkpoint",
        "sft.path": str(tmp_path / "d.jsonl"), "sft.batch_rows": 6, "sft.epochs": 12.0, "sft.learning_rate": 0.01,
        "sft.max_tokens": 512, "scratch.layers": 1, "scratch.width": 32, "scratch.heads": 2, "scratch.hidden": 64,
        "scratch.vocabulary": 500,
    }  # fmt: skip
    losses: list[float] = []
    config = load_config("nano-cpu", [f"{key}={json.dumps(value)}" for key, value in values.items()])
    done = train_scratch(config, lambda _, numbers: losses.append(numbers["loss"]))
    assert done.steps == len(losses) == 12
    assert losses[-1] < losses[0] / 2
    assert (done.final / "tokenizer.json").is_file()
