"""Pairs in bulk: repeatable, told as rollouts tell them, in the gym's words, in tokens and back."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the train extra")

import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from drk.assistant.answer_parser import parse_answer
from drk.assistant.episode import Turn, digest
from drk.gym.engine import Gym
from drk.gym.schema import Candidate
from drk.gym.settings import GymSettings
from drk.training.documents import Tokens, document_of, shard_documents
from drk.training.errors import TrainingError
from drk.training.faults import ALL_KINDS, insert_fault
from drk.training.pair_writer import renamed_documents
from drk.training.pairs import Pair, PairStream, StreamPlan, bare_messages, read_pairs, write_shard
from drk.training.prompting import Prompter, PromptSettings
from drk.training.renaming import Renamer, module_of
from drk.training.scratch import pair_tokenizer
from drk.training.tasks import draw_task, split_of
from drk.training.teacher import capture_structure, dressed, teach
from drk.training.verdict_templates import TEMPLATE_NOTE, fault_verdict, right_verdict

PLAN = StreamPlan(("pointwise", "row"), seed=3, rows=8, dresses=4, reservoir=3)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return list(itertools.islice(PairStream(PLAN), 48))


@pytest.fixture(scope="module")
def tokenizer(pairs: list[Pair]) -> transformers.PreTrainedTokenizerFast:
    return pair_tokenizer(pairs, vocabulary=1024, phrases=200, context_tokens=2048)


def test_a_stream_repeats_and_its_parts_differ(pairs: list[Pair]) -> None:
    assert list(itertools.islice(PairStream(PLAN), 12)) == pairs[:12]
    other = list(itertools.islice(PairStream(PLAN, worker=1, workers=2), 8))
    mine = {(one.family, one.seed) for one in itertools.islice(PairStream(PLAN, worker=0, workers=2), 8)}
    assert mine.isdisjoint((one.family, one.seed) for one in other)


def test_a_stream_stays_on_its_side_of_the_split(pairs: list[Pair]) -> None:
    assert all(split_of(draw_task(one.family, one.seed)) == "train" for one in pairs)
    assert {one.kind == "first" for one in pairs} == {True, False}
    assert len({one.answer for one in pairs}) > 40
    assert any(one.lazy for one in pairs)


def test_conversations_are_those_of_rollouts(tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    structure = capture_structure("row", 1, rows=8)
    task, graph = dressed(structure, 0)
    right = Candidate(teach(task, graph, random.Random(0)).source)
    wrong = Candidate(insert_fault(right.source, "wrong").source)
    rng = random.Random(0)
    turns = (Turn(1, wrong, fault_verdict(wrong, "wrong", rng)), Turn(2, right, right_verdict(right, rng, share=0.6)))
    shown = Prompter(tokenizer, PromptSettings("bare", "append-all", 10**6, 0)).messages(task.task, turns)
    assert [(one.role, one.content) for one in shown] == list(bare_messages(task.task.files["model.py"], turns))


def test_shards_are_written_once_and_read_back(tmp_path: Path) -> None:
    path = write_shard(tmp_path, PLAN, worker=0, workers=1, pairs=6)
    stamp = path.stat().st_mtime_ns
    assert write_shard(tmp_path, PLAN, worker=0, workers=1, pairs=6).stat().st_mtime_ns == stamp
    assert list(read_pairs(tmp_path)) == list(itertools.islice(PairStream(PLAN), 6))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrainingError, match="cannot read the shard"):
        list(read_pairs(tmp_path))
    with pytest.raises(TrainingError, match="no shards"):
        list(read_pairs(tmp_path / "none"))


def test_documents_hold_the_answer(pairs: list[Pair], tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    document = document_of(pairs[0], tokenizer, context=10**6)
    text = tokenizer.decode(document.ids[document.answer_at :], skip_special_tokens=True)
    assert parse_answer(text, cut=False).source.strip() == pairs[0].answer.strip()
    assert document.ids[-1] == tokenizer.eos_token_id
    assert document_of(pairs[0], tokenizer, context=10) is None


def test_phrases_shorten_answers(pairs: list[Pair], tokenizer: transformers.PreTrainedTokenizerFast) -> None:
    plain = pair_tokenizer(pairs, vocabulary=1024, phrases=0, context_tokens=2048)
    count = [len(one(pairs[5].answer)["input_ids"]) for one in (tokenizer, plain)]
    assert count[0] < count[1] / 2
    for pair in pairs[:8]:
        for text in (pair.answer, *(text for _, text in pair.messages)):
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_comes_back(tokenizer: transformers.PreTrainedTokenizerFast, text: str) -> None:
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    text = f"    mask = index < n_elements\n{text}\n\n\n@triton.jit\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_faults_change_what_they_say() -> None:
    structure = capture_structure("row", 7, rows=8)
    task, graph = dressed(structure, 0)
    source = teach(task, graph, random.Random(1), lazy=False).source
    made = {kind: insert_fault(source, kind, seed=2) for kind in ALL_KINDS}
    assert sum(fault is not None for fault in made.values()) >= 8
    assert all(fault is None or fault.source != source for fault in made.values())


@pytest.mark.slow
async def test_templates_speak_as_the_gym_does() -> None:
    """Line by line, numbers and names apart, of four kinds of fault under the interpreter."""
    import re

    structure = capture_structure("row", 7, rows=8)
    task, graph = dressed(structure, 0)
    right = Candidate(teach(task, graph, random.Random(1), lazy=False).source)
    rng = random.Random(0)

    def form(verdict, candidate: Candidate) -> list[str]:
        text = digest(verdict, candidate=candidate).replace("interpreter", "gpu")
        lines = [re.sub(r"[\d.]+(e[-+]\d+)?", "N", line) for line in text.splitlines()]
        return [line for line in lines if not line.startswith(("coverage", "failing", "kernel"))]

    async with Gym(GymSettings(device="interpret", seeds=1, offline_compile=False, parallel=2)) as gym:
        for kind in ("syntax", "crash", "compile", "wrong"):
            candidate = Candidate(insert_fault(right.source, kind, seed=1).source)
            real = await gym.evaluate(task.task, candidate)
            template = fault_verdict(candidate, kind, rng)
            while template.evidence != "interpreter":
                template = fault_verdict(candidate, kind, rng)
            assert template.notes == (TEMPLATE_NOTE,)
            assert form(template, candidate) == form(real, candidate), kind
        real = await gym.evaluate(task.task, right)
    assert real.accepted, real.error


def test_shards_are_read_into_tokens_once(pairs: list[Pair], tmp_path: Path) -> None:
    """What is kept beside the shard is read the next time, another tokenizer's or a broken file is not."""
    lines = "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs[:6])
    (tmp_path / "pairs-0000-00000-of-00001.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    tokenizer = pair_tokenizer(pairs[:6], vocabulary=600, phrases=40, context_tokens=2048)
    first = list(shard_documents(tmp_path, tokenizer, context=2048))
    told = [document_of(pair, tokenizer, context=2048) for pair in pairs[:6]]
    assert first == [one for one in told if one is not None] + [None] * told.count(None)
    (kept,) = tmp_path.glob("*.tokens.xz")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drk.training.documents.document_of", None)
        assert list(shard_documents(tmp_path, tokenizer, context=2048)) == first
    kept.write_bytes(kept.read_bytes()[:-40])
    assert list(shard_documents(tmp_path, tokenizer, context=2048)) == first
    other = pair_tokenizer(pairs[:6], vocabulary=500, phrases=20, context_tokens=2048)
    assert list(shard_documents(tmp_path, other, context=2048)) != first
    assert list(shard_documents(tmp_path, tokenizer, context=1)) == [None] * 6


def test_documents_come_again_under_other_names(
    pairs: list[Pair], tokenizer: transformers.PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Tokens become text and the same tokens; other names change both, in the prompt and in the answer."""
    lines = "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs[:24])
    (tmp_path / "pairs-0000-00000-of-00001.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    given = [one for one in shard_documents(tmp_path, tokenizer, context=2048) if one is not None]
    tokens = Tokens(tokenizer, 2048)
    texts = [tokens.text(one) for one in given]
    nothing = Renamer([f"<|user|>a = 1<|end|>{text}" for text in texts])  # every word is another text's
    assert [tokens.renamed(one, nothing, random.Random(0)) for one in given] == given
    order = {"again": str(tmp_path), "seed": 0, "worker": 0, "workers": 1, "context": 2048}
    others = list(itertools.islice(renamed_documents(order, tokenizer), len(given)))
    own = {module_of(text): text for text in texts}
    changed = 0
    for one in others:
        assert one is not None
        text = tokens.text(one)
        assert tokenizer.decode(one.ids[: one.answer_at]).endswith("<|assistant|>")
        changed += module_of(text) not in own and text.count("<|end|>") in {own[key].count("<|end|>") for key in own}
    assert changed > len(given) // 2
    tokens = Tokens(tokenizer, 64)
    assert tokens.renamed(given[0], nothing, random.Random(0)) is None


def test_tokens_are_read_without_their_shard(pairs: list[Pair], tmp_path: Path) -> None:
    """A large set travels as tokens alone; those of another tokenizer or context are not taken for it."""
    tokenizer = pair_tokenizer(pairs[:6], vocabulary=600, phrases=40, context_tokens=2048)
    shards = [tmp_path / f"pairs-0000-0000{number}-of-00002.jsonl.gz" for number in range(2)]
    for number, shard in enumerate(shards):
        lines = "".join(json.dumps(asdict(pair)) + "\n" for pair in pairs[3 * number : 3 * number + 3])
        shard.write_bytes(gzip.compress(lines.encode()))
    whole = list(shard_documents(tmp_path, tokenizer, context=2048))
    shards[0].unlink()
    assert list(shard_documents(tmp_path, tokenizer, context=2048)) == whole
    shards[1].unlink()
    assert list(shard_documents(tmp_path, tokenizer, context=2048)) == whole
    with pytest.raises(TrainingError, match="no shards"):
        next(shard_documents(tmp_path, tokenizer, context=2047))
    for kept in tmp_path.glob("*.tokens.xz"):
        kept.write_bytes(b"cut")
    with pytest.raises(TrainingError, match="cannot read the tokens"):
        next(shard_documents(tmp_path, tokenizer, context=2048))
