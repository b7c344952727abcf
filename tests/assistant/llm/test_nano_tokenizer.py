"""The embedded tokenizer: equal to the ``tokenizers`` package where that is installed, and lossless without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from nano_parts import write_tokenizer

from drk.assistant.llm.messages import Message, ModelFault
from drk.assistant.llm.nano_tokenizer import NanoTokenizer, byte_alphabet

PHRASES = ("    mask = index < n_elements\n", "    mask = index", "import torch\n", "\n\n\nclass ")
TEXTS = (
    "import torch\n\n\nclass A:\n    mask = index < n_elements\n    mask = index + 1\n",
    "input = 3.14e-10\r\n\tdef häuser(): return '日本語 🎉'  # \u3000",
    "<|end|> x <|user|>",
    "",
    "in inp inpin iinn",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made, PHRASES)
    return made


def test_the_byte_alphabet_has_a_character_for_each_byte() -> None:
    table = byte_alphabet()
    assert sorted(table) == list(range(256))
    assert len(set(table.values())) == 256
    assert (table[ord("A")], table[ord(" ")], table[ord("\n")]) == ("A", "Ġ", "Ċ")


@pytest.mark.parametrize("text", [text for text in TEXTS if "<|" not in text])
def test_any_text_comes_back(folder: Path, text: str) -> None:
    tokenizer = NanoTokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_phrases_are_one_token_the_longest_first(folder: Path) -> None:
    tokenizer = NanoTokenizer(folder)
    ids = tokenizer.encode("    mask = index < n_elements\n    mask = index;")
    assert [tokenizer.decode([one]) for one in ids] == ["    mask = index < n_elements\n", "    mask = index", ";"]
    assert [tokenizer.decode([one]) for one in tokenizer.encode("inpin")] == ["inp", "in"]


def test_a_conversation_ends_where_the_answer_begins(folder: Path) -> None:
    tokenizer = NanoTokenizer(folder)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    text = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text)
    assert tokenizer.encode_chat(messages).count(tokenizer.end) == 3
    assert tokenizer.decode(tokenizer.encode_chat(messages)) == "abc"


@pytest.mark.parametrize("text", TEXTS)
def test_it_equals_the_tokenizers_package(folder: Path, text: str) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the train extra")
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    mine = NanoTokenizer(folder)
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert mine.encode(text) == ids
    assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(mine) == theirs.get_vocab_size()


@pytest.mark.parametrize(
    "change", [{"normalizer": {"type": "NFC"}}, {"decoder": {"type": "WordPiece"}}, {"model": {"type": "Unigram"}}]
)
def test_a_tokenizer_of_another_kind_is_refused(folder: Path, tmp_path: Path, change: dict[str, object]) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    for name in ("tokenizer_config.json",):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(data | change))
    with pytest.raises(ModelFault, match="cannot be read"):
        NanoTokenizer(tmp_path)
