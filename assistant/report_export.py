"""Exports of a Report for other tools: a Chrome trace, which Perfetto and ``chrome://tracing`` open.

One process with a lane for modules, and one for kernels (or CPU operators); counters are left out. It shows the step
that the report's timeline holds, merged as it is there; the longest 200 spans, since deep traces are the profiler's
own business. A pure function of the report.
"""

from __future__ import annotations

from typing import Any

from drk.assistant.report import Lane, Report

_LANES: dict[Lane, str] = {"module": "modules", "cpu": "CPU operators", "device": "device kernels"}


def to_perfetto(report: Report) -> dict[str, Any]:
    """Return the trace as JSON-able values (Trace Event Format, complete events, microseconds)."""
    lanes = {lane: number for number, lane in enumerate(_LANES, start=1)}
    events: list[dict[str, Any]] = [_meta("process_name", 0, f"drk profile {report.id}")]
    events += [_meta("thread_name", lanes[lane], title) for lane, title in _LANES.items()]
    for span in report.timeline:
        args = {"module": span.module} if span.module is not None else {}
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": lanes[span.lane],
                "cat": span.lane,
                "name": span.name,
                "ts": span.start_us,
                "dur": span.duration_us,
                "args": args,
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"report": report.id, "verdict": report.verdict, "times_are": report.method.times_are},
    }


def _meta(kind: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "ts": 0, "args": {"name": name}}
