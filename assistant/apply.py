"""Putting an artefact into the user's folder, and taking it back byte for byte.

``apply_artefact`` writes the module and its test beside the user's file and edits that file, each whole or not at all,
the edit last: a process killed in between leaves the user's code as it was. It refuses when the file changed since it
was optimised, or when a file of that name is not ours. What was done is recorded in ``.drk/applied/`` beside the file,
with the original bytes, so that :func:`restore_file` needs nothing else.

``restore_file`` brings the original bytes back when the file is as ``apply`` left it; when it was edited since, only
drk's own lines are taken out, if they are still there unchanged; else it refuses and says why.

Left out: several targets of one file applied at once (restore the first, optimise anew), and version control.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drk.assistant.artefact import HEADER
from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import TargetError, UsageError
from drk.assistant.runs import Run, ignore_folder
from drk.assistant.source_edit import drop_lines

RECORD = "applied"


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


def apply_artefact(run: Run, file: Path | None = None) -> Applied:
    """Write a run's artefact beside the user's file and edit the file.

    Args:
        run: a finished run with an artefact.
        file: where the user's file lies now, if it was moved.

    Raises:
        UsageError: the run has no artefact, or it is applied already.
        TargetError: the file is missing or changed since; a file in the way is not ours.
    """
    result = run.result or {}
    edit = _read_json(run.folder / "edit.json") if (run.folder / "edit.json").exists() else None
    if edit is None or not result.get("artefact"):
        why = result.get("artefact_reason") or result.get("reason") or "it has not ended"
        raise UsageError(f"run {run.name} has no artefact to apply", cause=str(why))
    path = (file or Path(edit["file"])).resolve()
    before = _read_file(path)
    edited = base64.b64decode(edit["edited"])
    if before == edited:
        raise UsageError(
            f"run {run.name} is applied already", file=str(path), help=f"`drk restore {path.name}` undoes it"
        )
    if _sha256(before) != edit["sha256"]:
        raise TargetError(
            f"{path.name} changed since it was optimised",
            kind="changed",
            file=str(path),
            cause="the kernels were verified against the earlier text",
            help="run drk optimize again",
        )
    files = {path.with_name(name): run.folder / name for name in (edit["module"], edit["test"])}
    contents = {target: _read_file(origin) for target, origin in files.items()}
    for target in contents:
        _check_ours(target)
    _write_record(path, before, edited, contents, run.name, edit["lines"])
    for target, data in contents.items():
        write_atomically(target, data)
    write_atomically(path, edited)
    return Applied(path, tuple(contents))


def restore_file(file: Path) -> Restored:
    """Take drk's edit out of ``file`` and remove what was written beside it, unless it was changed since.

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
    now = _read_file(path)
    exact = True
    if _sha256(now) == record["edited_sha256"]:
        write_atomically(path, original)
    elif now != original:  # equal: a restore that was killed half-way, or an apply that never edited
        changed = drop_lines(now, record["lines"])
        if changed is None:
            raise TargetError(
                f"{path.name} changed since the kernels were applied, and drk's lines are not as they were written",
                kind="changed",
                file=str(path),
                help="take these out by hand: " + "; ".join(line.strip() for line in record["lines"]),
            )
        write_atomically(path, changed)
        exact = False
    removed, kept = _remove_written(path.parent, record["written"])
    record_path.unlink()
    return Restored(path, exact, removed, kept)


def _remove_written(folder: Path, written: dict[str, str]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    removed, kept = [], []
    for name, digest in written.items():
        path = folder / name
        if not path.exists():
            continue
        if _sha256(path.read_bytes()) == digest:
            path.unlink()
            removed.append(path)
        else:
            kept.append(path)
    return tuple(removed), tuple(kept)


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
