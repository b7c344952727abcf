"""What finished and unfinished runs offer for a file: kernels to apply, runs to go on with, runs under way elsewhere.

The run folder is the only memory (:mod:`drk.assistant.runs`): a suggestion outlives the server, and a run of the
command line or of another editor is offered like one of our own. For each target of a file the newest run counts.

Left out: runs older than the newest :data:`MAX_RUNS`, and runs whose file lies elsewhere now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drk.assistant.runs import Run, list_runs
from drk.gym.errors import BundleError

MAX_RUNS = 60
State = Literal["ready", "no-win", "failed", "unfinished", "running"]


@dataclass(frozen=True)
class Suggestion:
    """One run and its target. ``headline`` says the gain in a few words, or why there is none."""

    run: Run
    file: Path
    target: str
    state: State
    headline: str
    status: str = ""
    diff: Path | None = None
    kernels_module: str = ""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.run.name


class SuggestionStore:
    """Reads run folders on demand; what a finished run says is remembered until its result changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int], Suggestion | None]] = {}

    def for_file(self, path: Path, runs_dirs: Iterable[Path]) -> tuple[Suggestion, ...]:
        """Return the newest suggestion for each target of ``path``, newest first. Nothing is raised."""
        wanted = os.path.realpath(path)
        found: dict[str, Suggestion] = {}
        for run in newest_runs(runs_dirs):
            one = self._of(run)
            if one is not None and os.path.realpath(one.file) == wanted and one.target not in found:
                found[one.target] = one
        return tuple(found.values())

    def named(self, run: str, runs_dirs: Iterable[Path]) -> Suggestion | None:
        """Return the suggestion of a run by its name, or None."""
        found = next((one for one in newest_runs(runs_dirs) if one.name == run), None)
        return self._of(found) if found is not None else None

    def _of(self, run: Run) -> Suggestion | None:
        stamp = _stamp(run.folder)
        known = self._known.get(run.folder)
        if known is not None and known[0] == stamp and stamp[0]:
            return known[1]
        try:
            found = read_suggestion(run)
        except (BundleError, KeyError, TypeError, ValueError):
            found = None  # not a run that this drk can read: nothing to offer
        self._known[run.folder] = (stamp, found)
        return found


def newest_runs(runs_dirs: Iterable[Path]) -> list[Run]:
    """Return the newest runs of several folders, newest first."""
    runs = {run.folder.resolve(): run for folder in runs_dirs for run in list_runs(folder)}
    return sorted(runs.values(), key=lambda run: run.name, reverse=True)[:MAX_RUNS]


def runs_stamp(runs_dirs: Iterable[Path]) -> tuple[tuple[str, tuple[int, int]], ...]:
    """Return what changes when a run begins or ends; costs a ``stat`` for each of the newest runs."""
    return tuple((run.name, _stamp(run.folder)) for run in newest_runs(runs_dirs)[:20])


def _stamp(folder: Path) -> tuple[int, int]:
    try:
        told = (folder / "result.json").stat()
    except OSError:
        return (0, 0)
    return (told.st_mtime_ns, told.st_size)


def read_suggestion(run: Run) -> Suggestion | None:
    """Return what a run offers; None when it was not started from a file.

    Raises:
        BundleError: a file of the run cannot be read.
        KeyError, TypeError, ValueError: a file of the run does not hold what it should.
    """
    config = run.config
    where = config.get("source")
    if not where:
        return None
    file = Path(where["root"]) / where["entry"]
    result = run.result
    if result is None:
        state: State = "running" if is_running(run) else "unfinished"
        return Suggestion(run, file, _asked_target(config), state, "", status=state)
    target = str(result["task"]["target"])
    artefact = result.get("artefact")
    if artefact and (run.folder / "edit.json").exists():
        edit = json.loads((run.folder / "edit.json").read_text(encoding="utf-8"))
        module = str(edit["module"]).removesuffix(".py")
        headline = describe_result(result)
        return Suggestion(run, file, target, "ready", headline, result["status"], Path(artefact["diff"]), module)
    if result.get("interrupted"):
        return Suggestion(run, file, target, "unfinished", str(result["reason"]), result["status"])
    lost: State = "no-win" if result["status"] in ("no-win", "optimised", "unmeasured") else "failed"
    return Suggestion(run, file, target, lost, str(result.get("artefact_reason") or result["reason"]), result["status"])


def _asked_target(config: Mapping[str, Any]) -> str:
    return str(config.get("target") or "").rpartition(":")[2].removesuffix(".py").rpartition("/")[2]


def describe_result(result: Mapping[str, Any]) -> str:
    """Return the gain in a few words: ``1.50x over compile`` (the lower bound counts), or that it is not measured."""
    verdict = (result.get("best") or {}).get("verdict") or {}
    headline = verdict.get("headline")
    interval = (verdict.get("speedups") or {}).get(headline or "eager")
    if interval and result.get("status") == "optimised":
        return f"{interval['low']:.2f}x over {headline or 'eager'}"
    return "logic checked, speed not measured"


def is_running(run: Run) -> bool:
    """Say whether a process works on the run: whether its lock is held.

    The kernel's table is read instead of trying the lock, which for that moment would refuse it to the run itself.
    """
    try:
        inode = (run.folder / "lock").stat().st_ino
        table = Path("/proc/locks").read_text(encoding="utf-8")
    except OSError:
        return False
    rows = (line.split() for line in table.splitlines())
    return any("FLOCK" in row and any(word.endswith(f":{inode}") for word in row) for row in rows)
