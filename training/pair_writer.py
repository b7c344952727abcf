"""A process that writes tokenised pairs to its standard output, for ever: one part of a stream.

Started by :class:`drk.training.pair_source.PairSource` as ``python -m drk.training.pair_writer ORDER``; ORDER is JSON
with ``plan`` (:class:`drk.training.pairs.StreamPlan`), ``worker``, ``workers``, ``tokenizer`` (a folder) and
``context`` (tokens). It ends when nobody reads any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

import torch
import transformers

from drk.training.documents import document_of, write_chunk
from drk.training.packing import Document
from drk.training.pairs import PairStream, StreamPlan

CHUNK = 16
NICENESS = 10
"""Writers give way to the process that trains: it needs one core, and needs it at once."""


def write_stream(order: dict[str, Any]) -> None:
    """Write chunks until the pipe breaks."""
    os.nice(NICENESS)
    torch.set_num_threads(1)
    plan: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in order["plan"].items()
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(order["tokenizer"])
    stream = PairStream(StreamPlan(**plan), worker=order["worker"], workers=order["workers"])
    chunk: list[Document] = []
    too_long = 0
    for pair in stream:
        one = document_of(pair, tokenizer, context=order["context"])
        if one is None:
            too_long += 1
        else:
            chunk.append(one)
        if len(chunk) == CHUNK:
            write_chunk(sys.stdout.buffer, chunk, too_long)
            chunk, too_long = [], 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        write_stream(json.loads(sys.argv[1]))
