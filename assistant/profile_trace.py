"""Reads a Chrome trace of torch.profiler and ties every kernel or operator to a module, a source line and a step.

Host events of a thread nest by time; marks of :mod:`drk.assistant.profile_marks` among them say module and line, and
everything inside inherits. A kernel belongs to the host event that launched it (correlation id). Backward operators
run without Python: they take module and line of the forward operator with the same sequence number; gradient
accumulation takes those of the operator before it.

The result is a list of :class:`Slice`: kernels and copies where the trace has a device, else operators with the time
that is their own. Works on plain dicts, so that traces of GPUs can be tested without one.

Limits: autograd's sequence numbers are per thread, so threads that run forward side by side can be confused; kernels of
a replayed CUDA graph belong to the replay, not to the lines that were captured.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drk.assistant.errors import UsageError
from drk.assistant.profile_marks import MARK

MAX_TRACE_BYTES = 2 * 2**30
DEVICE_KINDS = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
HOST_KINDS = frozenset(("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"))
_EVALUATE = "autograd::engine::evaluate_function: "
Phase = Literal["forward", "backward", "other"]


@dataclass(frozen=True)
class Launch:
    """Facts of one kernel launch; null where the trace has none."""

    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    stream: int = 0


@dataclass(frozen=True)
class OpCall:
    """One operator call as the profiler saw it: name, and per input shapes, strides, types and printed values."""

    name: str
    dims: tuple[Any, ...] = ()
    strides: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slice:
    """One piece of time: a kernel, or an operator's own time on the CPU.

    ``calls`` are the module calls around it, outermost first, as (module number, number of the call in the trace);
    ``line`` is a number of the line table; ``works`` are the operators whose work it does, with its fraction of each.
    ``host_us`` is when the host began it.
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

    @property
    def module(self) -> int | None:
        """The innermost module."""
        return self.calls[-1][0] if self.calls else None


@dataclass(frozen=True)
class Trace:
    """Everything that ran between the first step's begin and the end of the window, the recorder's own work left out.

    ``step_starts`` are (step number, microseconds) in order; ``end_us`` is when the last thing ended.
    """

    slices: tuple[Slice, ...]
    on_device: bool
    step_starts: tuple[tuple[int, float], ...]
    end_us: float
    spans: tuple[tuple[int, float, float, int], ...] = ()
    """Calls of modules: (module number, start, duration, depth)."""


@dataclass
class _Node:
    """One host event in the tree of its thread."""

    name: str
    kind: str
    start: float
    end: float
    args: Mapping[str, Any]
    parent: _Node | None = None
    line: int | None = None
    calls: tuple[tuple[int, int], ...] = ()
    phase: Phase = "forward"
    own: bool = False
    mark: bool = False
    inner_us: float = 0.0
    inner_ops: int = 0
    thread: Any = None
    linked: bool = field(default=False)

    @property
    def is_op(self) -> bool:
        return self.kind == "cpu_op" and not self.mark

    @property
    def self_us(self) -> float:
        return max(self.end - self.start - self.inner_us, 0.0)


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
    nodes = [node for thread, rows in host.items() for node in _nest(rows, thread)]
    starts = _step_starts(nodes, root)
    _inherit(nodes)
    kept = [node for node in nodes if not node.own]
    begin = starts[0][1] if starts else float("-inf")
    slices = _device_slices(device, kept) if device else _host_slices(kept)
    placed = [_with_step(piece, starts) for piece in slices if piece.host_us >= begin]
    placed.sort(key=lambda piece: piece.start_us)
    ends = [piece.start_us + piece.duration_us for piece in placed]
    ends += [node.end for node in kept if not node.mark]
    return Trace(tuple(placed), bool(device), tuple(starts), max(ends, default=0.0), tuple(_spans(kept, begin)))


# --- the tree of one thread ------------------------------------------------------------------------------------


def _nest(rows: Sequence[Mapping[str, Any]], thread: Any) -> Iterator[_Node]:
    """Yield the events of one thread, outer before inner, each with its parent."""
    stack: list[_Node] = []
    for row in sorted(rows, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        start = float(row["ts"])
        node = _Node(
            str(row["name"]), str(row["cat"]), start, start + float(row.get("dur", 0.0)), row.get("args") or {}
        )
        while stack and stack[-1].end <= start:
            stack.pop()
        node.thread = thread
        node.mark = node.name.startswith(MARK)
        node.parent = stack[-1] if stack else None
        if node.parent is not None and (node.is_op or node.mark):
            node.parent.inner_us += node.end - node.start
        if node.is_op:
            above = node.parent
            if above is not None and above.is_op:
                above.inner_ops += 1
        stack.append(node)
        yield node


def _step_starts(nodes: Sequence[_Node], root: int | None) -> list[tuple[int, float]]:
    found = []
    for node in nodes:
        if node.name.startswith(f"{MARK}s|"):
            _, _, number, step = node.name.split("|")
            if root is None or int(number) == root:
                found.append((int(step), node.start))
    return sorted(found, key=lambda item: item[1])


def _inherit(nodes: Sequence[_Node]) -> None:
    """Hand module and line down the trees; forward first, since backward refers to it."""
    forward: dict[int, list[_Node]] = {}
    for number, node in enumerate(nodes):
        above = node.parent
        if above is not None:
            node.line, node.calls, node.own, node.phase = above.line, above.calls, above.own, above.phase
        if node.mark:
            _apply_mark(node, number)
        elif node.kind == "user_annotation" and node.name.startswith("Optimizer."):
            node.phase = "other"
        elif node.name.startswith(_EVALUATE):
            node.phase = "backward"
        sequence = node.args.get("Sequence number")
        if node.is_op and node.phase != "backward" and isinstance(sequence, int) and sequence >= 0:
            forward.setdefault(sequence, []).append(node)
    _link_backward(nodes, forward)


def _apply_mark(node: _Node, number: int) -> None:
    parts = node.name.split("|")
    if parts[1] == "m":
        node.calls = (*node.calls, (int(parts[2]), number))
    elif parts[1] == "l":
        node.line = int(parts[2])
    elif parts[1] == "own":
        node.own = True


def _link_backward(nodes: Sequence[_Node], forward: Mapping[int, Sequence[_Node]]) -> None:
    last: dict[Any, _Node] = {}
    for node in nodes:
        above = node.parent
        if above is not None and above.linked and not node.mark:
            node.line, node.calls, node.linked = above.line, above.calls, True
        if not node.name.startswith(_EVALUATE):
            continue
        sequence = node.args.get("Sequence number")
        before = [one for one in forward.get(sequence, ()) if one.start < node.start] if sequence is not None else []
        source = max(before, key=lambda one: one.start) if before else None
        if source is None and "AccumulateGrad" in node.name:
            source = last.get(node.thread)
        if source is not None:
            node.line, node.calls, node.linked = source.line, source.calls, True
            last[node.thread] = node


# --- slices ----------------------------------------------------------------------------------------------------


def plain_name(name: str) -> str:
    """Return an operator's name without autograd's wrapping."""
    return name.removeprefix(_EVALUATE).removeprefix("torch::autograd::")


def _call(node: _Node) -> OpCall:
    args = node.args
    return OpCall(
        node.name,
        tuple(args.get("Input Dims") or ()),
        tuple(args.get("Input Strides") or ()),
        tuple(str(kind) for kind in args.get("Input type") or ()),
        tuple(str(value) for value in args.get("Concrete Inputs") or ()),
    )


def _unit(node: _Node) -> _Node:
    """Return the outermost operator around ``node`` below the next mark or annotation."""
    while node.parent is not None and node.parent.is_op:
        node = node.parent
    return node


def _host_slices(nodes: Sequence[_Node]) -> list[Slice]:
    """One slice for each outermost operator, with its own time and that of operators inside it."""
    times: dict[int, float] = {}
    units: dict[int, _Node] = {}
    works: dict[int, list[tuple[OpCall, float]]] = {}
    for node in nodes:
        if not node.is_op:
            continue
        unit = _unit(node)
        key = id(unit)
        units[key] = unit
        times[key] = times.get(key, 0.0) + node.self_us
        if node.inner_ops == 0:
            works.setdefault(key, []).append((_work_of(node), 1.0))
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
        )
        for key, unit in units.items()
    ]


def _work_of(node: _Node) -> OpCall:
    """Return the call that tells most about a leaf's work: for convolutions the general form further up."""
    if "convolution" in node.name and "backward" not in node.name:
        above: _Node | None = node
        while above is not None and above.is_op:
            if above.name == "aten::convolution":
                return _call(above)
            above = above.parent
    return _call(node)


def _device_slices(events: Sequence[Mapping[str, Any]], nodes: Sequence[_Node]) -> list[Slice]:
    """One slice for each kernel, copy and fill, at the host event that launched it."""
    launches: dict[Any, _Node] = {}
    for node in nodes:
        correlation = node.args.get("correlation")
        if node.kind in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launches[correlation] = node
    rows = []
    for event in events:
        launcher = launches.get((event.get("args") or {}).get("correlation"))
        op = launcher
        while op is not None and not op.is_op:
            op = None if op.mark else op.parent
        rows.append((event, launcher, op))
    totals: dict[int, float] = {}
    for event, _, op in rows:
        if op is not None:
            totals[id(op)] = totals.get(id(op), 0.0) + float(event.get("dur", 0.0))
    return [_device_slice(event, launcher, op, totals) for event, launcher, op in rows if launcher or _is_known(event)]


def _is_known(event: Mapping[str, Any]) -> bool:
    return float(event.get("dur", 0.0)) > 0


def _device_slice(
    event: Mapping[str, Any], launcher: _Node | None, op: _Node | None, totals: Mapping[int, float]
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
        ((_work_of(op), duration / total if total else 1.0),) if op is not None else (),
        Launch(
            _numbers(args.get("grid")),
            _numbers(args.get("block")),
            _number(args.get("registers per thread")),
            _number(args.get("shared memory")),
            _number(args.get("stream")) or 0,
        ),
    )


def _numbers(value: Any) -> tuple[int, ...] | None:
    return tuple(int(item) for item in value) if isinstance(value, list) else None


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) else None


def _with_step(piece: Slice, starts: Sequence[tuple[int, float]]) -> Slice:
    from dataclasses import replace

    index = bisect.bisect_right([start for _, start in starts], piece.host_us) - 1
    return replace(piece, step=starts[index][0]) if index >= 0 else piece


def _spans(nodes: Sequence[_Node], begin: float) -> Iterator[tuple[int, float, float, int]]:
    for node in nodes:
        if node.mark and node.name.startswith(f"{MARK}m|") and node.start >= begin:
            yield node.calls[-1][0], node.start, node.end - node.start, len(node.calls) - 1
