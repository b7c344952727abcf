"""Documents for packed training: pairs in tokens, as bytes, and kept beside the shards that they come from.

Reading a shard into tokens takes a core minutes for each hundred thousand pairs; what comes out is therefore kept in a
file beside the shard, named after the tokenizer and the context, and read from there the next time. Such a file may be
deleted at any time; where it cannot be written, nothing is kept. It has a quarter of the size and is read without the
shard too, so that a large set can travel as tokens alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import lzma
import random
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

from drk.assistant.atomic_write import write_atomically
from drk.assistant.llm.messages import Message
from drk.training.errors import TrainingError
from drk.training.packing import Document
from drk.training.pairs import SHARDS, Pair, read_shard, shards_of
from drk.training.prompting import answer_text, encode_chat
from drk.training.renaming import Renamer
from drk.training.tiny_model import ASSISTANT

TOKENS = ".tokens.xz"


def document_of(pair: Pair, tokenizer: Any, *, context: int) -> Document | None:
    """Return the pair in tokens, in the form that rollouts have, or None where it does not fit."""
    prompt = encode_chat(tokenizer, [Message(_role(role), text) for role, text in pair.messages], answer=True)
    answer = tokenizer(answer_text(pair.answer), add_special_tokens=False)["input_ids"]
    ids = array("I", (*prompt, *answer, tokenizer.eos_token_id))
    return Document(ids, len(prompt)) if len(ids) <= context else None


def _role(role: str) -> Any:
    return "assistant" if role == "assistant" else "user"


def shard_documents(folder: Path, tokenizer: Any, *, context: int) -> Iterator[Document | None]:
    """Yield the pairs of all shards in ``folder`` in tokens, None for one that does not fit.

    Raises:
        TrainingError: there is no shard, neither as text nor as tokens of these settings, or one cannot be read.
    """
    tokens = Tokens(tokenizer, context)
    for stem in tokens.stems(folder):
        documents, too_long = tokens.read(folder, stem)
        yield from documents
        yield from [None] * too_long


class Tokens:
    """Shards in tokens, as one tokenizer and one context make them, and such tokens as text again."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        settings = f"{context}\n{tokenizer.backend_tokenizer.to_str()}\n{tokenizer.chat_template}"
        self._made_by = hashlib.sha256(settings.encode()).hexdigest()[:8]
        self._tokenizer = tokenizer
        self._context = context

    def stems(self, folder: Path) -> list[str]:
        """Return the names, without endings, of the shards that are there as text or as tokens of these settings.

        Raises:
            TrainingError: there is none.
        """
        alone = list(folder.glob(f"*.{self._made_by}-*{TOKENS}"))
        texts = list(folder.glob(SHARDS)) if alone else shards_of(folder)
        return sorted({_stem(path) for path in (*alone, *texts)})

    def read(self, folder: Path, stem: str) -> tuple[list[Document], int]:
        """Return a shard's pairs in tokens and how many did not fit; they are kept beside it.

        Raises:
            TrainingError: it cannot be read.
        """
        shard = folder / f"{stem}.jsonl.gz"
        if not shard.exists():
            (kept,) = folder.glob(f"{stem}.{self._made_by}-*{TOKENS}")
            found = _kept_documents(kept)
            if found is None:
                raise TrainingError(f"cannot read the tokens {kept}", help="delete it and write its shard again")
            return found
        key = hashlib.sha256(shard.read_bytes()).hexdigest()[:8]
        kept = shard.with_name(f"{stem}.{self._made_by}-{key}{TOKENS}")
        found = _kept_documents(kept)
        if found is None:
            documents = [document_of(pair, self._tokenizer, context=self._context) for pair in read_shard(shard)]
            found = [one for one in documents if one is not None], documents.count(None)
            _keep_documents(kept, *found)
        return found

    def text(self, one: Document) -> str:
        """Return the conversation and its answer as they were, roles and ends included."""
        return str(self._tokenizer.decode(one.ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def renamed(self, one: Document, renamer: Renamer, rng: random.Random) -> Document | None:
        """Return a pair under other names, or None where it does not fit any more."""
        text = renamer.renamed(self.text(one), rng)
        prompt, _, answer = text.rpartition(ASSISTANT)
        ahead = self._tokenizer(prompt + ASSISTANT, add_special_tokens=False)["input_ids"]
        ids = array("I", (*ahead, *self._tokenizer(answer, add_special_tokens=False)["input_ids"]))
        return Document(ids, len(ahead)) if len(ids) <= self._context else None


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _kept_documents(path: Path) -> tuple[list[Document], int] | None:
    try:
        return read_chunk(io.BytesIO(lzma.decompress(path.read_bytes())))
    except (OSError, lzma.LZMAError):
        return None


def _keep_documents(path: Path, documents: Sequence[Document], too_long: int) -> None:
    chunk = io.BytesIO()
    write_chunk(chunk, documents, too_long)
    with contextlib.suppress(OSError):
        write_atomically(path, lzma.compress(chunk.getvalue()))


def write_chunk(out: BinaryIO, documents: Sequence[Document], too_long: int) -> None:
    """Write documents for :func:`read_chunk`: counts, then for each its length, where its answer begins, its ids."""
    parts = [struct.pack("<II", len(documents), too_long)]
    for one in documents:
        parts.append(struct.pack("<II", len(one.ids), one.answer_at) + array("I", one.ids).tobytes())
    out.write(b"".join(parts))
    out.flush()


def read_chunk(source: IO[bytes]) -> tuple[list[Document], int] | None:
    """Return documents and how many did not fit, or None at the end of what a writer says."""
    head = source.read(8)
    if len(head) < 8:
        return None
    count, too_long = struct.unpack("<II", head)
    found = []
    for _ in range(count):
        sizes = source.read(8)
        if len(sizes) < 8:
            return None
        length, answer_at = struct.unpack("<II", sizes)
        ids = array("I", source.read(4 * length))
        if len(ids) < length:
            return None
        found.append(Document(ids, answer_at))
    return found, too_long
