"""What the editor shows of stored profiles, by source file: compact rows instead of whole reports.

The nearest ``.drk/profiles`` above a file counts, and its newest report. A report is parsed once and boiled down to
rows for definitions (classes with their modules, functions) and for fusion candidates; kernels stay as short table rows
for the hover. Timelines and inputs are dropped, so that a server's memory does not grow with reports.

Left out: merging several profiles; reports over :data:`MAX_BYTES`, which a page shows better than an editor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drk.assistant.errors import DrkError, UsageError
from drk.assistant.report import BoundClass, Figure, FusionCandidate, KernelRow, ModuleRow, Place, Report, Times, Work
from drk.assistant.report_store import find_profiles_dir, load_report, open_profile

MAX_BYTES = 16 * 2**20
MAX_KERNELS = 8


@dataclass(frozen=True)
class KernelLine:
    """One row of a hover's table. Times are in microseconds, ``size_bytes`` is of the whole window."""

    name: str
    calls: int
    total_us: float
    share: float
    size_bytes: Figure | None
    percent_of_roof: float | None


@dataclass(frozen=True)
class Hotspot:
    """One definition's share of the time. ``target`` is what ``drk optimize`` takes (absolute file, colon,
    name), or empty.

    ``steps`` divides totals into times of one step; ``modules`` counts the objects of a class.
    """

    kind: Literal["class", "function"]
    place: Place
    share: float
    total_us: float
    steps: int
    calls: int
    median_us: float
    bound: BoundClass
    work: Work
    target: str = ""
    modules: int = 1
    kernels: tuple[KernelLine, ...] = ()


@dataclass(frozen=True)
class Fusable:
    """Operations that could be one kernel; ``target`` as in :class:`Hotspot`."""

    place: Place
    ops: tuple[str, ...]
    saved_us: Figure
    attainable_speedup: float | None
    reason: str
    target: str = ""


@dataclass(frozen=True)
class FileProfile:
    """What one profile says about one file. ``saved_targets`` are those of the whole profile that come with inputs."""

    report_id: str
    report_path: Path
    times_are: Literal["device", "cpu"]
    device: str
    saved_targets: frozenset[str] = frozenset()
    hotspots: tuple[Hotspot, ...] = ()
    fusables: tuple[Fusable, ...] = ()


@dataclass
class _Loaded:
    stamp: tuple[str, int, int]
    files: Mapping[str, FileProfile] = field(default_factory=dict)
    problem: str = ""


class ProfileStore:
    """Reads stored profiles on demand and remembers them until they change on disk."""

    def __init__(self) -> None:
        self._loaded: dict[Path, _Loaded] = {}

    def for_file(self, path: Path) -> FileProfile | None:
        """Return what the newest profile says about ``path``, or None. Nothing is raised."""
        folder = find_profiles_dir(path.parent)
        return self._load(folder).files.get(os.path.realpath(path)) if folder is not None else None

    def problem_for(self, path: Path) -> str:
        """Return why the newest profile cannot be read, or an empty text."""
        folder = find_profiles_dir(path.parent)
        return self._load(folder).problem if folder is not None else ""

    def stamp(self, path: Path) -> tuple[str, int, int] | None:
        """Return what changes when another profile counts for ``path``; costs a few ``stat`` calls."""
        folder = find_profiles_dir(path.parent)
        return _stamp(folder) if folder is not None else None

    def files_near(self, path: Path) -> dict[Path, FileProfile]:
        """Return every file that the newest profile above ``path`` (a folder) speaks of."""
        folder = find_profiles_dir(path)
        return {Path(name): found for name, found in self._load(folder).files.items()} if folder is not None else {}

    def _load(self, folder: Path) -> _Loaded:
        stamp = _stamp(folder)
        known = self._loaded.get(folder)
        if known is None or known.stamp != stamp:
            known = _read(stamp)
            self._loaded[folder] = known
        return known


def _stamp(folder: Path) -> tuple[str, int, int]:
    """Return path, time and size of the newest report; an empty path where there is none."""
    try:
        path = open_profile(folder)
        told = path.stat()
    except (DrkError, OSError):
        return ("", 0, 0)
    return (str(path), told.st_mtime_ns, told.st_size)


def _read(stamp: tuple[str, int, int]) -> _Loaded:
    name, _, size_bytes = stamp
    if not name:
        return _Loaded(stamp)
    if size_bytes > MAX_BYTES:
        return _Loaded(stamp, problem=f"{Path(name).name} is too large to show in an editor; open its report")
    try:
        report = load_report(Path(name))
    except UsageError as error:
        cause = f" ({error.cause})" if error.cause else ""
        return _Loaded(stamp, problem=f"{Path(name).name}: {error.message}{cause}")
    return _Loaded(stamp, index_report(report, Path(name)))


def index_report(report: Report, path: Path) -> dict[str, FileProfile]:
    """Return what a report says, by the real path of each source file."""
    hotspots: dict[str, list[Hotspot]] = {}
    fusables: dict[str, list[Fusable]] = {}
    for place, rows in _by_class(report).items():
        hotspots.setdefault(_file(report, place), []).append(_class_hotspot(report, place, rows))
    targets = {row.name: _target(report, row) for row in report.modules}
    for row in report.functions:
        owner = _owner_target(report, row.place)
        kernels = _kernel_lines(one for one in report.kernels if _same(one.place, row.place))
        hotspots.setdefault(_file(report, row.place), []).append(
            _hotspot(report, "function", row.place, row.times, row.work, owner, 1, kernels)
        )
    for candidate in report.fusions:
        if candidate.place is not None:
            fusables.setdefault(_file(report, candidate.place), []).append(_fusable(candidate, targets))
    saved = {_absolute(report, row.target) for row in report.modules if any(kind.task for kind in row.inputs)}
    facts = {
        "report_id": report.id,
        "saved_targets": frozenset(saved - {""}),
        "report_path": path,
        "times_are": report.method.times_are,
        "device": report.environment.device,
    }
    return {
        name: FileProfile(
            **facts,  # type: ignore[arg-type]
            hotspots=tuple(hotspots.get(name, ())),
            fusables=tuple(fusables.get(name, ())),
        )
        for name in {*hotspots, *fusables}
    }


def _file(report: Report, place: Place) -> str:
    return os.path.realpath(report.path_of(place))


def _same(one: Place | None, other: Place) -> bool:
    return one is not None and (one.file, one.qualname) == (other.file, other.qualname)


def _by_class(report: Report) -> dict[Place, list[ModuleRow]]:
    """Group modules by their class's place; one inside another of the same class is counted in the outer one."""
    by_name = {row.name: row for row in report.modules}
    groups: dict[Place, list[ModuleRow]] = {}
    for row in report.modules:
        if row.place is not None and row.place.qualname and not _inside_own_class(row, by_name):
            groups.setdefault(row.place, []).append(row)
    return groups


def _inside_own_class(row: ModuleRow, by_name: Mapping[str, ModuleRow]) -> bool:
    seen = {row.name}
    above = by_name.get(row.parent or "")
    while above is not None and above.name not in seen:
        if above.place == row.place:
            return True
        seen.add(above.name)
        above = by_name.get(above.parent or "")
    return False


def _class_hotspot(report: Report, place: Place, rows: list[ModuleRow]) -> Hotspot:
    heaviest = max(rows, key=lambda row: row.times.total_us)
    names = {row.name for row in rows}
    times = Times(
        total_us=sum(row.times.total_us for row in rows),
        share=min(sum(row.times.share for row in rows), 1.0),
        calls=sum(row.times.calls for row in rows),
        median_us=heaviest.times.median_us,
        p95_us=heaviest.times.p95_us,
    )
    below = _below(report.modules, names)
    kernels = _kernel_lines(kernel for kernel in report.kernels if kernel.module in below)
    target = _target(report, heaviest)
    return _hotspot(report, "class", place, times, heaviest.work, target, len(rows), kernels)


def _below(modules: Iterable[ModuleRow], names: set[str]) -> set[str]:
    """Return ``names`` and the names of everything inside them; parents stand before or after their parts."""
    found = set(names)
    pending = list(modules)
    while True:
        more = {row.name for row in pending if row.parent in found} - found
        if not more:
            return found
        found |= more


def _hotspot(
    report: Report,
    kind: Literal["class", "function"],
    place: Place,
    times: Times,
    work: Work,
    target: str,
    modules: int,
    kernels: tuple[KernelLine, ...],
) -> Hotspot:
    return Hotspot(
        kind=kind,
        place=place,
        share=times.share,
        total_us=times.total_us,
        steps=max(report.method.steps, 1),
        calls=times.calls,
        median_us=times.median_us,
        bound=work.bound,
        work=work,
        target=target,
        modules=modules,
        kernels=kernels,
    )


def _owner_target(report: Report, place: Place) -> str:
    """Return the target of the module whose class the function stands in; the function itself where it stands alone."""
    owner = place.qualname.rpartition(".")[0]
    if not owner:
        return f"{report.path_of(place)}:{place.qualname}"
    rows = [row for row in report.modules if row.place and (row.place.file, row.place.qualname) == (place.file, owner)]
    return _target(report, max(rows, key=lambda row: row.times.total_us)) if rows else ""


def _target(report: Report, row: ModuleRow) -> str:
    """Return a module's target with the file's absolute path.

    Of ``drk profile model.py`` the outermost row's target is the file alone: it is named by its class, so that it
    cannot be taken for another of the file, unless the class is of another file.
    """
    target, place = _absolute(report, row.target), row.place
    if not target or ":" in target or place is None or os.path.realpath(target) != _file(report, place):
        return target
    return f"{target}:{place.qualname}"


def _absolute(report: Report, target: str) -> str:
    """Return a target with its file's absolute path."""
    return str(Path(report.root) / target) if target else ""


def _kernel_lines(rows: Iterable[KernelRow]) -> tuple[KernelLine, ...]:
    found = sorted(rows, key=lambda row: -row.times.total_us)[:MAX_KERNELS]
    return tuple(
        KernelLine(
            row.name,
            row.times.calls,
            row.times.total_us,
            row.times.share,
            row.work.size_bytes,
            row.work.percent_of_roof,
        )
        for row in found
    )


def _fusable(row: FusionCandidate, targets: Mapping[str, str]) -> Fusable:
    assert row.place is not None
    return Fusable(
        row.place,
        row.ops,
        row.saved_us,
        row.attainable_speedup,
        row.reason,
        targets.get(row.module or "", ""),
    )
