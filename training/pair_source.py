"""Documents for packed training: from shards, from processes that write pairs while training goes on, or both.

Shards are read in an order that the seed fixes, and again in another order when they are used up. Writers put documents
into a queue: new pairs, and those of the shards under other names. What has not come when a batch is due is drawn from
those that came before, so that the GPU never waits (``fresh``, ``renamed`` and ``used`` count). Each writer of new
pairs has its own part of the structures.

Honest limits: with writers a run does not repeat exactly, since their speed decides what is fresh.
"""

from __future__ import annotations

import contextlib
import json
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from drk.training.config_sections import ScratchSection
from drk.training.documents import read_chunk, shard_documents
from drk.training.errors import TrainingError
from drk.training.packing import Document
from drk.training.pairs import Pair, PairStream, StreamPlan, read_pairs

WAIT_S = 300.0
"""How long the first documents of the writers are waited for: importing and the first captures take seconds."""
RESERVOIR = 200_000


def stream_plan(section: ScratchSection, seed: int, *, held_out: bool = False) -> StreamPlan:
    """Return what the writers draw."""
    return StreamPlan(section.families, seed, section.rows, section.multi_turn, held_out)


@dataclass
class Counts:
    """Documents that came for the first time, that came again under other names, that were used, that did not fit."""

    fresh: int = 0
    renamed: int = 0
    used: int = 0
    too_long: int = 0


class PairSource:
    """Gives documents for ever; a context manager, since writers must end. ``counts`` says what was given."""

    def __init__(
        self, section: ScratchSection, tokenizer_path: Path, tokenizer: Any, *, context: int, seed: int
    ) -> None:
        self._section = section
        self._path = tokenizer_path
        self._tokenizer = tokenizer
        self._context = context
        self._seed = seed
        self._rng = random.Random(f"source:{seed}")
        self._kept: list[Document] = []
        self._order: list[int] = []
        self._writers: list[Any] = []
        self._readers: list[threading.Thread] = []
        self._queue: queue.Queue[tuple[list[Document], int, bool]] | None = None
        self._closed = False
        self.counts = Counts()

    def __enter__(self) -> PairSource:
        if self._section.pairs:
            for one in shard_documents(Path(self._section.pairs), self._tokenizer, context=self._context):
                self._keep(one)
            if not self._kept:
                raise TrainingError(f"no pair of {self._section.pairs} fits in {self._context} tokens")
        if not self._kept and not self._section.workers:
            raise TrainingError("nothing to learn from", help="scratch.pairs = FOLDER, or scratch.workers = 4")
        self._start_writers()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for one in self._writers:
            one.kill()
            one.wait()
        for reader in self._readers:  # what they read from must not be closed under them
            reader.join()
        for one in self._writers:
            one.stdout.close()

    def _start_writers(self) -> None:
        section, orders = self._section, []
        plan = {"plan": asdict(stream_plan(section, self._seed))}
        again = {"again": section.pairs, "seed": self._seed}
        for kind, count in ((plan, section.workers), (again, section.renamers if section.pairs else 0)):
            orders += [{**kind, "worker": number, "workers": count} for number in range(count)]
        if not orders:
            return
        self._queue = queue.Queue(maxsize=4 * len(orders) + 16)
        for order in orders:
            text = json.dumps({**order, "tokenizer": str(self._path), "context": self._context})
            command = [sys.executable, "-m", "drk.training.pair_writer", text]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
            reader = threading.Thread(target=self._read_from, args=(writer, "again" in order), daemon=True)
            reader.start()
            self._readers.append(reader)
            self._writers.append(writer)

    def _read_from(self, writer: subprocess.Popen[bytes], renamed: bool) -> None:
        source, waiting = writer.stdout, self._queue
        if source is None or waiting is None:
            return
        while (chunk := read_chunk(source)) is not None and not self._closed:
            while not self._closed:
                with contextlib.suppress(queue.Full):
                    waiting.put((*chunk, renamed), timeout=1.0)
                    break

    def _keep(self, one: Document | None) -> None:
        if one is None:
            self.counts.too_long += 1
            return
        self.counts.fresh += 1
        if len(self._kept) < RESERVOIR:
            self._kept.append(one)
        else:
            self._kept[self._rng.randrange(RESERVOIR)] = one

    def _take_new(self, wait_s: float) -> list[Document]:
        """Return what the writers have put; waits for at least one chunk when ``wait_s`` is given."""
        found: list[Document] = []
        while self._queue is not None:
            try:
                chunk, too_long, renamed = self._queue.get(timeout=wait_s) if wait_s else self._queue.get_nowait()
            except queue.Empty:
                break
            found += chunk
            self.counts.too_long += too_long
            wait_s = 0.0
            if renamed:
                self.counts.renamed += len(chunk)
                continue
            for one in chunk:
                self._keep(one)
        return found

    def documents(self) -> Iterator[Document]:
        """Yield documents for ever: new ones first, else one that was seen before.

        Raises:
            TrainingError: the writers gave nothing for minutes.
        """
        while True:
            new = self._take_new(0.0 if self._kept else WAIT_S)
            if not new and not self._kept:
                raise TrainingError(f"the writers gave nothing for {WAIT_S:g} s", help="see whether they died")
            for one in new:
                self.counts.used += 1
                yield one
            if not new:
                self.counts.used += 1
                yield self._again()

    def _again(self) -> Document:
        if self._queue is not None:
            return self._rng.choice(self._kept)
        if not self._order:
            self._order = self._rng.sample(range(len(self._kept)), len(self._kept))
        return self._kept[self._order.pop()]


def sample_pairs(section: ScratchSection, seed: int, count: int, *, held_out: bool = False) -> list[Pair]:
    """Return pairs for the tokenizer or for measuring: from the shards where they are on that side, else drawn here."""
    if section.pairs and not held_out:
        found: Sequence[Pair] = [pair for pair, _ in zip(read_pairs(Path(section.pairs)), range(count), strict=False)]
        return list(found)
    plan = replace(stream_plan(section, seed + 977, held_out=held_out), dresses=3, reservoir=8)
    return [pair for pair, _ in zip(PairStream(plan), range(count), strict=False)]
