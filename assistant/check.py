"""Verifying committed kernels again: are they still right, honest, and faster than the baseline?

Every artefact in a project (``<stem>_kernels.py`` with its record) is judged against the user's code as it is now, on
this device and with these versions. With a GPU it must be surely faster than the fastest baseline of today, and on
the GPU that measured it not surely slower than what is recorded, less a slack for clocks. Without a GPU only the logic
is checked, and every row says so.

Limits: a speed from another kind of GPU is not compared with the recorded one; parts of a module are judged one by
one, the whole that they make up is not timed again.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from drk.assistant.artefact import HEADER
from drk.assistant.check_record import Record, committed_candidate, is_artefact, machine, read_record
from drk.assistant.check_task import committed_task, stem, uses_kernels
from drk.assistant.episode import headline_interval
from drk.assistant.errors import TargetError, UsageError
from drk.gym.errors import BundleError, TaskError
from drk.gym.schema import Candidate, Interval, Task, Verdict
from drk.gym.wire import candidate_id, verdict_to_json

Status = Literal["passed", "logic-only", "slower", "wrong", "dishonest", "failed", "unreadable"]
GOOD: frozenset[str] = frozenset({"passed", "logic-only"})
SLACK = 0.03
"""What clocks and temperature may take from a speed before it counts as slower than recorded."""
_SKIPPED = frozenset({"node_modules", "venv", "env", "site-packages", "__pycache__", "build", "dist"})
_MAX_BYTES = 8 * 2**20


class Judge(Protocol):
    """What :func:`check_all` needs of a gym."""

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate."""


@dataclass(frozen=True)
class Check:
    """What one artefact came to. ``line`` is in ``file`` where a fault lies in the kernels, else 1."""

    file: str
    target: str
    status: Status
    reason: str
    line: int = 1
    stored: Interval | None = None
    now: Interval | None = None
    verdict: Verdict | None = None
    notes: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Nothing is wrong with it, as far as this machine can tell."""
        return self.status in GOOD


def find_artefacts(paths: Sequence[Path]) -> list[Path]:
    """Return the artefacts below ``paths``, sorted; a file that is named counts whatever it holds.

    Hidden folders, virtual environments and links to folders are not looked into.

    Raises:
        UsageError: a path does not exist, or there is no artefact.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist", file=str(path))
        files = [path] if path.is_file() else _walk(path)
        found |= dict.fromkeys(file for file in files if path.is_file() or _looks_right(file))
    if not found:
        where = ", ".join(map(str, paths))
        raise UsageError(
            f"there are no committed kernels in {where}",
            kind="no-kernels",
            cause="no *_kernels.py holds drk's header",
            help="`drk optimize` and `drk apply` make them; run drk check in the project's folder",
        )
    return sorted(found)


def _walk(folder: Path) -> Iterable[Path]:
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _SKIPPED]
        yield from (Path(place) / name for name in files if name.endswith(".py") and "_kernels" in name)


def _looks_right(file: Path) -> bool:
    if file.name.startswith("test_"):
        return False
    try:
        return file.stat().st_size <= _MAX_BYTES and is_artefact(file.read_text(encoding="utf-8"), HEADER)
    except (OSError, UnicodeDecodeError):
        return False


async def check_all(
    files: Sequence[Path], gym: Judge, *, slack: float = SLACK, timed: bool = True
) -> AsyncIterator[Check]:
    """Judge each artefact and yield what it came to; ``timed`` says whether the gym measures speed where it can.

    Raises:
        drk.gym.errors.HostError: the gym or this machine failed; nothing can be said then.
    """
    for file in files:
        yield await _check(file, gym, slack, timed=timed)


async def _check(file: Path, gym: Judge, slack: float, *, timed: bool) -> Check:
    try:
        text = file.read_text(encoding="utf-8")
        record = read_record(text, str(file))
        source = committed_candidate(text, str(file))
        task = committed_task(file, record)
    except TargetError as error:
        why = f"{error.message} ({error.cause})" if error.cause else error.message
        return Check(str(file), "", "unreadable", why)
    except (OSError, UnicodeDecodeError) as error:
        return Check(str(file), "", "unreadable", str(error))
    target = f"{task.target}.{task.submodule}" if task.submodule else task.target
    notes = _notes(file, record, source)
    try:
        verdict = await gym.evaluate(task, Candidate(source, proposer="committed"))
    except (TaskError, BundleError) as error:
        return Check(str(file), target, "failed", f"the original cannot be judged: {error.message}", notes=notes)
    status, reason = decide(record, verdict, slack, timed=timed)
    line = _line_of(text, source, verdict)
    return Check(str(file), target, status, reason, line, record.speedup, headline_interval(verdict), verdict, notes)


def _notes(file: Path, record: Record, source: str) -> tuple[str, ...]:
    notes = []
    if record.candidate_id not in (candidate_id(Candidate(text)) for text in (source, source.strip())):
        notes.append("the kernels differ from those that were verified; they were judged as they are")
    user = file.with_name(Path(record.task.entry).name)
    if not uses_kernels(user.read_text(encoding="utf-8", errors="replace"), stem(file)):
        notes.append(f"{user.name} does not import them")
    return tuple(notes)


def _line_of(text: str, source: str, verdict: Verdict) -> int:
    """Return the line of a fault in the artefact's file: the verdict counts from the candidate's first line."""
    line = verdict.error.line if verdict.error is not None else None
    if line is None:
        return 1
    start = text.find(source.strip())
    return text[:start].count("\n") + line if start >= 0 else 1


def decide(record: Record, verdict: Verdict, slack: float = SLACK, *, timed: bool = True) -> tuple[Status, str]:
    """Return what a fresh verdict means for a recorded artefact, and why, in one sentence."""
    if verdict.status == "error":
        return "failed", f"not judged: {verdict.error.message if verdict.error else 'the host failed'}"
    if frauds := sorted({flag.kind for flag in verdict.flags if flag.severity == "fraud"}):
        return "dishonest", f"flagged: {', '.join(frauds)}"
    if not verdict.accepted:
        return ("failed" if verdict.status == "failed" else "wrong"), _why(verdict)
    if verdict.evidence != "gpu":
        return "logic-only", "logic is right; speed was not checked: no GPU"
    if not timed:
        return "logic-only", "right and honest; speed was not checked, as asked for"
    return _judge_speed(record, verdict, slack)


def _why(verdict: Verdict) -> str:
    if verdict.error is not None:
        first = (verdict.error.message.strip().splitlines() or [""])[0]
        return f"{verdict.error.kind}: {first[:300]}"
    failed = next((cell for cell in verdict.cells if not cell.passed), None)
    return f"cell {failed.name}: {failed.reason}" if failed is not None else f"reached {verdict.reached or 'nothing'}"


def _judge_speed(record: Record, verdict: Verdict, slack: float) -> tuple[Status, str]:
    now = headline_interval(verdict)
    if now is None:
        return "failed", "right, but its speed could not be measured"
    told = f"{now.value:.2f}x [{now.low:.2f}, {now.high:.2f}] over {verdict.headline or 'eager'}"
    if record.speedup is None:
        return ("slower", f"slower than the baseline: {told}") if now.high < 1.0 else ("passed", told)
    if now.low <= 1.0:
        return "slower", f"no longer surely faster: {told}"
    then = record.speedup
    same = getattr(verdict.speedups, record.verdict.headline or "eager", None) or now
    if _gpu(verdict) == record.gpu and same.high < then.low * (1 - slack):
        was = f"{then.value:.2f}x [{then.low:.2f}, {then.high:.2f}]"
        return (
            "slower",
            f"slower than recorded on this GPU: {told}, was {was} over {record.verdict.headline or 'eager'}",
        )
    return "passed", told


def _gpu(verdict: Verdict) -> str:
    return str(verdict.environment.get("gpu") or "")


def checks_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the public form; ``status`` is ``ok`` or ``failed``."""
    return {
        "schema_version": 1,
        "status": "ok" if all(one.good for one in checks) else "failed",
        "checks": [
            {
                "file": one.file,
                "target": one.target,
                "status": one.status,
                "reason": one.reason,
                "line": one.line,
                "stored_speedup": one.stored and dict(one.stored.__dict__),
                "speedup": one.now and dict(one.now.__dict__),
                "machine": machine(one.verdict) if one.verdict is not None else None,
                "notes": list(one.notes),
                "verdict": verdict_to_json(one.verdict) if one.verdict is not None else None,
            }
            for one in checks
        ],
    }
