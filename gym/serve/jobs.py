"""A job, and its result: what travels between API, Redis and workers, as flat text fields and one JSON object.

A *kernel result* (state ``done``) is a Verdict or a report. Everything else is no statement about a kernel:
``failed`` (``error.infrastructure`` says whether the host or the task is to blame), ``cancelled``, ``expired``.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from drk.gym.serve.settings import TimingWish

JobState = Literal["waiting", "running", "done", "failed", "cancelled", "expired"]
JobKind = Literal["evaluation", "inspection", "capture", "parts", "kernels", "profile"]
TERMINAL = ("done", "failed", "cancelled", "expired")


@dataclass(frozen=True)
class Job:
    """One thing to do. ``queue`` names a GPU class; deadlines are a time (queue) and a duration (run), in seconds."""

    id: str
    kind: JobKind
    task_id: str
    candidate: str
    """The candidate's JSON text; empty for kinds without one."""
    queue: str
    priority: int
    queue_deadline: float
    run_s: float
    batch: str = ""
    index: int = 0
    timing: TimingWish = True
    cache: str = ""
    """Key under which a good result is kept, or an empty string."""

    def fields(self) -> dict[str, str]:
        """Return the hash's fields."""
        return {
            "id": self.id,
            "kind": self.kind,
            "task_id": self.task_id,
            "candidate": self.candidate,
            "queue": self.queue,
            "priority": str(self.priority),
            "queue_deadline": repr(self.queue_deadline),
            "run_s": repr(self.run_s),
            "batch": self.batch,
            "index": str(self.index),
            "timing": self.timing if isinstance(self.timing, str) else str(int(self.timing)),
            "cache": self.cache,
        }


@dataclass(frozen=True)
class Fault:
    """Why there is no kernel result. ``infrastructure``: ours or the host's; a retry may help."""

    code: str
    message: str
    infrastructure: bool
    help: str = ""
    file: str = ""
    line: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the public form."""
        return {
            "code": self.code,
            "message": self.message,
            "help": self.help or None,
            "infrastructure": self.infrastructure,
            "file": self.file or None,
            "line": self.line,
        }


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``verdict`` or ``report`` is there exactly when the state is ``done``."""

    state: JobState
    verdict: dict[str, Any] | None = None
    report: dict[str, Any] | None = None
    fault: Fault | None = None
    run_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self, fields: Mapping[str, str], worker: str, now: float) -> dict[str, Any]:
        """Return the public result of the job whose hash is ``fields``."""
        started = float(fields.get("started_at") or now)
        submitted = float(fields.get("submitted_at") or now)
        return {
            "job_id": fields.get("id", ""),
            "kind": fields.get("kind", "evaluation"),
            "state": self.state,
            "verdict": self.verdict,
            "report": self.report,
            "error": self.fault.to_json() if self.fault else None,
            "cached": False,
            "worker": worker or None,
            "attempts": int(fields.get("attempts") or 0),
            "queue_s": round(max(started - submitted, 0.0), 4),
            "run_s": round(self.run_s, 4),
            "submitted_at": submitted,
            "finished_at": now,
        }


def poison(deaths: int) -> Outcome:
    """The outcome of a job whose workers died too often."""
    message = f"the worker died {deaths} times while it ran this job"
    return Outcome("failed", fault=Fault("killed-worker", message, infrastructure=True))


def expired() -> Outcome:
    """The outcome of a job that waited beyond its deadline."""
    return Outcome("expired", fault=Fault("queue-deadline", "no worker was free before the deadline", True))


def cancelled() -> Outcome:
    """The outcome of a job that its owner took back."""
    return Outcome("cancelled", fault=Fault("cancelled", "cancelled on request", infrastructure=False))


def result_text(result: Mapping[str, Any]) -> str:
    """Return a result as JSON that every parser takes: an error beyond all bounds (infinite, NaN) is null there."""
    try:
        return json.dumps(result, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(result), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_id(owner: str, nonce: str, *parts: str) -> str:
    """Return a job's or batch's id: the same request with the same nonce is the same job."""
    text = json.dumps([owner, nonce, *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def clock() -> float:
    """Seconds since 1970, which all machines are taken to agree on to a second or so."""
    return time.time()
