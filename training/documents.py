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
    settings = f"{context}\n{tokenizer.backend_tokenizer.to_str()}\n{tokenizer.chat_template}"
    made_by = hashlib.sha256(settings.encode()).hexdigest()[:8]
    texts = {_stem(shard): shard for shard in folder.glob(SHARDS)}
    alone = {_stem(kept): kept for kept in folder.glob(f"*.{made_by}-*{TOKENS}") if _stem(kept) not in texts}
    if not texts and not alone:
        shards_of(folder)  # says what is missing
    for stem in sorted(texts | alone):
        if stem in alone:
            documents, too_long = _documents_alone(alone[stem])
        else:
            documents, too_long = _documents_of(texts[stem], made_by, tokenizer, context)
        yield from documents
        yield from [None] * too_long


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


def _documents_alone(path: Path) -> tuple[list[Document], int]:
    found = _kept_documents(path)
    if found is None:
        raise TrainingError(f"cannot read the tokens {path}", help="delete it and write its shard again")
    return found


def _documents_of(shard: Path, made_by: str, tokenizer: Any, context: int) -> tuple[list[Document], int]:
    key = hashlib.sha256(shard.read_bytes()).hexdigest()[:8]
    kept = shard.with_name(f"{_stem(shard)}.{made_by}-{key}{TOKENS}")
    found = _kept_documents(kept)
    if found is None:
        documents = [document_of(pair, tokenizer, context=context) for pair in read_shard(shard)]
        found = [one for one in documents if one is not None], documents.count(None)
        _keep_documents(kept, *found)
    return found


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
