"""Task sets and demonstrations on disk: JSONL, one record a line, read strictly.

A task's line is ``{"task": wire form, "family", "signature", "seed"}``; a demonstration's is
``{"task", "family", "signature", "turns": [{"candidate", "verdict"}]}``. :func:`leaks` compares a set with a folder of
evaluation files, by the tokens of their modules: names and comments count for nothing, so that a renamed copy is found.

Honest limit: leakage is found where structure is alike (5-token shingles); a module rewritten by hand is not.
"""

from __future__ import annotations

import io
import json
import keyword
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drk.assistant.episode import Turn
from drk.gym.errors import BundleError
from drk.gym.wire import (
    candidate_from_json,
    candidate_to_json,
    task_from_json,
    task_to_json,
    verdict_from_json,
    verdict_to_json,
)
from drk.training.errors import TrainingError
from drk.training.tasks import TrainingTask

SHINGLE = 5


class DatasetError(TrainingError):
    """A file of tasks or demonstrations cannot be read; the message names file and line."""


@dataclass(frozen=True)
class Demonstration:
    """Turns on one task, in order, as judged. What is learned from which turn is the trainer's choice."""

    task: TrainingTask
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Leak:
    """A task that is too much like an evaluation file. ``overlap`` is the share of the smaller one's shingles."""

    task: str
    file: str
    overlap: float


def write_tasks(path: Path, tasks: Iterable[TrainingTask]) -> int:
    """Write tasks and return their number."""
    return _write(path, ({**_origin(task), "task": task_to_json(task.task)} for task in tasks))


def read_tasks(path: Path) -> list[TrainingTask]:
    """Read what :func:`write_tasks` wrote.

    Raises:
        DatasetError: see the class.
    """
    return [_in_place(path, number, record, _task) for number, record in _read(path)]


def write_demonstrations(path: Path, demonstrations: Iterable[Demonstration]) -> int:
    """Write demonstrations and return their number."""
    return _write(path, (_demonstration_json(one) for one in demonstrations))


def read_demonstrations(path: Path) -> list[Demonstration]:
    """Read what :func:`write_demonstrations` wrote.

    Raises:
        DatasetError: see the class.
    """
    return [_in_place(path, number, record, _demonstration) for number, record in _read(path)]


def _demonstration_json(one: Demonstration) -> dict[str, Any]:
    turns = [
        {"candidate": candidate_to_json(turn.candidate), "verdict": verdict_to_json(turn.verdict)} for turn in one.turns
    ]
    return {**_origin(one.task), "task": task_to_json(one.task.task), "turns": turns}


def _origin(task: TrainingTask) -> dict[str, Any]:
    return {"family": task.family, "signature": task.signature, "seed": task.seed}


def _task(record: dict[str, Any]) -> TrainingTask:
    return TrainingTask(
        task_from_json(record["task"]), str(record["family"]), str(record["signature"]), int(record["seed"])
    )


def _demonstration(record: dict[str, Any]) -> Demonstration:
    turns = tuple(
        Turn(number, candidate_from_json(turn["candidate"]), verdict_from_json(turn["verdict"]))
        for number, turn in enumerate(record["turns"], 1)
    )
    return Demonstration(_task(record), turns)


def _in_place(path: Path, number: int, record: Any, read: Any) -> Any:
    try:
        return read(record)
    except (KeyError, TypeError, ValueError, AttributeError, BundleError) as error:
        raise DatasetError(f"{path}:{number}: not a record of this kind: {error!r}") from error


def _write(path: Path, records: Iterable[dict[str, Any]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
            count += 1
    return count


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"cannot read {path}: {error}", help="drk data tasks --out FILE makes one") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DatasetError(f"{path}:{number}: not JSON: {error}") from error


# --- Leakage -------------------------------------------------------------------------------------------------


def leaks(tasks: Sequence[TrainingTask], folder: Path, *, threshold: float = 0.6) -> list[Leak]:
    """Return the tasks whose source shares at least ``threshold`` of its shingles with a Python file in ``folder``.

    Raises:
        DatasetError: there is no Python file in it.
    """
    files = {
        path: shingles(path.read_text(encoding="utf-8", errors="replace")) for path in sorted(folder.rglob("*.py"))
    }
    if not files:
        raise DatasetError(f"no Python files in {folder}")
    found = []
    for task in tasks:
        mine = shingles(task.task.files[task.task.entry])
        for path, theirs in files.items():
            smaller = min(len(mine), len(theirs))
            overlap = len(mine & theirs) / smaller if smaller else 0.0
            if overlap >= threshold:
                found.append(Leak(task.task.name, str(path), overlap))
    return found


def shingles(source: str) -> frozenset[tuple[str, ...]]:
    """Return the runs of five tokens in ``source``; own names are one token, comments, texts and layout none."""
    words: list[str] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.NAME:
                after_dot = bool(words) and words[-1] == "."
                known = keyword.iskeyword(token.string) or token.string in ("torch", "nn", "F") or after_dot
                words.append(token.string if known else "name")
            elif token.type in (tokenize.OP, tokenize.NUMBER):
                words.append(token.string)
    except (tokenize.TokenError, SyntaxError, IndentationError):
        words = source.split()
    skipped = _after_imports(words)
    return frozenset(tuple(skipped[i : i + SHINGLE]) for i in range(len(skipped) - SHINGLE + 1))


def _after_imports(words: list[str]) -> list[str]:
    """Drop what stands before the first class or function: imports are alike everywhere."""
    start = next((i for i, word in enumerate(words) if word in ("class", "def")), 0)
    return words[start:]
