"""Groups slices of time into rows: kernels, modules, functions; pure functions of a trace and a recording.

Kernel rows are groups of one name, operator, module, line and phase, so they sum to the total. Module rows are
inclusive: a slice counts for every module call around it. Function rows count a slice for the function that its line
stands in. Part rows say what ran outside of all modules. What limits a row is worked out in
:mod:`drk.assistant.profile_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drk.assistant.profile_recording import RecordedModule, Recording, plain_path
from drk.assistant.profile_trace import Slice
from drk.assistant.profile_tree import OpCall
from drk.assistant.profile_work import floor_us, peak_key, quantile, row_work, total_cost
from drk.assistant.report import BoundClass, FunctionRow, KernelRow, ModuleRow, PartRow, Place, Roof, Times, Work
from drk.assistant.report_source import SourcePlaces

MAX_KERNEL_ROWS = 300
MAX_MODULE_ROWS = 2_000
MAX_STEPS_KEPT = 200
PACKAGE_FOLDERS = frozenset(("site-packages", "dist-packages"))
Key = TypeVar("Key")


@dataclass(frozen=True)
class Ground:
    """What all rows stand on. ``comparable``: the roof is of the device that ran; ``waiting``: its idle share."""

    recording: Recording
    names: dict[int, str]
    places: SourcePlaces
    total_us: float
    steps: tuple[int, ...]
    roof: Roof | None
    comparable: bool
    waiting: float | None
    own_prefixes: tuple[str, ...] = ()

    def place(self, line: int | None) -> Place | None:
        """Return the place of a line-table number."""
        if line is None or not 0 <= line < len(self.recording.lines):
            return None
        return self.places.at(*self.recording.lines[line])


def grouped(slices: Iterable[Slice], key: Callable[[Slice], Key]) -> dict[Key, list[Slice]]:
    """Group slices by key, in order of first appearance."""
    groups: dict[Key, list[Slice]] = {}
    for piece in slices:
        groups.setdefault(key(piece), []).append(piece)
    return groups


def times_of(slices: Sequence[Slice], durations: Sequence[float], ground: Ground) -> Times:
    """Return the times of a row; ``durations`` are those of its calls."""
    total = sum(piece.duration_us for piece in slices)
    by_step = dict.fromkeys(ground.steps, 0.0)
    for piece in slices:
        if piece.step in by_step:
            by_step[piece.step] += piece.duration_us
    return Times(
        total_us=total,
        share=total / ground.total_us if ground.total_us else 0.0,
        calls=len(durations),
        median_us=quantile(durations, 0.5),
        p95_us=quantile(durations, 0.95),
        per_step_us=tuple(by_step.values())[:MAX_STEPS_KEPT],
    )


def work_of(slices: Sequence[Slice], times: Times, ground: Ground) -> Work:
    """Return what limits a row: floors of its slices are summed, since each has its own roof."""
    works = [work for piece in slices for work in piece.works]
    cost = total_cost(works)
    floor = None
    if cost is not None and ground.roof is not None:
        facts = ground.recording.environment
        flags = {"tf32": bool(facts.get("tf32_matmul")), "tf32_conv": bool(facts.get("tf32_conv"))}
        floor = _floor(works, ground.roof, flags)
    launches = [piece.duration_us for piece in slices]
    return row_work(
        total_us=times.total_us,
        all_us=ground.total_us,
        median_us=quantile(launches, 0.5),
        cost=cost,
        floor=floor,
        comparable=ground.comparable,
        waiting=ground.waiting,
    )


def _floor(works: Sequence[tuple[OpCall, float]], roof: Roof, flags: Mapping[str, bool]) -> tuple[float, BoundClass]:
    by_class: dict[BoundClass, float] = {}
    for work in works:
        cost = total_cost([work])
        if cost is not None:
            least, binding = floor_us(*cost, roof, peak_key([work], **flags))
            by_class[binding] = by_class.get(binding, 0.0) + least
    known = {name: value for name, value in by_class.items() if name != "unknown"}
    if not known:
        return 0.0, "unknown"
    return sum(known.values()), max(known, key=lambda name: known[name])


# --- kernels -----------------------------------------------------------------------------------------------------


def kernel_rows(slices: Sequence[Slice], ground: Ground) -> tuple[KernelRow, ...]:
    """Return kernel rows, longest first; beyond a limit the rest is one row."""
    groups = grouped(slices, lambda piece: (piece.name, piece.op, piece.module, piece.line, piece.phase))
    order = sorted(groups.values(), key=lambda rows: -sum(piece.duration_us for piece in rows))
    rows = [_kernel_row(group, ground) for group in order[:MAX_KERNEL_ROWS]]
    rest = [piece for group in order[MAX_KERNEL_ROWS:] for piece in group]
    if rest:
        times = times_of(rest, [piece.duration_us for piece in rest], ground)
        rows.append(KernelRow(f"({len(order) - MAX_KERNEL_ROWS} more)", "", times, phase="other"))
    return tuple(rows)


def _kernel_row(group: list[Slice], ground: Ground) -> KernelRow:
    first = group[0]
    times = times_of(group, [piece.duration_us for piece in group], ground)
    launch = first.launch
    return KernelRow(
        name=first.name,
        op=first.op,
        times=times,
        work=work_of(group, times, ground),
        module=ground.names.get(first.module) if first.module is not None else None,
        place=ground.place(first.line),
        grid=launch.grid if launch is not None else None,
        block=launch.block if launch is not None else None,
        registers=launch.registers if launch is not None else None,
        shared_bytes=launch.shared_bytes if launch is not None else None,
        phase=first.phase,
    )


# --- modules -----------------------------------------------------------------------------------------------------


def module_rows(slices: Sequence[Slice], ground: Ground) -> tuple[ModuleRow, ...]:
    """Return one row for each module that was called, by what could be gained (time above the floor, else time)."""
    inclusive: dict[int, list[Slice]] = {}
    parents = {module.id: module.parent for module in ground.recording.modules}
    for piece in slices:
        for number in _modules_around(piece, parents):
            inclusive.setdefault(number, []).append(piece)
    found = [
        _module_row(module, inclusive.get(module.id, []), ground)
        for module in ground.recording.modules[:MAX_MODULE_ROWS]
    ]
    return tuple(sorted(found, key=_gain, reverse=True))


def _modules_around(piece: Slice, parents: Mapping[int, int | None]) -> list[int]:
    """Return the modules that a slice counts for.

    Checkpointed parts are called again in the backward pass, outside of the modules that they are in: those count too.
    """
    found = dict.fromkeys(number for number, _ in piece.calls)
    above = parents.get(piece.calls[0][0]) if piece.calls else None
    while above is not None and above not in found:
        found[above] = None
        above = parents.get(above)
    return list(found)


def _gain(row: ModuleRow) -> float:
    floor = row.work.floor_us.value if row.work.floor_us is not None and row.work.percent_of_roof is not None else 0.0
    return max(row.times.total_us - floor, 0.0)


def _module_row(module: RecordedModule, slices: list[Slice], ground: Ground) -> ModuleRow:
    instances: dict[int, float] = {}
    for piece in slices:
        call = next((call for number, call in piece.calls if number == module.id), None)
        if call is not None:
            instances[call] = instances.get(call, 0.0) + piece.duration_us
    own = [piece for piece in slices if piece.module == module.id]
    times = times_of(slices, list(instances.values()), ground)
    parent = module.parent
    return ModuleRow(
        name=ground.names[module.id],
        path=plain_path(module.path),
        class_name=module.class_name,
        times=times,
        self_us=sum(piece.duration_us for piece in own),
        work=work_of(slices, times, ground),
        parent=ground.names.get(parent) if parent is not None else None,
        depth=_depth(module.id, ground),
        launches=len(slices),
        place=ground.places.definition(module.file, module.class_name) if _is_own(module.file, ground) else None,
        called_at=ground.place(module.called_at),
    )


def _is_own(file: str, ground: Ground) -> bool:
    installed = PACKAGE_FOLDERS & set(Path(file).parts)  # a project's virtual environment lies within its folder
    return bool(file) and file.startswith(ground.own_prefixes) and not installed


def _depth(number: int, ground: Ground) -> int:
    parents = {module.id: module.parent for module in ground.recording.modules}
    depth, at = 0, parents.get(number)
    while at is not None and depth < 100:
        depth, at = depth + 1, parents.get(at)
    return depth


# --- functions ---------------------------------------------------------------------------------------------------


def function_rows(slices: Sequence[Slice], ground: Ground) -> tuple[FunctionRow, ...]:
    """Return one row for each function of the user's sources that launched something, longest first."""
    lines: dict[tuple[str, str, int], list[tuple[Place, list[Slice]]]] = {}
    for line, pieces in grouped(slices, lambda piece: piece.line).items():
        place = ground.place(line)
        if place is not None:
            key = (place.file, place.qualname, place.first_line if place.qualname else 0)
            lines.setdefault(key, []).append((place, pieces))
    rows = [_function_row(group, ground) for group in lines.values()]
    return tuple(sorted(rows, key=lambda row: -row.times.total_us))


def _function_row(lines: list[tuple[Place, list[Slice]]], ground: Ground) -> FunctionRow:
    hottest = max(lines, key=lambda item: sum(piece.duration_us for piece in item[1]))[0]
    pieces = [piece for _, group in lines for piece in group]
    times = times_of(pieces, [piece.duration_us for piece in pieces], ground)
    name = hottest.qualname or f"{hottest.file} (top level)"
    return FunctionRow(name, times, hottest, work_of(pieces, times, ground))


# --- parts outside of modules ------------------------------------------------------------------------------------


def part_rows(slices: Sequence[Slice], ground: Ground) -> tuple[PartRow, ...]:
    """Return one row for each optimizer and each function that launched something outside of modules, longest first."""
    groups: dict[str, list[Slice]] = {}
    for piece in slices:
        name = part_name(piece, ground)
        if name:
            groups.setdefault(name, []).append(piece)
    rows = [_part_row(name, pieces, ground) for name, pieces in groups.items()]
    return tuple(sorted(rows, key=lambda row: -row.times.total_us))


def part_name(piece: Slice, ground: Ground) -> str:
    """Return the part outside of modules that a slice belongs to; empty where it is in a module or not known."""
    if piece.calls or piece.part:
        return "" if piece.calls else piece.part
    place = ground.place(piece.line)
    return "" if place is None else place.qualname or f"{place.file} (top level)"


def _part_row(name: str, pieces: list[Slice], ground: Ground) -> PartRow:
    lines = grouped(pieces, lambda piece: piece.line)
    hottest = max(lines, key=lambda line: sum(piece.duration_us for piece in lines[line]))
    return PartRow(name, times_of(pieces, [piece.duration_us for piece in pieces], ground), ground.place(hottest))
