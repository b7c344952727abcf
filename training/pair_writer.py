"""A process that writes tokenised pairs to its standard output, for ever: one part of a stream.

Started by :class:`drk.training.pair_source.PairSource` as ``python -m drk.training.pair_writer ORDER``; ORDER is JSON
with ``worker``, ``workers``, ``tokenizer`` (a folder), ``context`` (tokens), and either ``plan``
(:class:`drk.training.pairs.StreamPlan`: new pairs) or ``again`` (a folder of shards) with ``seed``: their pairs under
other names (:mod:`drk.training.renaming`). It ends when nobody reads any more.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from drk.training.documents import Tokens, document_of, write_chunk
from drk.training.packing import Document
from drk.training.pairs import PairStream, StreamPlan
from drk.training.renaming import Renamer

CHUNK = 16
NICENESS = 10
"""Writers give way to the process that trains: it needs one core, and needs it at once."""
SHARDS_AT_ONCE = 4
"""Neighbours in a shard have modules in common: so many shards are mixed."""
LEARNED_FROM = 600
"""Conversations from which a renamer learns the words that stay."""


def write_stream(order: dict[str, Any]) -> None:
    """Write chunks until the pipe breaks."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(order["tokenizer"])
    documents = renamed_documents(order, tokenizer) if "again" in order else new_documents(order, tokenizer)
    while True:
        chunk = list(itertools.islice(documents, CHUNK))
        kept = [one for one in chunk if one is not None]
        write_chunk(sys.stdout.buffer, kept, len(chunk) - len(kept))


def new_documents(order: dict[str, Any], tokenizer: Any) -> Iterator[Document | None]:
    """Yield pairs that nobody has seen, None for one that does not fit."""
    plan: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in order["plan"].items()
    }
    for pair in PairStream(StreamPlan(**plan), worker=order["worker"], workers=order["workers"]):
        yield document_of(pair, tokenizer, context=order["context"])


def renamed_documents(order: dict[str, Any], tokenizer: Any) -> Iterator[Document | None]:
    """Yield the pairs of shards under other names, None for one that does not fit."""
    tokens, folder = Tokens(tokenizer, order["context"]), Path(order["again"])
    stems = tokens.stems(folder)
    rng = random.Random(f"renamed:{order['seed']}:{order['worker']}:{order['workers']}")
    renamer: Renamer | None = None
    while True:
        mixed: list[Document] = []
        for stem in rng.sample(stems, min(SHARDS_AT_ONCE, len(stems))):
            mixed += tokens.read(folder, stem)[0]
        rng.shuffle(mixed)
        if renamer is None:
            renamer = Renamer(tokens.text(one) for one in mixed[:LEARNED_FROM])
        for one in mixed:
            yield tokens.renamed(one, renamer, rng)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        write_stream(json.loads(sys.argv[1]))
