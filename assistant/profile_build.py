"""Makes a Report of a recording and its trace; a pure function but for reading source files.

Steps: the first two of the window warm up (one, where there are fewer than five) and are left out; a single step is
taken as it is, with a warning. Wall time is the median of steps outside of the profiler's window where there are any,
since the profiler slows the host; else that of the window.

On the CPU (no kernels in the trace) the time is that of operators, and ``--target`` adds what a GPU would need at best.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from drk.assistant.profile_fusion import fusion_candidates
from drk.assistant.profile_recording import Recording
from drk.assistant.profile_rows import Ground, function_rows, kernel_rows, module_rows, part_name, part_rows
from drk.assistant.profile_steps import Window, idle_split, timeline, window_of
from drk.assistant.profile_trace import Slice, Trace
from drk.assistant.profile_work import roof_of
from drk.assistant.report import Attribution, Environment, Figure, IdleSplit, Method, Report, Roof
from drk.assistant.report_source import SourcePlaces
from drk.assistant.report_verdict import verdict_sentence
from drk.gym.devices import device_facts
from drk.gym.errors import DeviceError

NEAR_WALL = 0.05


@dataclass(frozen=True)
class Asked:
    """What the command asked for: it goes into the report's method. ``own_prefixes`` are folders of user code."""

    id: str
    title: str
    root: Path
    method: Method
    target: str | None = None
    own_prefixes: tuple[str, ...] = ()


def build_report(recording: Recording, trace: Trace, asked: Asked) -> Report:
    """Return the report; ``asked.method`` supplies everything but steps, warm-up and whose times they are."""
    window = window_of(trace, recording)
    sites = {module.id: module.called_at for module in recording.modules}
    slices = [_with_call_site(piece, sites) for piece in trace.slices if window.holds(piece)]
    total = sum(piece.duration_us for piece in slices)
    idle = idle_split(slices, window) if trace.on_device else None
    roof, warnings = _roof(recording, trace.on_device, asked.target)
    warnings = (*warnings, *_device_warnings(recording, trace))
    ground = Ground(
        recording=recording,
        names=recording.module_names(),
        places=SourcePlaces(asked.root),
        total_us=total,
        steps=window.steps,
        roof=roof,
        comparable=trace.on_device and roof is not None,
        waiting=(idle.idle_us + idle.launch_us) / idle.wall_us if idle is not None and idle.wall_us else None,
        own_prefixes=asked.own_prefixes or (str(asked.root),),
    )
    kernels = kernel_rows(slices, ground)
    floors = [row.work.floor_us.value for row in kernels if row.work.floor_us is not None]
    report = Report(
        id=asked.id,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        title=asked.title,
        verdict="",
        root=str(asked.root),
        total_us=total,
        wall_us=window.wall_us,
        method=_method(asked.method, window, trace.on_device),
        environment=_environment(recording),
        attribution=_attribution(slices, window, ground, idle),
        roof=roof,
        kernels=kernels,
        modules=module_rows(slices, ground),
        functions=function_rows(slices, ground),
        parts=part_rows(slices, ground),
        fusions=fusion_candidates(slices, ground),
        timeline=timeline(trace, window, ground.names),
        idle=idle,
        floor_us=Figure(sum(floors), "estimated") if floors else None,
        step_us=window.step_us,
        not_covered=_not_covered(recording, trace),
        warnings=(*warnings, *window.warnings, *recording.notes),
    )
    return replace(report, verdict=verdict_sentence(report))


def _with_call_site(piece: Slice, sites: Mapping[int, int | None]) -> Slice:
    """Return a slice whose line is not known (compiled code, a replayed graph) with the line that calls its module."""
    if piece.line is not None or not piece.calls:
        return piece
    known = [site for number, _ in reversed(piece.calls) if (site := sites.get(number)) is not None]
    return replace(piece, line=known[0]) if known else piece


def _device_warnings(recording: Recording, trace: Trace) -> tuple[str, ...]:
    device = str(recording.environment.get("device", "cpu"))
    if device != "cpu" and not trace.on_device:
        return (f"the program used {device}, and torch.profiler saw no kernel on it: the times are the host's",)
    if len(trace.devices) > 1:
        count, shown = len(trace.devices), trace.devices[0]
        return (f"kernels ran on {count} GPUs of this process: those of cuda:{shown} are shown",)
    return ()


def _roof(recording: Recording, on_device: bool, target: str | None) -> tuple[Roof | None, tuple[str, ...]]:
    name = str(recording.environment.get("device", "")) if on_device else target
    if not name:
        return None, ()
    try:
        return roof_of(device_facts(name), running=on_device), ()
    except DeviceError as error:
        return None, (f"{error.message}: no roofs, classes and floors are given",)


def _method(method: Method, window: Window, on_device: bool) -> Method:
    notes = method.notes
    if window.wall_is_clean:
        notes = (*notes, "wall time is of steps without the profiler")
    return replace(
        method,
        times_are="device" if on_device else "cpu",
        steps=len(window.steps),
        warmup=window.warmup,
        notes=notes,
    )


def _environment(recording: Recording) -> Environment:
    facts = recording.environment
    extra: dict[str, str] = {name: str(facts[name]) for name in ("tf32_matmul", "tf32_conv") if name in facts}
    return Environment(
        device=str(facts.get("device", "cpu")),
        torch=str(facts.get("torch", "")),
        triton=_version("triton"),
        python=str(facts.get("python", "")),
        cuda=str(facts.get("cuda", "")),
        cpu=_cpu_name(),
        threads=int(facts.get("threads", 0)),
        drk=_version("drk"),
        facts={**extra, "cores": str(os.cpu_count() or 0)},
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _attribution(slices: Sequence[Slice], window: Window, ground: Ground, idle: IdleSplit | None) -> Attribution:
    total = ground.total_us
    in_module = sum(piece.duration_us for piece in slices if piece.calls)
    in_part = sum(piece.duration_us for piece in slices if part_name(piece, ground))
    on_line = sum(piece.duration_us for piece in slices if piece.line is not None)
    ratio = total / window.wall_us if window.wall_us else None
    explanation = ""
    if ratio is not None and abs(1 - ratio) > NEAR_WALL:
        explanation = _explain(ratio, total, idle)
    if not total:
        return Attribution(1.0, 1.0, ratio, explanation, 1.0)
    return Attribution(in_module / total, on_line / total, ratio, explanation, (in_module + in_part) / total)


def _explain(ratio: float, total: float, idle: IdleSplit | None) -> str:
    rest = 100 * (1 - ratio)
    if idle is None and ratio < 1:
        return f"{rest:.0f} % of the wall time is not in operators: Python, data loading, and the program's own waiting"
    if idle is None:
        return "operators ran slower under the profiler, or side by side on several threads"
    if ratio < 1:
        return f"the device waits {rest:.0f} % of the wall time: see the idle split"
    if total > (1 + NEAR_WALL) * idle.busy_us:
        return "kernels overlap on several streams, so that their times add up to more than the wall time"
    return "kernels took longer under the profiler than in the steps after it"


def _not_covered(recording: Recording, trace: Trace) -> tuple[str, ...]:
    told = ["code outside of PyTorch's operators: Python itself, data loading, other libraries"]
    if any(module.compiled for module in recording.modules):
        told.append("lines inside of what torch.compile compiled: it counts as one module")
    if not recording.window.lines:
        told.append("source lines of operators inside of modules (the program compiles): the lines that call them only")
    if not trace.on_device:
        told.append("GPU times: nothing ran on a GPU here")
    told.append("measured memory traffic and FLOPs: they are estimated from shapes")
    return tuple(told)


def own_prefixes(root: Path, files: Sequence[str]) -> tuple[str, ...]:
    """Return the folders whose classes count as the user's own: the root, and those of the files that ran."""
    return tuple(dict.fromkeys([f"{root}/", *(f"{Path(file).parent}/" for file in files)]))
