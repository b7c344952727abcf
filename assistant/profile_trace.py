"""Reads a Chrome trace of torch.profiler and ties every kernel or operator to a module, a source line and a step.

Host events form trees that know their module and line (:mod:`drk.assistant.profile_tree`). A kernel belongs to the host
event that launched it (correlation id), or where that was not seen to the operator with its external id.

The result is a list of :class:`Slice`: kernels and copies where the trace has a device, else operators with the time
that is their own. Works on plain dicts, so that traces of GPUs can be tested without one.

Limits: kernels of a replayed CUDA graph belong to the replay, not to the lines that were captured.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drk.assistant.errors import UsageError
from drk.assistant.profile_marks import MARK
from drk.assistant.profile_tree import (
    Node,
    OpCall,
    Phase,
    does_the_work,
    inherit,
    is_trivial,
    nest,
    plain_name,
    step_starts,
    unit_of,
    work_of_node,
)

MAX_TRACE_BYTES = 2 * 2**30
DEVICE_KINDS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
HOST_KINDS = frozenset(("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"))


@dataclass(frozen=True)
class Launch:
    """Facts of one kernel launch; null where the trace has none."""

    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    stream: int = 0


@dataclass(frozen=True)
class Slice:
    """One piece of time: a kernel, or an operator's own time on the CPU.

    ``calls`` are the module calls around it, outermost first, as (module number, number of the call in the trace);
    ``line`` is a number of the line table; ``works`` are the operators whose work it does, with its fraction of each.
    ``host_us`` is when the host began it; ``part`` the optimizer's step it belongs to (``AdamW.step``), else empty.
    """

    name: str
    op: str
    start_us: float
    duration_us: float
    host_us: float
    phase: Phase
    step: int | None
    line: int | None = None
    calls: tuple[tuple[int, int], ...] = ()
    works: tuple[tuple[OpCall, float], ...] = ()
    launch: Launch | None = None
    part: str = ""

    @property
    def module(self) -> int | None:
        """The innermost module."""
        return self.calls[-1][0] if self.calls else None


@dataclass(frozen=True)
class Trace:
    """Everything that ran between the first step's begin and the end of the window, the recorder's own work left out.

    ``step_starts`` are (step number, microseconds) in order; ``end_us`` is when the last thing ended. ``devices`` are
    the GPUs that worked, the busiest first: slices are of that one.
    """

    slices: tuple[Slice, ...]
    on_device: bool
    step_starts: tuple[tuple[int, float], ...]
    end_us: float
    spans: tuple[tuple[int, float, float, int], ...] = ()
    """Calls of modules: (module number, start, duration, depth)."""
    devices: tuple[int, ...] = ()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a Chrome trace file.

    Raises:
        UsageError: kind ``trace``: missing, too large or malformed.
    """
    try:
        if path.stat().st_size > MAX_TRACE_BYTES:
            raise UsageError("the trace is too large", kind="trace", file=str(path), help="record fewer --steps")
        data = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return [event for event in data["traceEvents"] if event.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("the trace cannot be read", kind="trace", file=str(path), cause=str(error)) from error


def analyse(events: Iterable[Mapping[str, Any]], root: int | None = None) -> Trace:
    """Tie the events together; ``root`` is the module number whose calls are steps."""
    host: dict[Any, list[Mapping[str, Any]]] = {}
    device: list[Mapping[str, Any]] = []
    for event in events:
        kind = event.get("cat")
        if kind in HOST_KINDS:
            host.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        elif kind in DEVICE_KINDS:
            device.append(event)
    nodes = [node for thread, rows in host.items() for node in nest(rows, thread)]
    starts = step_starts(nodes, root)
    inherit(nodes)
    kept = [node for node in nodes if not node.own]
    begin = starts[0][1] if starts else float("-inf")
    devices = _busiest_first(device)
    shown = [event for event in device if _device_number(event) == devices[0]]
    slices = _device_slices(shown, nodes) if device else _host_slices(kept)
    placed = [_with_step(piece, starts) for piece in slices if piece.host_us >= begin]
    placed.sort(key=lambda piece: piece.start_us)
    ends = [piece.start_us + piece.duration_us for piece in placed]
    ends += [node.end for node in kept if not node.mark]
    end = max(ends, default=0.0)
    return Trace(tuple(placed), bool(device), tuple(starts), end, tuple(_spans(kept, begin)), devices)


def _device_number(event: Mapping[str, Any]) -> int:
    return _number((event.get("args") or {}).get("device")) or 0


def _busiest_first(events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Return the numbers of the GPUs that the events are of."""
    busy: dict[int, float] = {}
    for event in events:
        number = _device_number(event)
        busy[number] = busy.get(number, 0.0) + float(event.get("dur", 0.0))
    return tuple(sorted(busy, key=lambda number: -busy[number]))


# --- slices ----------------------------------------------------------------------------------------------------


def _host_slices(nodes: Sequence[Node]) -> list[Slice]:
    """One slice for each outermost operator, with its own time and that of operators inside it."""
    times: dict[int, float] = {}
    units: dict[int, Node] = {}
    works: dict[int, list[tuple[OpCall, float]]] = {}
    for node in reversed(nodes):
        above = node.parent
        if above is not None and node.is_op and (node.inner_work or not is_trivial(node)):
            above.inner_work = True
    for node in nodes:
        if not node.is_op:
            continue
        unit = unit_of(node)
        key = id(unit)
        units[key] = unit
        times[key] = times.get(key, 0.0) + node.self_us
        if does_the_work(node):
            works.setdefault(key, []).append((work_of_node(node), 1.0))
    return [
        Slice(
            plain_name(unit.name),
            plain_name(unit.name),
            unit.start,
            times[key],
            unit.start,
            unit.phase,
            None,
            unit.line,
            unit.calls,
            tuple(works.get(key, ())),
            part=unit.part,
        )
        for key, unit in units.items()
    ]


def _device_slices(events: Sequence[Mapping[str, Any]], nodes: Sequence[Node]) -> list[Slice]:
    """One slice for each kernel, copy and fill, at the host event that launched it; the recorder's own are left out."""
    launches: dict[Any, Node] = {}
    outside: dict[Any, Node] = {}
    for node in nodes:
        correlation = node.args.get("correlation")
        if node.kind in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launches[correlation] = node
        elif node.is_op and "External id" in node.args:
            outside[node.args["External id"]] = node
    rows = []
    for event in events:
        args = event.get("args") or {}
        launcher = launches.get(args.get("correlation")) or outside.get(args.get("External id"))
        if launcher is not None and launcher.own:
            continue
        op = launcher
        while op is not None and not op.is_op:
            op = None if op.mark else op.parent
        rows.append((event, launcher, op))
    totals: dict[int, float] = {}
    for event, _, op in rows:
        if op is not None:
            totals[id(op)] = totals.get(id(op), 0.0) + float(event.get("dur", 0.0))
    return [_device_slice(event, launcher, op, totals) for event, launcher, op in rows]


def _device_slice(
    event: Mapping[str, Any], launcher: Node | None, op: Node | None, totals: Mapping[int, float]
) -> Slice:
    args = event.get("args") or {}
    start, duration = float(event["ts"]), float(event.get("dur", 0.0))
    total = totals.get(id(op), 0.0) if op is not None else 0.0
    return Slice(
        str(event["name"]),
        plain_name(op.name) if op is not None else str(event.get("cat", "")),
        start,
        duration,
        launcher.start if launcher is not None else start,
        launcher.phase if launcher is not None else "other",
        None,
        launcher.line if launcher is not None else None,
        launcher.calls if launcher is not None else (),
        ((work_of_node(op), duration / total if total else 1.0),) if op is not None else (),
        Launch(
            _numbers(args.get("grid")),
            _numbers(args.get("block")),
            _number(args.get("registers per thread")),
            _number(args.get("shared memory")),
            _number(args.get("stream")) or 0,
        ),
        launcher.part if launcher is not None else "",
    )


def _numbers(value: Any) -> tuple[int, ...] | None:
    return tuple(int(item) for item in value) if isinstance(value, list) else None


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _with_step(piece: Slice, starts: Sequence[tuple[int, float]]) -> Slice:
    index = bisect.bisect_right([start for _, start in starts], piece.host_us) - 1
    return replace(piece, step=starts[index][0]) if index >= 0 else piece


def _spans(nodes: Sequence[Node], begin: float) -> Iterator[tuple[int, float, float, int]]:
    for node in nodes:
        if node.mark and node.name.startswith(f"{MARK}m|") and node.start >= begin:
            yield node.calls[-1][0], node.start, node.end - node.start, len(node.calls) - 1
