"""The embedded network and its backend: equal to ``transformers`` where that is installed, and to itself without it."""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nano_parts import random_tensors, tiny_config, write_nano, write_tokenizer
from safetensors.torch import save_file

from drk.assistant.llm.messages import ContextOverflow, Message, ModelFault, Reply, Request
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.nano_backend import NanoBackend
from drk.assistant.llm.nano_network import NanoNetwork, NetworkShape

ANSWERS = {"first module\n": "```python\nimport torch\n```", "second one\n": "other answer\n"}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    conversations = [([Message("user", asked)], answer) for asked, answer in ANSWERS.items()]
    return write_nano(tmp_path_factory.mktemp("learnt"), conversations)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A random model: every token of its answers is a surprise."""
    config = tiny_config(len(write_tokenizer(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), tmp_path / "model.safetensors")
    return tmp_path


def settings(**changes: Any) -> ModelSettings:
    return replace(ModelSettings(context_tokens=2048, max_tokens=24), **changes)


def asked(text: str, seed: int = 1, tokens: int = 24) -> Request:
    return Request((Message("user", text),), seed=seed, max_tokens=tokens)


async def answered(folder: Path, requests: list[Request], **changes: Any) -> list[Reply]:
    backend = NanoBackend(folder, settings(**changes))
    await backend.start()
    try:
        return await asyncio.gather(*(backend.complete(request) for request in requests))
    finally:
        await backend.close()


@pytest.mark.parametrize(("model_type", "kv_heads"), [("qwen3", 2), ("llama", 1)])
def test_one_token_at_a_time_gives_what_the_whole_text_gives(model_type: str, kv_heads: int) -> None:
    config = tiny_config(300, model_type=model_type, kv_heads=kv_heads)
    network = NanoNetwork(random_tensors(config), NetworkShape.read(config))
    texts = [torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 14)]
    whole = [network.read_text(ids) for ids in texts]
    cache = network.cache(2, 20)
    for row, (ids, start) in enumerate(zip(texts, (3, 8), strict=True)):
        first = network.read_prompt(ids[:start], cache, torch.tensor([row]))
        torch.testing.assert_close(first, whole[row][start - 1], rtol=1e-5, atol=1e-5)
    for step in range(6):
        ids, places = torch.stack([texts[0][3 + step], texts[1][8 + step]]), torch.tensor([3 + step, 8 + step])
        found = network.read_token(ids, places, cache, 16)
        for row in range(2):
            torch.testing.assert_close(found[row], whole[row][places[row]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model_type", "kv_heads"), [("qwen3", 2), ("qwen3", 1), ("llama", 2)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_it_equals_transformers(model_type: str, kv_heads: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the train extra")
    config = tiny_config(300, model_type=model_type, kv_heads=kv_heads)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(config), tmp_path / "model.safetensors", {"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(3))
    found = NanoNetwork(random_tensors(config), NetworkShape.read(config)).read_text(ids)
    with torch.no_grad():
        torch.testing.assert_close(found, theirs(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


async def test_a_model_of_8_bits_says_what_it_has_learnt(learnt: Path) -> None:
    replies = await answered(learnt, [asked(text) for text in ANSWERS], temperature=0.0)
    assert [reply.text for reply in replies] == list(ANSWERS.values())
    assert not any(reply.cut for reply in replies)


async def test_answers_depend_on_their_own_seed_only(drawn: Path) -> None:
    requests = [asked("abc", 1), asked("abc", 2), asked("a longer prompt than that", 3), asked("abc", 1)]
    together = await answered(drawn, requests)
    alone = [(await answered(drawn, [request]))[0] for request in requests]
    assert together == alone
    assert together[0] == together[3]
    assert len({reply.text for reply in together}) == 3


async def test_limits_cut_and_overflow(drawn: Path) -> None:
    short, long = await answered(drawn, [asked("x", tokens=3), asked("x", tokens=9)])
    assert short.cut
    assert short.usage is not None
    assert long.usage is not None
    assert (short.usage.completion, long.usage.completion) == (3, 9)
    with pytest.raises(ContextOverflow):
        await answered(drawn, [asked("y" * 3000)])


async def test_a_narrow_top_p_is_the_likeliest_token(drawn: Path) -> None:
    greedy = await answered(drawn, [asked("abc", 5)], temperature=0.0)
    narrow = await answered(drawn, [asked("abc", 5)], top_p=1e-6)
    assert greedy == narrow
    assert greedy != await answered(drawn, [asked("abc", 5)])


def test_what_does_not_fit_is_refused_with_its_name(drawn: Path, tmp_path: Path) -> None:
    config = json.loads((drawn / "config.json").read_text())
    with pytest.raises(ModelFault, match="no network") as caught:
        NetworkShape.read(config | {"model_type": "mamba"})
    assert "transformers:FOLDER" in caught.value.help
    with pytest.raises(ModelFault, match="no network"):
        NetworkShape.read(config | {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    tensors = random_tensors(config)
    with pytest.raises(ModelFault, match="do not fit"):
        NanoNetwork(tensors, NetworkShape.read(config | {"vocab_size": 7}))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelFault) as caught:
        NanoNetwork(tensors, NetworkShape.read(config))
    assert "up_proj.weight is missing" in caught.value.cause
    with pytest.raises(ModelFault, match="no model"):
        NanoBackend(tmp_path / "absent", settings())
