"""Putting an artefact into the user's folder, and taking it back byte for byte.

``apply_artefact`` writes the module and its test beside the user's file and edits that file, each whole or not at all,
the edit last: a process killed in between leaves the user's code as it was. It refuses when the file changed since it
was optimised, or when a file of that name is not ours. What was done is recorded in ``.drk/applied/`` beside the file,
with the original bytes, so that :func:`restore_file` needs nothing else.

``restore_file`` brings the original bytes back when the file is as ``apply`` left it; when it was edited since, only
drk's own lines are taken out, if they are still there unchanged; else it refuses and says why.

Editors make the same edits in their buffers: ``plan_apply`` and ``plan_restore`` say what is to be done, for a text
that may not be saved, and write nothing; ``record_apply`` and ``forget_apply`` keep the note.

Left out: several targets of one file applied at once (restore the first, optimise anew), and version control.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drk.assistant.artefact import HEADER
from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import TargetError, UsageError
from drk.assistant.runs import SOURCE_COPY, Run, ignore_folder
from drk.assistant.source_edit import add_kernels, added_lines, drop_lines
from drk.assistant.verified_source import same_code

RECORD = "applied"
_IMPORT = re.compile(r"from (\S+) import optimized\b")


@dataclass(frozen=True)
class Applied:
    """What was written: the edited file and the files beside it."""

    file: Path
    written: tuple[Path, ...]


@dataclass(frozen=True)
class Restored:
    """What was taken back. ``exact``: the file has its original bytes; else only drk's lines were taken out."""

    file: Path
    exact: bool
    removed: tuple[Path, ...]
    kept: tuple[Path, ...]


@dataclass(frozen=True)
class PlannedApply:
    """The edit that applying a run makes, before anything is written: text of the user's file before and after, and
    the files beside it."""

    run: str
    file: Path
    before: bytes
    edited: bytes
    contents: Mapping[Path, bytes]
    lines: list[str]


@dataclass(frozen=True)
class PlannedRestore:
    """What taking an edit back would do. ``removable`` are drk's files as written, ``kept`` those changed since."""

    file: Path
    before: bytes
    restored: bytes
    exact: bool
    removable: tuple[Path, ...]
    kept: tuple[Path, ...]


def apply_artefact(run: Run, file: Path | None = None) -> Applied:
    """Write a run's artefact beside the user's file and edit the file.

    Args:
        run: a finished run with an artefact.
        file: where the user's file lies now, if it was moved.

    Raises:
        UsageError: the run has no artefact, or it is applied already.
        TargetError: the file is missing or changed since; a file in the way is not ours.
    """
    plan = plan_apply(run, file)
    record_apply(plan)
    for target, data in plan.contents.items():
        write_atomically(target, data)
    write_atomically(plan.file, plan.edited)
    return Applied(plan.file, tuple(plan.contents))


def plan_apply(run: Run, file: Path | None = None, *, now: bytes | None = None) -> PlannedApply:
    """Return the edit that applies ``run``; nothing is written.

    Args:
        run: a finished run with an artefact.
        file: where the user's file lies now, if it was moved.
        now: its text as an editor shows it. Edits that leave the target and what it uses as they were verified are
            then followed; without it the file must be what was optimised, byte for byte.

    Raises:
        UsageError: the run has no artefact, or it is applied already.
        TargetError: the file is missing or changed since; a file in the way is not ours.
    """
    edit = _edit_of(run)
    path = (file or Path(edit["file"])).resolve()
    before = _read_file(path) if now is None else now
    edited, lines = base64.b64decode(edit["edited"]), list(edit["lines"])
    if before == edited:
        raise UsageError(
            f"run {run.name} is applied already", file=str(path), help=f"`drk restore {path.name}` undoes it"
        )
    if _sha256(before) != edit["sha256"]:
        followed = None if now is None else _follow(run, before, lines)
        if followed is None:
            raise TargetError(
                f"{path.name} changed since it was optimised",
                kind="changed",
                file=str(path),
                cause="the kernels were verified against the earlier text",
                help="run drk optimize again",
            )
        edited, lines = followed, added_lines(before, followed)
    names = (*edit.get("parts", ()), edit["module"], edit["test"])
    files = {path.with_name(name): run.folder / name for name in names}
    contents = {target: _read_file(origin) for target, origin in files.items()}
    for target in contents:
        _check_ours(target)
    return PlannedApply(run.name, path, before, edited, contents, lines)


def record_apply(plan: PlannedApply) -> None:
    """Note what ``plan`` does, so that it can be taken back; call it before anything else is written.

    Raises:
        UsageError: another artefact is applied to the file.
        TargetError: the folder cannot be written.
    """
    _write_record(plan.file, plan.before, plan.edited, dict(plan.contents), plan.run, plan.lines)


def restore_file(file: Path) -> Restored:
    """Take drk's edit out of ``file`` and remove what was written beside it, unless it was changed since.

    Raises:
        UsageError: nothing was applied to this file.
        TargetError: the file changed so that drk's lines cannot be found.
    """
    plan = plan_restore(file)
    if plan.restored != plan.before:
        write_atomically(plan.file, plan.restored)
    for path in plan.removable:
        path.unlink()
    forget_apply(plan.file)
    return Restored(plan.file, plan.exact, plan.removable, plan.kept)


def plan_restore(file: Path, *, now: bytes | None = None) -> PlannedRestore:
    """Return what takes drk's edit out of ``file``; nothing is written. ``now`` is its text as an editor shows it.

    Raises:
        UsageError: nothing was applied to this file.
        TargetError: the file changed so that drk's lines cannot be found.
    """
    path = file.resolve()
    record_path = _record_path(path)
    if not record_path.exists():
        raise UsageError(
            f"nothing was applied to {file}", help="`drk runs list` shows runs; `drk apply RUN` applies one"
        )
    record = _read_json(record_path)
    original = base64.b64decode(record["original"])
    before = _read_file(path) if now is None else now
    restored, exact = original, True
    # equal to the original: a restore that was killed half-way, or an apply that never edited
    if _sha256(before) != record["edited_sha256"] and before != original:
        changed = drop_lines(before, record["lines"])
        if changed is None:
            raise TargetError(
                f"{path.name} changed since the kernels were applied, and drk's lines are not as they were written",
                kind="changed",
                file=str(path),
                help="take these out by hand: " + "; ".join(line.strip() for line in record["lines"]),
            )
        restored, exact = changed, False
    removable, kept = _written(path.parent, record["written"])
    return PlannedRestore(path, before, restored, exact, removable, kept)


def forget_apply(file: Path) -> None:
    """Drop the note that :func:`record_apply` made."""
    _record_path(file.resolve()).unlink(missing_ok=True)


def applied_run(file: Path) -> str | None:
    """Return the name of the run that is applied to ``file``, or None.

    Raises:
        TargetError: the note cannot be read.
    """
    record_path = _record_path(file.resolve())
    return str(_read_json(record_path)["run"]) if record_path.exists() else None


def _edit_of(run: Run) -> dict[str, Any]:
    result = run.result or {}
    edit = _read_json(run.folder / "edit.json") if (run.folder / "edit.json").exists() else None
    if edit is None or not result.get("artefact"):
        why = result.get("artefact_reason") or result.get("reason") or "it has not ended"
        raise UsageError(f"run {run.name} has no artefact to apply", cause=str(why))
    return edit


def _follow(run: Run, now: bytes, lines: list[str]) -> bytes | None:
    """Make the run's edit in a text that changed elsewhere, or return None where what was verified changed."""
    target = str((run.result or {})["task"]["target"])
    imported = next((match for line in lines if (match := _IMPORT.match(line.strip()))), None)
    verified = run.folder / SOURCE_COPY
    if imported is None or not verified.exists() or not same_code(_read_file(verified), now, target):
        return None
    return add_kernels(now, target=target, kernels_module=imported[1])


def _written(folder: Path, written: dict[str, str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return which of the files that were written are still as they were, and which were changed since."""
    present = [(folder / name, digest) for name, digest in written.items() if (folder / name).exists()]
    same = tuple(path for path, digest in present if digest in _digests(path.read_bytes()))
    return same, tuple(path for path, _ in present if path not in same)


def _digests(data: bytes) -> tuple[str, str]:
    """Return the digest of a file, and of it with one line end at its end: some editors add or drop an empty line."""
    return _sha256(data), _sha256(data.rstrip(b"\r\n") + b"\n")


def _write_record(
    path: Path, before: bytes, edited: bytes, contents: dict[Path, bytes], run: str, lines: list[str]
) -> None:
    record_path = _record_path(path)
    if record_path.exists() and _sha256(before) != _sha256(base64.b64decode(_read_json(record_path)["original"])):
        raise UsageError(
            f"another artefact is applied to {path.name}", file=str(path), help=f"`drk restore {path.name}` first"
        )
    record = {
        "schema_version": 1,
        "run": run,
        "file": path.name,
        "original": base64.b64encode(before).decode(),
        "edited_sha256": _sha256(edited),
        "lines": lines,
        "written": {target.name: _sha256(data) for target, data in contents.items()},
    }
    try:
        ignore_folder(path.parent / ".drk")
        record_path.parent.mkdir(exist_ok=True)
        write_atomically(record_path, (json.dumps(record, indent=1) + "\n").encode())
    except OSError as error:
        raise TargetError(f"cannot write beside {path.name}", file=str(path), cause=str(error)) from error


def _record_path(path: Path) -> Path:
    return path.parent / ".drk" / RECORD / f"{path.name}.json"


def _check_ours(target: Path) -> None:
    if not target.exists():
        return
    text = target.read_bytes()[:4096].decode("utf-8", "replace")
    if not text.startswith(HEADER) and "Written by drk." not in text:
        raise TargetError(
            f"{target.name} exists and was not written by drk", file=str(target), help="move it away, or rename it"
        )


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TargetError(f"cannot read {path.name}", file=str(path), cause=str(error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(_read_file(path))
    except ValueError as error:
        raise TargetError(f"cannot read {path.name}", file=str(path), cause=str(error)) from error
    return data


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
