"""The replay proposer: recorded candidates and recorded answers of language models, each once, in their order.

What it reads: one ``.py`` file; a folder of them; a run's folder (its ``calls.jsonl``, else its ``candidates/``); a
``.jsonl`` file whose lines are candidates of the wire form, or answers as a run's ``calls.jsonl`` has them. Answers go
through the same parser as live ones, so that a recorded failure fails again. In a folder that holds an entry with the
task's name (``<task>.py``, ``<task>.jsonl`` or ``<task>/``), only that is read: one folder then serves many tasks.

Left out: pace (everything is there at once), and matching of prompts: a recording is played whatever is asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from drk.assistant.answer_parser import missing_candidate, parse_answer
from drk.assistant.errors import UsageError
from drk.assistant.proposers import ProposeContext
from drk.gym.errors import BundleError
from drk.gym.schema import Candidate
from drk.gym.wire import candidate_from_json, candidate_id

CALLS = "calls.jsonl"


class ReplayProposer:
    """Gives what was recorded at ``path``; see the module's text.

    Raises:
        UsageError: nothing is there, or it is not of a known form; names the file and the line.
    """

    ordered = False

    def __init__(self, path: Path) -> None:
        self.name = f"replay:{path}"
        self._path = path
        self._shared = [] if _serves_many(path) else read_recording(path)

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the first recorded candidates that were not judged yet."""
        candidates = self._shared or read_recording(_place_of(self._path, context.task.name))
        return [one for one in candidates if candidate_id(one) not in context.seen][: context.limit]


def _serves_many(path: Path) -> bool:
    """Say whether ``path`` is a folder with entries by task: folders or transcripts rather than candidates."""
    if not path.is_dir() or (path / CALLS).is_file() or (path / "candidates").is_dir():
        return False
    return any(entry.is_dir() or entry.suffix == ".jsonl" for entry in path.iterdir())


def _place_of(path: Path, task: str) -> Path:
    # a task's name is data: only a plain file name may choose an entry of the folder
    if task in ("", ".", "..") or Path(task).name != task:
        raise UsageError(f"the task's name {task!r} cannot name a recording")
    for name in (f"{task}.jsonl", f"{task}.py", task):
        if (path / name).exists():
            return path / name
    raise UsageError(f"{path} holds no recording for {task}", help=f"{task}.py, {task}.jsonl or a folder {task}/")


def read_recording(path: Path) -> list[Candidate]:
    """Read recorded candidates.

    Raises:
        UsageError: nothing there, or not of a known form; names the file and the line.
    """
    if path.is_dir() and (path / CALLS).is_file():
        path = path / CALLS
    if path.is_dir():
        files = sorted(path.glob("*.py")) or sorted((path / "candidates").glob("*.py"))
        if not files:
            raise UsageError(f"no candidates in {path}", help="a folder of .py files, or a run's folder, is expected")
        return [_read_source(file) for file in files]
    if path.suffix == ".py":
        return [_read_source(path)]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read candidates from {path}", cause=str(error)) from error
    candidates = [one for number, line in enumerate(lines, 1) if (one := _read_line(path, number, line)) is not None]
    if not candidates:
        raise UsageError(f"no candidates in {path}", help="one JSON object a line is expected: {'source': ...}")
    return candidates


def _read_line(path: Path, number: int, line: str) -> Candidate | None:
    """Read one line; null for an empty one and for events that are no answers."""
    if not line.strip():
        return None
    try:
        row = json.loads(line)
        if isinstance(row, dict) and "event" in row:
            return _answer(row, number) if row["event"] == "answered" else None
        return candidate_from_json(row)
    except (ValueError, KeyError, TypeError, BundleError) as error:
        raise UsageError("not a candidate", file=str(path), line=number, cause=str(error)) from error


def _answer(row: dict[str, Any], number: int) -> Candidate:
    found = parse_answer(row["text"], cut=bool(row.get("cut")))
    if found.source is None:
        return missing_candidate(found.reason, proposer="replay", mark=f"recorded answer {number}")
    return Candidate(found.source, proposer="replay", note=f"recorded answer of {row.get('model', '')}".strip())


def _read_source(path: Path) -> Candidate:
    try:
        return Candidate(path.read_text(encoding="utf-8"), proposer="replay", note=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the candidate {path}", cause=str(error)) from error
