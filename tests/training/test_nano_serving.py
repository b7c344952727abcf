"""The nano model is asked as it was taught: the proposer's conversations are training's, token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the train extra")

from drk.assistant.budget import Reservations
from drk.assistant.episode import Turn
from drk.assistant.intake import resolve_target
from drk.assistant.llm.call_journal import CallJournal
from drk.assistant.llm.factory import make_model
from drk.assistant.llm.messages import Message
from drk.assistant.llm.proposer import LanguageModelProposer, _Step
from drk.assistant.module_excerpt import module_excerpt
from drk.assistant.proposers import ProposeContext
from drk.gym.devices import device_facts
from drk.gym.schema import Candidate
from drk.training.config import load_config
from drk.training.documents import document_of
from drk.training.faults import insert_fault
from drk.training.model_facts import write_model_facts
from drk.training.pairs import Pair, bare_messages
from drk.training.scratch import pair_tokenizer
from drk.training.ship import export_error, export_nano
from drk.training.tasks import FAMILIES, TrainingTask, draw_task
from drk.training.teacher import capture_structure, dressed, teach
from drk.training.tiny_model import new_model
from drk.training.verdict_templates import fault_verdict, right_verdict


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_generated_modules_are_shown_word_for_word(family: str) -> None:
    for seed in range(12):
        task = draw_task(family, seed, dress=seed % 3).task
        assert module_excerpt(task) == task.files[task.entry].strip()


def conversation_of(kind: str, seed: int) -> tuple[TrainingTask, Pair, tuple[Turn, ...]]:
    """Return a generated task, a pair on it, and the turns that its conversation shows."""
    task, graph = dressed(capture_structure("row", seed, rows=8), 1)
    rng = random.Random(seed)
    right = Candidate(teach(task, graph, rng).source)
    wrong = Candidate(insert_fault(right.source, "wrong").source)
    broken = Candidate(insert_fault(right.source, "syntax").source)
    turns = {
        "first": (),
        "repair": (Turn(1, wrong, fault_verdict(wrong, "wrong", rng)),),
        "repairs": (
            Turn(1, broken, fault_verdict(broken, "syntax", rng)),
            Turn(2, wrong, fault_verdict(wrong, "wrong", rng)),
        ),
        "lazy": (Turn(1, right, right_verdict(right, rng, share=0.4, slow=True)),),
    }[kind]
    messages = bare_messages(task.task.files[task.task.entry], turns)
    return task, Pair(messages, right.source, "row", "", seed, 1, kind, kind == "lazy"), turns


KINDS = ("first", "repair", "repairs", "lazy")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    pairs = [conversation_of(kind, seed)[1] for seed, kind in enumerate(KINDS)]
    return pair_tokenizer(pairs, vocabulary=700, phrases=60, context_tokens=16384)


@pytest.fixture(scope="module")
def exported(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model, as training saves it and as it is shipped."""
    folder, out = tmp_path_factory.mktemp("final"), tmp_path_factory.mktemp("shipped")
    new_model(tokenizer, layers=1, width=32, heads=2, context_tokens=16384, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_model_facts(folder, load_config("nano", ["model.context_tokens=16384"]))
    export_nano(folder, out)
    return folder, out


def user_context(task: TrainingTask, turns: tuple[Turn, ...], folder: Path) -> ProposeContext:
    """Return what the search tells a proposer about the task's module, written to a file by a user."""
    path = folder / "theirs.py"
    path.write_text(task.task.files[task.task.entry])
    return ProposeContext(resolve_target(f"{path}:{task.task.target}"), None, device_facts("sm_90"), turns)


def asked(proposer: LanguageModelProposer, context: ProposeContext) -> tuple[Message, ...]:
    step = _Step(context, len(context.history) + 1, CallJournal(None), Reservations(None, 0.0))
    return proposer._conversation(step, 0)


@pytest.mark.parametrize(("seed", "kind"), list(enumerate(KINDS)))
async def test_the_proposer_asks_in_the_tokens_of_training(
    seed: int, kind: str, tokenizer: Any, exported: tuple[Path, Path], tmp_path: Path
) -> None:
    task, pair, turns = conversation_of(kind, seed)
    proposer = make_model(f"nano:{exported[1]}")
    await proposer.start()
    messages = asked(proposer, user_context(task, turns, tmp_path))
    assert [(one.role, one.content) for one in messages] == list(pair.messages)
    document = document_of(pair, tokenizer, context=10**6)
    assert document is not None
    ids = proposer._backend._parts()[1].encode_chat(messages)  # type: ignore[attr-defined]
    assert ids == list(document.ids[: document.answer_at])
    await proposer.close()


def test_a_saved_checkpoint_is_exported_and_stays_close(exported: tuple[Path, Path]) -> None:
    _, pair, _ = conversation_of("first", 0)
    messages = [Message("user", text) for _, text in pair.messages]
    error = export_error(*exported, [(messages, pair.answer)])
    assert error.tokens > 50
    assert error.kl_mean < 1e-4
    assert error.same_top_share > 0.95


def test_settings_follow_the_recipe(exported: tuple[Path, Path]) -> None:
    settings = make_model(f"nano:{exported[1]}")._settings
    config = load_config("nano")
    assert settings.policy == config.prompt.policy
    assert settings.max_tokens == config.rollout.max_new_tokens
    assert settings.temperature == config.rollout.temperature
