"""Steps of a profile: which of them count, how long they took, how the device spent them, and one of them drawn.

Left out: more than one device; kernels of several streams are merged into one lane, their overlap counted once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drk.assistant.profile_recording import Recording
from drk.assistant.profile_trace import Slice, Trace
from drk.assistant.profile_work import quantile
from drk.assistant.report import IdleSplit, Lane, TimelineSpan

MAX_SPANS = 200
LAUNCH_GAP_US = 50.0
"""A shorter gap that the host caused is launch overhead; a longer one is waiting for data or Python."""
ENOUGH_CLEAN_STEPS = 3


@dataclass(frozen=True)
class Window:
    """The steps that count. ``wall_us`` is for all of them together; ``bounds`` are (begin, end) of each."""

    steps: tuple[int, ...]
    bounds: tuple[tuple[float, float], ...]
    warmup: int
    wall_us: float
    wall_is_clean: bool
    step_us: tuple[float, ...]
    warnings: tuple[str, ...] = ()

    def holds(self, piece: Slice) -> bool:
        """Whether a slice belongs to a step that counts."""
        return not self.steps or (piece.step is not None and piece.step >= self.steps[0])


def window_of(trace: Trace, recording: Recording) -> Window:
    """Choose the steps that count and tell how long they took."""
    starts = list(trace.step_starts)
    if not starts:
        return Window((), (), 0, 0.0, False, (), ("no step was seen: nothing called a module as a whole",))
    warmup = 2 if len(starts) >= 5 else 1 if len(starts) >= 2 else 0
    kept = starts[warmup:]
    ends = [start for _, start in kept[1:]] + [max(trace.end_us, kept[-1][1])]
    bounds = tuple((start, end) for (_, start), end in zip(kept, ends, strict=True))
    steps = tuple(number for number, _ in kept)
    clean = _clean_steps(recording, steps[-1])
    wall = sum(end - start for start, end in bounds)
    is_clean = len(clean) >= ENOUGH_CLEAN_STEPS
    if is_clean:
        wall = quantile(clean, 0.5) * len(steps)
    warnings = () if warmup else ("only one step was seen: its times include warming up",)
    step_us = tuple(clean[:200]) if is_clean else tuple(end - start for start, end in bounds)
    return Window(steps, bounds, warmup, wall, is_clean, step_us, warnings)


def _clean_steps(recording: Recording, last: int) -> list[float]:
    """Durations of the steps after the window; the one that closed it, and the last, whose end is unknown, left out.

    On a GPU by the device's clock: the host may run ahead, and then its clock sees how long launching took.
    """
    measured = recording.device_steps_us.get(str(recording.step_root), [])
    if len(measured) >= ENOUGH_CLEAN_STEPS:
        return measured
    times = recording.step_starts_us()[last + 2 :]
    return [after - before for before, after in itertools.pairwise(times)]


def idle_split(slices: Sequence[Slice], window: Window) -> IdleSplit:
    """Split the device's time, from its first kernel of the window to its last, into busy, launch gaps and idle.

    The host may run ahead of the device, so the steps' bounds, which are the host's, are not those of the kernels.
    Where steps ran without the profiler the wall time is theirs, and the gaps are shortened to fit.
    """
    order = sorted(slices, key=lambda piece: piece.start_us)
    if not order or not window.steps:
        return IdleSplit(0.0, 0.0, 0.0, 0.0)
    busy = launch = idle = 0.0
    begin = at = order[0].start_us
    for piece in order:
        gap = piece.start_us - at
        if 0 < gap < LAUNCH_GAP_US:
            launch += gap
        elif gap > 0:
            idle += gap
        stop = piece.start_us + piece.duration_us
        busy += max(stop - max(piece.start_us, at), 0.0)
        at = max(at, stop)
    profiled, gaps = at - begin, launch + idle
    if not window.wall_is_clean or not gaps:
        return IdleSplit(profiled, busy, launch, idle, profiled)
    waiting = max(window.wall_us - busy, 0.0)
    return IdleSplit(busy + waiting, busy, waiting * launch / gaps, waiting * idle / gaps, profiled)


def timeline(trace: Trace, window: Window, names: Mapping[int, str]) -> tuple[TimelineSpan, ...]:
    """Return the bars of the step of median length, the longest ones where there are too many."""
    if not window.bounds:
        return ()
    order = sorted(window.bounds, key=lambda bound: bound[1] - bound[0])
    begin, end = order[len(order) // 2]
    lane: Lane = "device" if trace.on_device else "cpu"
    spans = [
        TimelineSpan(lane, piece.name, piece.start_us - begin, piece.duration_us, 0, _name(piece.module, names))
        for piece in trace.slices
        if begin <= piece.host_us < end
    ]
    modules = [
        TimelineSpan("module", names.get(number, "?"), start - begin, duration, depth)
        for number, start, duration, depth in trace.spans
        if begin <= start < end
    ]
    return tuple(_longest([*modules, *spans]))


def _name(number: int | None, names: Mapping[int, str]) -> str | None:
    return names.get(number) if number is not None else None


def _longest(spans: Sequence[TimelineSpan]) -> Iterator[TimelineSpan]:
    kept = sorted(spans, key=lambda span: -span.duration_us)[:MAX_SPANS]
    yield from sorted(kept, key=lambda span: (span.lane, span.start_us, span.depth))
