"""Finding what ``drk report`` and ``drk compare`` are to show: a run, a stored profile, or a report file.

A name is a run or a profile of the current folder (or a unique part of one's name), a path is a ``.json`` or ``.html``
report or a run folder; without a name the newest of the latest run and the latest profile counts. Excerpts of source
files are read here too, only where the function is still the one that was measured (its syntax hash tells).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from drk.assistant.errors import UsageError
from drk.assistant.report import FunctionRow, Place, Report, from_json
from drk.assistant.report_page import PAGE_KIND, Excerpt, Page, page_from_html, page_from_json, read_text
from drk.assistant.report_run import run_report
from drk.assistant.report_source import MAX_SOURCE_BYTES, SourcePlaces
from drk.assistant.report_store import LATEST, find_profiles_dir, list_profiles, load_report, open_profile
from drk.assistant.report_verdict import duration_text
from drk.assistant.runs import Run, list_runs, open_run

MAX_EXCERPTS = 6
_LINES_AROUND = 12
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Found:
    """A page with where it came from: ``place`` is the folder that its HTML goes to, ``name`` its stem there."""

    page: Page
    name: str
    place: Path


def find_page(name: str | None, runs_dir: Path, profiles_dir: Path | None = None) -> Found:
    """Return what ``name`` means.

    Raises:
        UsageError: there is nothing of that name, or it cannot be read.
        BundleError: a file of a run is malformed.
    """
    profiles = profiles_dir or find_profiles_dir(Path.cwd())
    if name is None:
        return _newest(runs_dir, profiles)
    path = Path(name)
    if path.is_file():
        return Found(_of_file(path), path.stem, path.resolve().parent)
    if (path / "config.json").is_file():
        return _of_run(Run(path.resolve()))
    ids = list_profiles(profiles) if profiles is not None else []
    runs = [run.name for run in list_runs(runs_dir)]
    of_runs, of_profiles = _fitting(name, runs), _fitting(name, ids)
    if of_runs and of_profiles:
        both = ", ".join([*of_runs, *of_profiles][:6])
        raise UsageError(f"{name!r} fits runs and profiles", cause=both, help="give more of the name")
    if of_runs or not ids:
        return _of_run(open_run(runs_dir, name))
    return _of_profile(open_profile(profiles, name))


def _fitting(name: str, names: list[str]) -> list[str]:
    return [one for one in names if one == name] or [one for one in names if name in one]


def _newest(runs_dir: Path, profiles: Path | None) -> Found:
    runs = list_runs(runs_dir)
    ids = list_profiles(profiles) if profiles is not None else []
    if not runs and not ids:
        raise UsageError(
            "there is no run and no profile here", help="`drk profile model.py` or `drk optimize model.py` makes one"
        )
    # both kinds of name begin with the time
    if runs and (not ids or runs[0].name >= ids[0]):
        return _of_run(open_run(runs_dir, LATEST))
    return _of_profile(open_profile(profiles))


def _of_run(run: Run) -> Found:
    return Found(Page(run=run_report(run)), "report", run.folder)


def _of_profile(path: Path) -> Found:
    return Found(_with_excerpts(load_report(path)), path.stem, path.parent)


def _of_file(path: Path) -> Page:
    text = read_text(path)
    if path.suffix.lower() in (".html", ".htm"):
        return page_from_html(text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError("the report cannot be read", kind="report", file=str(path), cause=str(error)) from error
    if isinstance(data, dict) and data.get("kind") == PAGE_KIND:
        return page_from_json(data)
    return _with_excerpts(from_json(data))


def _with_excerpts(report: Report) -> Page:
    return Page(report, excerpts=source_excerpts(report))


def source_excerpts(report: Report) -> tuple[Excerpt, ...]:
    """Return the lines around the hottest lines, from files that lie inside the report's root and are unchanged."""
    root = Path(report.root)
    places = SourcePlaces(root)
    found: list[Excerpt] = []
    for row in sorted(report.functions, key=lambda row: -row.times.share)[:MAX_EXCERPTS]:
        place, share = row.place, row.times.share
        if share < _LEAST_SHARE or Path(place.file).is_absolute() or ".." in Path(place.file).parts:
            continue
        now = places.definition(str(root / place.file), place.qualname)
        if now is None or not place.ast_hash or now.ast_hash != place.ast_hash:
            continue
        moved = replace(now, line=place.line + now.first_line - place.first_line)
        lines = _lines(root / place.file)
        first, last = _range(moved, len(lines))
        title = f"{row.name}: {100 * share:.1f} % of the time"
        shown = tuple(lines[first - 1 : last])
        found.append(Excerpt(title, place.file, first, moved.line, shown, _hint(report, row)))
    return tuple(found)


_REASONS = {
    "memory": "limited by memory traffic: fusing it with its neighbours saves that",
    "compute": "limited by arithmetic: a faster product, or a lower precision that you allow",
    "launch": "limited by launches: one kernel instead of several, or a CUDA graph",
    "latency": "far below both roofs: too little parallel work, or a kernel that fits badly",
}


def _hint(report: Report, row: FunctionRow) -> str:
    """Say what limits a function, what it is worth at most, and which fusion was found in it."""
    reason = _REASONS.get(row.work.bound, "")
    if reason and report.method.times_are == "cpu" and report.roof is not None:
        reason += f" (estimated for {report.roof.name.partition(',')[0]})"
    parts = [reason]
    bound = row.work.amdahl_bound
    parts.append(f"worth at most {bound:.2f}x by Amdahl" if bound is not None and bound < 100 else "")
    here = next((one for one in report.fusions if one.place is not None and _inside(one.place, row.place)), None)
    if here is not None:
        saved = duration_text(here.saved_us.value / max(report.method.steps, 1))
        parts.append(f"fusing {' + '.join(here.ops[:4])} could save {saved} a step (estimated)")
    return "; ".join(part for part in parts if part)


def _inside(place: Place, function: Place) -> bool:
    return place.file == function.file and function.first_line <= place.line <= function.end_line


def _range(place: Place, count: int) -> tuple[int, int]:
    first = max(place.first_line, place.line - _LINES_AROUND, 1)
    return first, min(place.end_line, place.line + _LINES_AROUND, count)


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_SOURCE_BYTES:
            return []
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
