"""Run folders: ``.drk/runs/<utc-time>-<slug>/``, everything a run needs to be read, repeated or resumed.

::

    config.json         what was asked for, resolved; re-runnable
    task/               the Task bundle
    events.jsonl        what happened, one line an event
    candidates/NNN.py   proposed sources, written before they are judged
    verdicts/NNN.json   their verdicts
    calls.jsonl         calls of language models with their answers
    advice.json         what a resumed run was told since
    result.json         the answer
    lock                held while a process works on the run

``.drk/`` ignores itself (``.gitignore`` holding ``*``) and ``latest`` links to the newest run. Every file but the
event log appears whole or not at all. A proposal is journalled before it is judged, a verdict as soon as it is known,
so a run killed at any point goes on with nothing proposed or judged twice.

Left out: verdicts with status ``error`` are not kept (they say nothing about the candidate); sharing between machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import UsageError, did_you_mean
from drk.assistant.events import Event, EventLog, make_event, read_events
from drk.gym.errors import BundleError
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.wire import (
    candidate_id,
    load_task,
    save_task,
    task_id,
    verdict_from_json,
    verdict_to_json,
)

LATEST = "latest"
SOURCE_COPY = "source.bin"
"""The user's file as it was when the run began, in the run's folder."""
ADVICE = "advice.json"
"""What later starts of a run were told (hints, models, limits); it wins over what ``config.json`` says of that."""


@dataclass(frozen=True)
class Proposal:
    """A candidate with its number in the run (file names) and the step that proposed it."""

    number: int
    turn: int
    sample: int
    candidate: Candidate


class Run:
    """One run folder. Make it with :func:`create_run` or :func:`open_run`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = EventLog(folder / "events.jsonl")

    @property
    def name(self) -> str:
        """The folder's name, which commands take as RUN."""
        return self.folder.name

    @property
    def config(self) -> dict[str, Any]:
        """What was asked for."""
        return _read_json(self.folder / "config.json")

    @property
    def advice(self) -> dict[str, Any] | None:
        """What the last start on this run was told, or null where there was only one."""
        path = self.folder / ADVICE
        return _read_json(path) if path.exists() else None

    @property
    def result(self) -> dict[str, Any] | None:
        """The answer, or null while there is none."""
        path = self.folder / "result.json"
        return _read_json(path) if path.exists() else None

    def task(self) -> Task:
        """Return the task.

        Raises:
            BundleError: the bundle is missing or malformed.
        """
        return load_task(self.folder / "task")

    def events(self) -> list[Event]:
        """Return all whole events."""
        return read_events(self.folder / "events.jsonl")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run's lock, which dies with the process.

        Raises:
            UsageError: another process works on this run.
        """
        with (self.folder / "lock").open("a") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process is working on run {self.name}", help="wait for it, or stop it first"
                ) from error
            yield

    def proposals(self) -> dict[int, list[Proposal]]:
        """Return what was proposed, by step; only steps whose journal entry is whole count."""
        found: dict[int, list[Proposal]] = {}
        for event in self.events():
            if event.get("event") == "proposed":
                rows = enumerate(event["candidates"])
                found[event["turn"]] = [self._proposal(event["turn"], sample, row) for sample, row in rows]
        return found

    def _proposal(self, turn: int, sample: int, row: dict[str, Any]) -> Proposal:
        path = self.folder / "candidates" / f"{row['number']:03d}.py"
        source = path.read_bytes().decode("utf-8", "surrogatepass")
        candidate = Candidate(source, proposer=row["proposer"], note=row["note"], parent=row["parent"])
        if candidate_id(candidate) != row["id"]:
            raise UsageError(
                f"{path.name} of run {self.name} was changed since it was proposed",
                file=str(path),
                help="start a new run; `drk verify` judges an edited candidate",
            )
        return Proposal(row["number"], turn, sample, candidate)

    def record_proposals(self, turn: int, proposals: list[Proposal]) -> Event:
        """Write the sources, then the journal entry that makes them count; return the entry."""
        for proposal in proposals:
            path = self.folder / "candidates" / f"{proposal.number:03d}.py"
            write_atomically(path, proposal.candidate.source.encode("utf-8", "surrogatepass"))
        rows = [
            {
                "number": proposal.number,
                "id": candidate_id(proposal.candidate),
                "proposer": proposal.candidate.proposer,
                "note": proposal.candidate.note,
                "parent": proposal.candidate.parent,
            }
            for proposal in proposals
        ]
        event = make_event("proposed", turn=turn, candidates=rows)
        self.log.append(event)
        return event

    def verdict(self, proposal: Proposal) -> tuple[Verdict, float] | None:
        """Return the recorded verdict and the seconds it took, or null."""
        path = self.folder / "verdicts" / f"{proposal.number:03d}.json"
        if not path.exists():
            return None
        data = _read_json(path)
        return verdict_from_json(data["verdict"]), float(data["seconds"])

    def judged_at(self, proposal: Proposal) -> float | None:
        """Return when a recorded verdict was known (Unix seconds); null where that was not recorded."""
        ended = _read_json(self.folder / "verdicts" / f"{proposal.number:03d}.json").get("ended_unix_s")
        return float(ended) if isinstance(ended, int | float) else None

    def record_verdict(self, proposal: Proposal, verdict: Verdict, seconds: float) -> None:
        """Write a verdict that is known now."""
        identity = candidate_id(proposal.candidate)
        data = {"candidate_id": identity, "seconds": seconds, "ended_unix_s": round(time.time(), 3)}
        self._write_json(f"verdicts/{proposal.number:03d}.json", {**data, "verdict": verdict_to_json(verdict)})

    def record_result(self, result: dict[str, Any]) -> None:
        """Write ``result.json``."""
        self._write_json("result.json", result)

    def write(self, name: str, data: bytes) -> Path:
        """Write another file of the run, whole or not at all, and return its path."""
        path = self.folder / name
        write_atomically(path, data)
        return path

    def _write_json(self, name: str, data: Any) -> None:
        write_atomically(self.folder / name, (json.dumps(data, indent=1, default=str) + "\n").encode())


def create_run(runs_dir: Path, task: Task, config: dict[str, Any]) -> Run:
    """Make a new run folder holding ``task`` and ``config``, and point ``latest`` at it.

    The folder appears under its final name only when it is complete.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        _make_runs_dir(runs_dir)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        base = f"{stamp}-{_slug(task.name or task.target)}"
        draft = runs_dir / f".{base}-{os.getpid()}.tmp"
        for part in ("candidates", "verdicts"):
            (draft / part).mkdir(parents=True)
        save_task(task, draft / "task")
        text = json.dumps({"schema_version": 1, "task_id": task_id(task), **config}, indent=1, default=str)
        write_atomically(draft / "config.json", (text + "\n").encode())
        folder = _rename_free(draft, runs_dir / base)
        _point_latest(runs_dir, folder.name)
    except OSError as error:
        raise UsageError(
            f"cannot write a run folder in {runs_dir}", cause=str(error), help="give another place with --runs-dir"
        ) from error
    return Run(folder)


def open_run(runs_dir: Path, name: str = LATEST) -> Run:
    """Return an existing run by name, unique part of a name, path, target (its newest run), or ``latest``.

    Raises:
        UsageError: there is none, or the name fits several.
    """
    path = Path(name)
    if len(path.parts) > 1 and (path / "config.json").is_file():
        return Run(path.resolve())
    if name == LATEST and (runs_dir / LATEST).exists():
        return Run((runs_dir / LATEST).resolve())
    names = [run.name for run in list_runs(runs_dir)]
    if not names:
        raise UsageError(f"there is no run in {runs_dir}", help="`drk optimize TARGET` makes one")
    if name == LATEST:
        return Run((runs_dir / names[0]).resolve())
    for run in list_runs(runs_dir):
        if run.config.get("target") == name:
            return Run(run.folder.resolve())
    found = [one for one in names if one == name] or [one for one in names if name in one]
    if len(found) == 1:
        return Run((runs_dir / found[0]).resolve())
    if found:
        raise UsageError(f"{name!r} fits several runs", cause=", ".join(found[:5]), help="give more of the name")
    raise UsageError(f"there is no run {name!r}", help=did_you_mean(name, names) or "`drk runs list` lists them")


def list_runs(runs_dir: Path) -> list[Run]:
    """Return the runs of a folder, newest first."""
    if not runs_dir.is_dir():
        return []
    folders = [
        entry
        for entry in runs_dir.iterdir()
        if not entry.name.startswith(".") and not entry.is_symlink() and (entry / "config.json").is_file()
    ]
    return [Run(folder) for folder in sorted(folders, key=lambda entry: entry.name, reverse=True)]


def delete_run(run: Run) -> None:
    """Remove a run folder.

    Raises:
        UsageError: a process is working on it.
    """
    with run.locked():
        # renamed first: what a killed deletion leaves is not taken for a run
        doomed = run.folder.with_name(f".{run.name}.deleted")
        run.folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    latest = run.folder.parent / LATEST
    if latest.is_symlink() and not latest.exists():
        latest.unlink()


def ignore_folder(folder: Path) -> None:
    """Make ``folder`` with a ``.gitignore`` that ignores all of it, itself included."""
    folder.mkdir(parents=True, exist_ok=True)
    ignore = folder / ".gitignore"
    if not ignore.exists():
        write_atomically(ignore, b"*\n")


def _make_runs_dir(runs_dir: Path) -> None:
    ignored = runs_dir.parent if runs_dir.parent.name == ".drk" else runs_dir
    ignore_folder(ignored)
    runs_dir.mkdir(parents=True, exist_ok=True)


def _rename_free(draft: Path, wanted: Path) -> Path:
    for number in range(1, 1000):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not target.exists():
            try:
                return draft.rename(target)
            except OSError:
                if not target.exists():
                    raise
    raise FileExistsError(f"{wanted} and 999 more exist")


def _point_latest(runs_dir: Path, name: str) -> None:
    fresh = runs_dir / f".latest-{os.getpid()}.tmp"
    with contextlib.suppress(OSError):  # file systems without links: `latest` is then found by name
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(runs_dir / LATEST)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "run"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"cannot read {path}: expected a JSON object")
    return data
