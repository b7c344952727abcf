"""A verdict in the making, and the way an evaluation ends early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from drk.gym.schema import (
    RUNGS,
    Cell,
    Evidence,
    Failure,
    Flag,
    KernelRow,
    Latency,
    Rung,
    Speedups,
    Status,
    WeightsHow,
)

COMPILE_KINDS = {"compile-error", "out-of-resources"}
UNJUDGED_KINDS = {"program-budget", "interpreter-unsupported"}


class Stop(Exception):
    """Ends an evaluation early with a failure."""

    def __init__(self, status: Status, failure: Failure) -> None:
        super().__init__(failure.message)
        self.status = status
        self.failure = failure


@dataclass
class Draft:
    """A verdict in the making."""

    evidence: Evidence
    reached: Rung | None = None
    flags: list[Flag] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: WeightsHow | None = None
    speedups: Speedups | None = None
    headline: str | None = None
    latency_ms: Latency | None = None
    baselines_ms: dict[str, Latency] = field(default_factory=dict)
    coverage: float | None = None
    coverage_estimate: float | None = None
    timings_s: dict[str, float] = field(default_factory=dict)

    def reach(self, rung: Rung) -> None:
        """Note a rung; rungs are only ever climbed."""
        if self.reached is None or RUNGS.index(rung) > RUNGS.index(self.reached):
            self.reached = rung

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``timings_s``."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.timings_s[name] = round(self.timings_s.get(name, 0.0) + time.monotonic() - start, 4)
