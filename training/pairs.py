"""Question and answer in bulk: generated tasks, the teacher's answers, conversations with wrong or lazy first turns.

A :class:`Pair` is the conversation that a rollout would show (``prompt.templates = "bare"``) and the file that answers
it. About half are one turn; the others begin with a faulty or a lazy candidate and its verdict (from templates, see
:mod:`drk.training.verdict_templates`), and are answered by the repair. A :class:`PairStream` goes on for ever and
repeats exactly from its seed; each worker has its own part of the structures, so that workers never say the same.

On disk: shards of gzipped JSONL, each complete or absent, so that writing goes on where it stopped.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from drk.assistant.atomic_write import write_atomically
from drk.assistant.episode import Episode, Turn, best_of_history, digest
from drk.assistant.prompts import DIGEST_CHARS, fenced
from drk.gym.errors import GymError
from drk.gym.graph import Graph
from drk.gym.schema import Candidate
from drk.training.errors import TrainingError
from drk.training.faults import ALL_KINDS, FaultKind, insert_fault
from drk.training.tasks import FAMILIES, TrainingTask, draw_task, split_of
from drk.training.teacher import Answer, NotTeachable, Structure, capture_structure, dressed, teach
from drk.training.verdict_templates import fault_verdict, right_verdict

SHARDS = "pairs-*.jsonl.gz"
SHARD_PAIRS = 512
DRESSES = 12
"""Texts made of each captured structure."""
RESERVOIR = 64
"""Structures that are in use at a time, so that neighbours in the stream differ."""


@dataclass(frozen=True)
class Pair:
    """``messages`` are (role, text); ``answer`` is the source of the file; ``kind`` says how the conversation began."""

    messages: tuple[tuple[str, str], ...]
    answer: str
    family: str
    signature: str
    seed: int
    dress: int
    kind: str
    lazy: bool


@dataclass(frozen=True)
class StreamPlan:
    """What a stream draws. ``multi_turn`` is the share of conversations that begin with a faulty or lazy candidate."""

    families: tuple[str, ...] = ()
    seed: int = 0
    rows: int = 0
    multi_turn: float = 0.4
    held_out: bool = False
    held_out_families: tuple[str, ...] = ()
    dresses: int = DRESSES
    reservoir: int = RESERVOIR


class PairStream:
    """An endless, repeatable stream of pairs: part ``worker`` of ``workers``. ``left_out`` counts untaught ones."""

    def __init__(self, plan: StreamPlan, *, worker: int = 0, workers: int = 1) -> None:
        self._plan = plan
        self._families = plan.families or tuple(FAMILIES)
        self._number = plan.seed * 1_000_003 + worker
        self._step = workers
        self._rng = random.Random(f"pairs:{plan.seed}:{worker}:{workers}")
        self._queue: deque[tuple[str, int]] = deque()
        self._live: list[tuple[Structure, int]] = []
        self.left_out = 0

    def __iter__(self) -> Iterator[Pair]:
        while True:
            if len(self._live) < self._plan.reservoir:
                self._add_structure()
            if len(self._live) < min(self._plan.reservoir, 2) or self._rng.random() < 1 / self._plan.dresses:
                continue
            place = self._rng.randrange(len(self._live))
            structure, used = self._live[place]
            if used + 1 >= self._plan.dresses:
                self._live.pop(place)
            else:
                self._live[place] = (structure, used + 1)
            try:
                yield self._pair(structure, used)
            except (NotTeachable, GymError):
                self.left_out += 1

    def _add_structure(self) -> None:
        if not self._queue:
            self._queue.extend((family, self._number) for family in self._families)
            self._number += self._step
        family, seed = self._queue.popleft()
        plan = self._plan
        held_out = split_of(draw_task(family, seed), held_out_families=plan.held_out_families) == "held-out"
        if held_out != plan.held_out:
            return
        try:
            self._live.append((capture_structure(family, seed, rows=plan.rows), 0))
        except NotTeachable:
            self.left_out += 1

    def _pair(self, structure: Structure, dress: int) -> Pair:
        task, graph = dressed(structure, dress)
        rng = random.Random(f"pair:{structure.family}:{structure.seed}:{dress}")
        if rng.random() >= self._plan.multi_turn:
            answer = teach(task, graph, rng)
            return _pair(task, (), answer, "first")
        return conversation_pair(task, graph, rng)


def conversation_pair(task: TrainingTask, graph: Graph, rng: random.Random) -> Pair:
    """Return a pair whose conversation begins with one or two candidates that are wrong or lazy.

    Raises:
        NotTeachable: the compiler has nothing for this graph.
    """
    if rng.random() < 0.35:
        lazy = teach(task, graph, rng, lazy=True)
        if lazy.lazy:
            total = sum(1 for _ in graph.nodes)
            share = max(0.05, 1 - lazy.left / max(total, 1))
            first = Candidate(lazy.source)
            turn = Turn(1, first, right_verdict(first, rng, share=share * rng.uniform(0.7, 1.0), slow=True))
            return _pair(task, (turn,), teach(task, graph, rng, lazy=False), "lazy")
    answer = teach(task, graph, rng)
    turns: list[Turn] = []
    kinds = rng.sample(ALL_KINDS, 4)
    for kind in kinds[: 4 if rng.random() < 0.25 else 2]:
        fault = insert_fault(answer.source, kind, seed=rng.getrandbits(30))
        if fault is None or len(turns) == 2:
            continue
        wrong = Candidate(fault.source)
        turns.append(Turn(len(turns) + 1, wrong, fault_verdict(wrong, kind, rng)))
    name: FaultKind | str = kinds[0] if turns else "first"
    return _pair(task, tuple(turns), answer, name)


def _pair(task: TrainingTask, turns: Sequence[Turn], answer: Answer, kind: str) -> Pair:
    messages = bare_messages(task.task.files[task.task.entry], turns)
    return Pair(messages, answer.source, task.family, task.signature, task.seed, task.dress, kind, answer.lazy)


def bare_messages(file: str, turns: Sequence[Turn]) -> tuple[tuple[str, str], ...]:
    """Return the conversation before the next answer, as the templates ``bare`` show it (a test compares)."""
    messages = [("user", file.strip())]
    best = best_of_history(Episode("", tuple(turns)))
    previous = None
    for turn in turns:
        told = digest(turn.verdict, DIGEST_CHARS, candidate=turn.candidate, best=best, previous=previous)
        messages += [("assistant", fenced(turn.candidate.source, "python")), ("user", told.strip())]
        previous = turn.verdict
    return tuple(messages)


# --- Shards --------------------------------------------------------------------------------------------------


def write_shard(folder: Path, plan: StreamPlan, *, worker: int, workers: int, pairs: int = SHARD_PAIRS) -> Path:
    """Write one worker's shard, unless it is there already, and return its path."""
    path = folder / f"pairs-{plan.seed:04d}-{worker:05d}-of-{workers:05d}.jsonl.gz"
    if not path.is_file():
        lines = []
        for pair in PairStream(plan, worker=worker, workers=workers):
            lines.append(json.dumps(asdict(pair)))
            if len(lines) >= pairs:
                break
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, gzip.compress("\n".join(lines).encode()))
    return path


def read_pairs(folder: Path) -> Iterator[Pair]:
    """Yield the pairs of all shards in ``folder``, by name.

    Raises:
        TrainingError: there is none, or one cannot be read.
    """
    for path in shards_of(folder):
        yield from read_shard(path)


def shards_of(folder: Path) -> list[Path]:
    """Return the shards in ``folder``, by name.

    Raises:
        TrainingError: there is none.
    """
    paths = sorted(folder.glob(SHARDS))
    if not paths:
        raise TrainingError(f"no shards of pairs in {folder}", help="drk data pairs --out FOLDER")
    return paths


def read_shard(path: Path) -> Iterator[Pair]:
    """Yield the pairs of one shard.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        for line in gzip.decompress(path.read_bytes()).decode().splitlines():
            record = json.loads(line)
            record["messages"] = tuple((role, text) for role, text in record["messages"])
            yield Pair(**record)
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise TrainingError(f"cannot read the shard {path}: {error!r}", help="delete it and write it again") from error
