"""Stored profiles: ``.drk/profiles/<id>.json``, ``<id>.tasks/`` beside it, and ``latest``.

::

    .drk/profiles/20260101T120000Z-net.json       the report (drk.assistant.report)
    .drk/profiles/20260101T120000Z-net.tasks/000  Task bundles that `drk optimize --from-profile` takes
    .drk/profiles/latest                          link to the newest report

``.drk`` lies beside the runs and ignores itself. A profile appears whole or not at all: tasks first, the report last.
Readers in editors start from a source file: the nearest ``.drk/profiles`` upwards counts.

Left out: sharing between machines (a report's ``root`` is this machine's).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import UsageError, did_you_mean
from drk.assistant.report import Report, from_json, to_json
from drk.assistant.runs import ignore_folder
from drk.gym.schema import Task
from drk.gym.wire import load_task, save_task

LATEST = "latest"
MAX_REPORT_BYTES = 64 * 2**20


def default_profiles_dir(cwd: Path | None = None) -> Path:
    """Return where ``drk profile`` writes: ``.drk/profiles`` in the current folder."""
    return (cwd or Path.cwd()) / ".drk" / "profiles"


def find_profiles_dir(source: Path) -> Path | None:
    """Return the nearest ``.drk/profiles`` in the folder of ``source`` (a file or folder) or above, or None."""
    start = Path(os.path.abspath(source))  # noqa: PTH100 - links are kept, as everywhere for user files
    for folder in (start, *start.parents):
        found = folder / ".drk" / "profiles"
        if found.is_dir():
            return found
    return None


def new_profile_id(title: str, now: datetime | None = None) -> str:
    """Return a fresh id, ``<utc-time>-<slug>``; ids sort by time."""
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40] or "profile"
    return f"{(now or datetime.now(UTC)).strftime('%Y%m%dT%H%M%SZ')}-{slug}"


def free_profile_id(profiles_dir: Path, title: str) -> str:
    """Return an id that no stored profile has."""
    base = new_profile_id(title)
    taken = set(list_profiles(profiles_dir))
    return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 10_000))) if name not in taken)


def save_report(profiles_dir: Path, report: Report, tasks: Sequence[tuple[str, Task]] = ()) -> Path:
    """Write a report and its tasks (by folder name), point ``latest`` at it, and return the report's path.

    Raises:
        UsageError: the folder cannot be written.
    """
    path = profiles_dir / f"{report.id}.json"
    try:
        ignore_folder(profiles_dir.parent if profiles_dir.parent.name == ".drk" else profiles_dir)
        profiles_dir.mkdir(parents=True, exist_ok=True)
        for name, task in tasks:
            save_task(task, tasks_dir(path) / name)
        write_atomically(path, (json.dumps(to_json(report), indent=1, allow_nan=False) + "\n").encode())
        _point_latest(profiles_dir, path.name)
    except OSError as error:
        raise UsageError(
            f"cannot write a profile in {profiles_dir}", cause=str(error), help="give another place with --profiles-dir"
        ) from error
    return path


def _point_latest(profiles_dir: Path, name: str) -> None:
    fresh = profiles_dir / f".latest-{os.getpid()}.tmp"
    with contextlib.suppress(OSError):  # file systems without links: the newest name is then taken
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(profiles_dir / LATEST)


def tasks_dir(path: Path) -> Path:
    """Return the folder of a stored report's tasks; it may be missing."""
    return path.with_name(f"{path.stem}.tasks")


def load_tasks(path: Path, names: Sequence[str]) -> list[Task]:
    """Read tasks of a stored report by folder name.

    Raises:
        BundleError: a bundle is missing or malformed.
    """
    return [load_task(tasks_dir(path) / Path(name).name) for name in names]


def list_profiles(profiles_dir: Path) -> list[str]:
    """Return the ids of the stored profiles, newest first."""
    if not profiles_dir.is_dir():
        return []
    names = [path.stem for path in profiles_dir.glob("*.json") if not path.name.startswith(".") and path.is_file()]
    return sorted(names, reverse=True)


def open_profile(profiles_dir: Path | None, name: str = LATEST) -> Path:
    """Return a stored report's path by id, unique part of an id, path, or ``latest``.

    Raises:
        UsageError: there is none, or the name fits several.
    """
    path = Path(name)
    if path.suffix == ".json" and path.is_file():
        return path.resolve()
    ids = list_profiles(profiles_dir) if profiles_dir is not None else []
    if profiles_dir is None or not ids:
        raise UsageError("there is no stored profile", help="`drk profile model.py` makes one")
    if name == LATEST:
        latest = profiles_dir / LATEST
        return latest.resolve() if latest.exists() else profiles_dir / f"{ids[0]}.json"
    found = [one for one in ids if one == name] or [one for one in ids if name in one]
    if len(found) == 1:
        return profiles_dir / f"{found[0]}.json"
    if found:
        raise UsageError(f"{name!r} fits several profiles", cause=", ".join(found[:5]), help="give more of the id")
    raise UsageError(f"there is no profile {name!r}", help=did_you_mean(name, ids) or f"newest: {ids[0]}")


def load_report(path: Path) -> Report:
    """Read a stored report.

    Raises:
        UsageError: missing, too large, malformed, or of another schema version.
    """
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise UsageError("the report is too large", file=str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError("the report cannot be read", file=str(path), cause=str(error)) from error
    return from_json(data)


def latest_report(source: Path) -> Report | None:
    """Return the newest stored report for a source file (walking up from it), or None.

    Raises:
        UsageError: see :func:`load_report`.
    """
    folder = find_profiles_dir(source)
    if folder is None or not list_profiles(folder):
        return None
    return load_report(open_profile(folder))
