"""A tiny random model with a byte tokenizer, made here: real loading, real sampling, real parsing."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.budget import Budget
from drk.assistant.llm.messages import ContextOverflow, Message, ModelFault, Request
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.optimize import Plan, begin_run, optimize
from drk.assistant.proposers import make_proposer, opened
from drk.gym.schema import Task

pytest.importorskip("transformers", reason="transformers is not installed (the train extra)")
from drk.assistant.llm.transformers_backend import TransformersBackend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
CONTEXT = 12_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 16 wide, one token a byte."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {char: i for i, char in enumerate(alphabet)} | {"<end>": len(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
        fast.save_pretrained(folder)
        config = transformers.LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
            eos_token_id=len(alphabet),
            bos_token_id=None,
            pad_token_id=len(alphabet),
        )
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def settings(**changes: Any) -> ModelSettings:
    return replace(ModelSettings(context_tokens=CONTEXT, max_tokens=24), **changes)


def request(text: str, seed: int = 1) -> Request:
    return Request((Message("user", text),), seed=seed, max_tokens=24)


async def test_it_answers_and_counts_exactly(checkpoint: Path) -> None:
    backend = TransformersBackend(str(checkpoint), settings())
    await backend.start()
    assert backend.count_tokens("häuser") == 7
    one = await backend.complete(request("hello"))
    again = await backend.complete(request("hello"))
    assert one == again
    assert one.usage is not None
    assert one.usage.prompt == len("user:\nhello\n\nassistant:\n")
    assert 1 <= one.usage.completion <= 24
    assert one.cut or one.usage.completion <= 24
    await backend.close()


async def test_waiting_requests_go_together_and_keep_their_places(checkpoint: Path) -> None:
    backend = TransformersBackend(str(checkpoint), settings(concurrency=4))
    await backend.start()
    texts = ["a", "b" * 40, "c" * 7, "d" * 20, "e", "f" * 3]
    replies = await asyncio.gather(*(backend.complete(request(text, seed)) for seed, text in enumerate(texts)))
    extra = len("user:\n\n\nassistant:\n")
    assert [reply.usage and reply.usage.prompt - extra for reply in replies] == [len(text) for text in texts]
    await backend.close()


async def test_a_conversation_too_long_overflows_and_its_neighbours_do_not(checkpoint: Path) -> None:
    backend = TransformersBackend(str(checkpoint), settings())
    await backend.start()
    long, short = await asyncio.gather(
        backend.complete(request("x" * CONTEXT)), backend.complete(request("y")), return_exceptions=True
    )
    assert isinstance(long, ContextOverflow)
    assert not isinstance(short, BaseException)
    await backend.close()


async def test_it_is_carried_through_a_search(
    checkpoint: Path, project: Path, silu_task: Task, tmp_path: Path, make_gym: Any, verdicts: Any
) -> None:
    """A random model writes no candidate: every turn says so, and the run ends in order."""
    plan = Plan(silu_task, None, Budget(turns=2, samples=2), cache_dir=tmp_path / "cache")
    run = begin_run(plan, tmp_path / "runs", {})
    proposer = make_proposer(f"transformers:{checkpoint}", settings())
    async with opened(proposer):
        answer = await optimize(plan, run, make_gym({}), proposer, emit=lambda _: None)
    assert [turn["error"].split(":")[0] for turn in answer.result["turns"]] == ["no-candidate"] * 4
    spent = answer.result["spending"]
    assert (spent["calls"], spent["cost_usd"], spent["no_candidate_rate"]) == (4, 0.0, 1.0)
    assert spent["prompt_tokens"] > 4000


async def test_a_folder_is_a_checkpoint_and_what_is_wrong_is_named(checkpoint: Path, tmp_path: Path) -> None:
    assert make_proposer(str(checkpoint)).name == f"transformers:{checkpoint}"
    with pytest.raises(ModelFault, match="no checkpoint at"):
        make_proposer("transformers:/absent")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text(json.dumps({"model_type": "no-such-type"}))
    proposer = make_proposer(f"transformers:{broken}")
    with pytest.raises(ModelFault, match="cannot load"):
        async with opened(proposer):
            pass


def test_a_missing_extra_gives_the_line_to_type(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelFault, match="need the train extra") as caught:
        TransformersBackend(str(checkpoint), settings())
    assert caught.value.help.startswith("pip install 'drk[train]'")
