"""The events of a run: one JSON object a line, the same in ``events.jsonl`` and on ``--events jsonl``.

Terminal, CI and language server read one schema. Every event has ``schema_version``, ``event``, ``time_utc``; the kinds
and their further keys are listed in :data:`EVENTS`. Unknown kinds and keys must be skipped by readers.

A line is appended by one write and fsync'd, so a killed run leaves at most one torn last line; readers drop it, and
:class:`EventLog` cuts it off before it appends.

Left out: rotation (a run's log is small) and writers on several machines (the run folder's lock is local).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

Event = dict[str, Any]
EventSink = Callable[[Event], None]

EVENTS: Mapping[str, str] = {
    "started": "run_dir, task {name, id, target}, turns, samples, max_time_s, proposer, endpoint, resumed",
    "baseline": "device, inputs [{path, shape, dtype}], reduced (for the interpreter): the reference was run once",
    "captured": "nodes: operations in the graph, or null with reason",
    "hotspots": "gpu, rows [{name, launches, time_us, share, place}], kernels, launches, time_us, reason: the "
    "reference's measured kernels, as a model is told of them; no rows: nothing measured, for reason or want of a GPU",
    "proposed": "turn, candidates [{number, id, proposer, note, parent}]: written before any of them is judged",
    "judging": "turn, number, id, eta_s",
    "judged": "turn, sample, number, id, source (gym, run, cache), status, reached, seconds, gain, best (bool)",
    "note": "text: something a person should know",
    "artefact": "module, test, diff, or reason",
    "finished": "status, reason, interrupted",
}
"""Kinds of events and the keys they add."""


def make_event(kind: str, **data: Any) -> Event:
    """Return an event of ``kind`` stamped with the present time (UTC, ISO 8601)."""
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"schema_version": SCHEMA_VERSION, "event": kind, "time_utc": stamp, **data}


class EventLog:
    """Appends events to a file. The first append removes a torn last line that a killed process left.

    Only the process that holds the run's lock may append.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = False

    def append(self, event: Event) -> None:
        """Write one event as one line and force it to disk.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._whole:
            _cut_torn_line(self._path)
            self._whole = True
        line = json.dumps(event, default=str) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            data = line.encode()
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_events(path: Path) -> list[Event]:
    """Return the whole events of ``path`` in order; a torn last line and lines that are no objects are left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, _, _ = data.rpartition(b"\n")
    events = []
    for line in whole.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _cut_torn_line(path: Path) -> None:
    try:
        with path.open("r+b") as stream:
            data = stream.read()
            end = data.rfind(b"\n") + 1
            if end != len(data):
                stream.truncate(end)
    except FileNotFoundError:
        return
