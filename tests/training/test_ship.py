"""Packing a checkpoint into few files and back, and its export in 8 bits: sizes, damage, and what rounding changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from nano_parts import random_tensors, tiny_config, write_nano
from safetensors.torch import load_file, save_file

from drk.assistant.llm.messages import Message
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.nano_backend import NanoBackend
from drk.assistant.llm.nano_weights import INT8_FILE, write_int8
from drk.training.errors import TrainingError
from drk.training.ship import (
    PART_BYTES,
    SHIPPED_BYTES,
    checkpoint_tensors,
    export_error,
    export_nano,
    pack_checkpoint,
    unpack_checkpoint,
)

CONVERSATIONS = [
    ([Message("user", "class Model:\n    pass\n")], "```python\nclass ModelNew:\n    pass\n```"),
    ([Message("user", "a"), Message("assistant", "b"), Message("user", "status: failed\n")], "repaired\n"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float32 as training leaves it, that knows two answers."""
    return write_nano(tmp_path_factory.mktemp("checkpoint"), CONVERSATIONS, plain=True)


def test_a_packed_checkpoint_comes_back_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    paths = pack_checkpoint(checkpoint, tmp_path / "ship", part_bytes=40_000)
    assert 3 <= len(paths) <= 4
    assert all(path.stat().st_size <= 40_000 for path in paths[:-1])
    again = pack_checkpoint(checkpoint, tmp_path / "ship")  # larger parts: fewer files, and none of the old ones left
    assert sorted(again) == sorted((tmp_path / "ship").iterdir())
    folder = unpack_checkpoint(tmp_path / "ship", tmp_path / "back")
    found, wanted = load_file(folder / "model.safetensors"), checkpoint_tensors(checkpoint)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in wanted.items())
    for name in ("config.json", "tokenizer.json", "drk_model.json", "templates/task.j2", "templates/feedback.j2"):
        assert (folder / name).read_bytes() == (checkpoint / name).read_bytes()
    with pytest.raises(TrainingError, match="holds a checkpoint already"):
        unpack_checkpoint(tmp_path / "ship", folder)


def test_missing_and_damaged_parts_are_named(checkpoint: Path, tmp_path: Path) -> None:
    part, _rest = pack_checkpoint(checkpoint, tmp_path / "ship")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(TrainingError, match="is damaged"):
        unpack_checkpoint(tmp_path / "ship", tmp_path / "one")
    part.unlink()
    with pytest.raises(TrainingError, match="is missing"):
        unpack_checkpoint(tmp_path / "ship", tmp_path / "two")
    with pytest.raises(TrainingError, match="cannot read"):
        unpack_checkpoint(tmp_path, tmp_path / "three")
    with pytest.raises(TrainingError, match="do not fit"):
        pack_checkpoint(checkpoint, tmp_path / "small", part_bytes=20_000)
    with pytest.raises(TrainingError, match=r"no model\.safetensors"):
        pack_checkpoint(tmp_path, tmp_path / "none")


async def test_the_export_answers_as_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    facts = export_nano(checkpoint, tmp_path)
    assert facts["total_bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    error = export_error(checkpoint, tmp_path, CONVERSATIONS)
    assert error.tokens > 8
    assert 0 <= error.kl_mean < 2e-3
    assert error.same_top_share == 1.0
    backend = NanoBackend(tmp_path, ModelSettings(context_tokens=2048, temperature=0.0))
    await backend.start()
    replies = backend._generate([_request(messages) for messages, _ in CONVERSATIONS])
    assert [reply.text for reply in replies] == [answer for _, answer in CONVERSATIONS]


def _request(messages: list[Message]) -> object:
    from drk.assistant.llm.messages import Request

    return Request(tuple(messages), max_tokens=64)


def test_a_model_of_the_recipe_s_size_fits_what_may_be_shipped(tmp_path: Path) -> None:
    """Random weights of recipe ``nano``: 4,096 tokens, width 384, 8 layers, hidden width 1,024."""
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "head_dim": 64}
    config = tiny_config(4096) | sizes | {"num_attention_heads": 6, "num_key_value_heads": 6}
    tensors = random_tensors(config)
    assert sum(one.numel() for one in tensors.values()) == 15_736_192
    tokenizer_bytes = 450_000
    assert write_int8(tmp_path / INT8_FILE, tensors, config) + tokenizer_bytes < SHIPPED_BYTES
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "drk_model.json"):
        (tmp_path / name).write_text("{}")
    paths = pack_checkpoint(tmp_path, tmp_path / "ship")
    assert len(paths) == 4
    assert max(path.stat().st_size for path in paths) <= PART_BYTES


def test_an_export_that_is_too_large_or_of_another_kind_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="are allowed"):
        export_nano(checkpoint, tmp_path / "large", limit_bytes=10_000)
    other = unpack_checkpoint(pack_checkpoint(checkpoint, tmp_path / "ship")[0].parent, tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"model_type": "mamba"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainingError, match="cannot be exported"):
        export_nano(other, tmp_path / "other-out")
