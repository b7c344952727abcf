"""Comparing two pages: the whole, modules, kernels or runs of the same name, with intervals where there are samples.

Ratios are A's time over B's: above 1, B is faster. Profiles are matched by module name and by kernel (name and module),
all times are of one step. Their samples (each step's time) are independent, not paired, so the interval is a 95 %
bootstrap that resamples both sides; fewer than :data:`LEAST_SAMPLES` steps on either side give none. Runs are compared
by their best kernel's latency; each side brings its own interval, and the ratio's is the widest that they allow.

Limits: steps that follow each other are not quite independent, two profiles may have met different clocks, and a
kernel's name may change with a version. So kernels are shown and only the whole and modules are held to a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from drk.assistant.errors import UsageError
from drk.assistant.report import Report, Times
from drk.assistant.report_page import Page, RunReport
from drk.gym.schema import Latency

LEAST_SAMPLES = 5
"""With 5 to 30 steps on each side the interval held the true ratio in 96 to 98 % of simulations, with 3 in 90 %."""
LEAST_SHARE = 0.05
"""Modules with less of the time, on both sides, are shown and not held to a limit."""
RESAMPLES = 1000
Kind = Literal["whole", "module", "kernel", "run"]
Change = Literal["faster", "slower", "same", "unknown", "only-a", "only-b"]


@dataclass(frozen=True)
class Row:
    """One thing on both sides. Times are microseconds a step (a call, for runs); ``ratio`` is A over B with interval.

    ``change`` is ``faster`` or ``slower`` where the interval leaves out 1, ``same`` where it holds it, ``unknown``
    without an interval. ``held``: whether a limit applies to the row.
    """

    kind: Kind
    name: str
    a_us: float | None
    b_us: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    samples: tuple[int, int] = (0, 0)
    change: Change = "unknown"
    held: bool = False

    def fails(self, limit: float) -> bool:
        """Say whether B is surely slower than ``limit`` allows: its interval's upper end (else its ratio) is below."""
        known = self.high if self.high is not None else self.ratio
        return self.held and known is not None and known < limit


@dataclass(frozen=True)
class Comparison:
    """Both titles, the rows (the whole first, then by time), and what makes the comparison doubtful."""

    a: str
    b: str
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    def failing(self, limit: float) -> list[Row]:
        """Return the rows below the limit."""
        return [row for row in self.rows if row.fails(limit)]


def compare(a: Page, b: Page) -> Comparison:
    """Compare two pages.

    Raises:
        UsageError: kind ``compare``: they hold nothing of the same kind.
    """
    rows: list[Row] = []
    warnings: list[str] = []
    if a.report is not None and b.report is not None:
        warnings += _doubts(a.report, b.report)
        rows += _profile_rows(a.report, b.report)
    if a.run is not None and b.run is not None:
        found, told = _run_rows(a.run, b.run)
        rows += found
        warnings += told
    if (a.report is None or b.report is None) and (a.run is None or b.run is None):
        raise UsageError(
            "a run cannot be compared with a profile",
            kind="compare",
            help="compare two profiles, or two runs; a run's own before and after is in `drk report RUN`",
        )
    return Comparison(_name(a), _name(b), tuple(rows), tuple(warnings))


def _name(page: Page) -> str:
    known = page.report.id if page.report is not None else ""
    return page.run.name if page.run is not None else known


def _doubts(a: Report, b: Report) -> list[str]:
    if a.method.times_are != b.method.times_are:
        raise UsageError(
            "one profile has a GPU's times and the other a CPU's",
            kind="compare",
            cause=f"A: {a.method.times_are}, B: {b.method.times_are}",
        )
    pairs = {
        "device": (_chip(a), _chip(b)),
        "torch": (a.environment.torch, b.environment.torch),
        "triton": (a.environment.triton, b.environment.triton),
        "threads": (str(a.environment.threads), str(b.environment.threads)),
        "inputs": (a.method.inputs, b.method.inputs),
        "mode": (a.method.mode or "", b.method.mode or ""),
    }
    return [f"{name} differs: {one or '-'} and {other or '-'}" for name, (one, other) in pairs.items() if one != other]


def _chip(report: Report) -> str:
    return report.environment.cpu if report.environment.device == "cpu" else report.environment.device


# --- profiles ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """One row of one profile: time of a step, its samples, its share."""

    time_us: float
    samples: tuple[float, ...]
    share: float


def _profile_rows(a: Report, b: Report) -> list[Row]:
    whole = _row("whole", "the whole step", _whole(a), _whole(b), held=True)
    modules = _matched("module", _modules(a), _modules(b))
    kernels = _matched("kernel", _kernels(a), _kernels(b))
    return [whole, *modules, *kernels]


def _whole(report: Report) -> _Side:
    total = (report.wall_us or report.total_us) / max(report.method.steps, 1)
    return _Side(total, tuple(time for time in report.step_us if time > 0) if report.wall_us else (), 1.0)


def _modules(report: Report) -> dict[str, _Side]:
    steps = report.method.steps
    return {row.name: _side([row.times], steps) for row in report.modules if row.times.total_us > 0}


def _kernels(report: Report) -> dict[str, _Side]:
    found: dict[str, list[Times]] = {}
    for row in report.kernels:
        found.setdefault(f"{row.name} in {row.module}" if row.module else row.name, []).append(row.times)
    return {name: _side(times, report.method.steps) for name, times in found.items()}


def _side(times: Sequence[Times], steps: int) -> _Side:
    """Join rows of one name (the same kernel from several lines): times add up, step by step where all have steps."""
    lists = [one.per_step_us for one in times]
    alike = len({len(one) for one in lists}) == 1
    samples = tuple(sum(column) for column in zip(*lists, strict=True)) if alike else ()
    total = sum(one.total_us for one in times) / max(steps, 1)
    return _Side(total, samples if all(value > 0 for value in samples) else (), sum(one.share for one in times))


def _matched(kind: Kind, a: Mapping[str, _Side], b: Mapping[str, _Side]) -> list[Row]:
    rows = []
    for name in dict.fromkeys([*a, *b]):
        one, other = a.get(name), b.get(name)
        share = max(side.share for side in (one, other) if side is not None)
        rows.append(_row(kind, name, one, other, held=kind == "module" and share >= LEAST_SHARE))
    return sorted(rows, key=lambda row: -max(row.a_us or 0.0, row.b_us or 0.0))


def _row(kind: Kind, name: str, a: _Side | None, b: _Side | None, *, held: bool) -> Row:
    if a is None or b is None:
        side: Change = "only-b" if a is None else "only-a"
        return Row(kind, name, None if a is None else a.time_us, None if b is None else b.time_us, change=side)
    if a.time_us <= 0 or b.time_us <= 0:
        return Row(kind, name, a.time_us, b.time_us)
    counts = (len(a.samples), len(b.samples))
    if min(counts) < LEAST_SAMPLES:
        return Row(kind, name, a.time_us, b.time_us, a.time_us / b.time_us, samples=counts, held=held)
    value, low, high = independent_ratio(a.samples, b.samples)
    return Row(kind, name, a.time_us, b.time_us, value, low, high, counts, _change(low, high), held)


def _change(low: float, high: float) -> Change:
    if low > 1.0:
        return "faster"
    return "slower" if high < 1.0 else "same"


def independent_ratio(a: Sequence[float], b: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Return the ratio of the medians of two independent samples, and its 95 % bootstrap interval (low, high).

    Raises:
        ValueError: a sample is empty.
    """
    if not a or not b:
        raise ValueError("each side needs at least one time")
    generator = np.random.default_rng(seed)
    top, bottom = (_medians(np.asarray(side, dtype=float), generator) for side in (a, b))
    low, high = np.quantile(top / bottom, [0.025, 0.975])
    return float(np.median(a) / np.median(b)), float(low), float(high)


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    draws = generator.integers(0, len(values), size=(RESAMPLES, len(values)))
    medians: np.ndarray = np.median(values[draws], axis=1)
    return medians


# --- runs ----------------------------------------------------------------------------------------------------


def _run_rows(a: RunReport, b: RunReport) -> tuple[list[Row], list[str]]:
    warnings = [] if a.target == b.target else [f"target differs: {a.target} and {b.target}"]
    one, other = (run.verdict.latency_ms if run.verdict is not None else None for run in (a, b))
    if one is None or other is None:
        missing = " and ".join(name for name, known in (("A", one), ("B", other)) if known is None)
        warnings.append(f"the kernel of {missing} was not measured")
        return [Row("run", b.target, _us(one), _us(other))], warnings
    low, high = one.low / other.high, one.high / other.low
    ratio = one.median / other.median
    row = Row("run", b.target, _us(one), _us(other), ratio, low, high, (0, 0), _change(low, high), held=True)
    assert a.verdict is not None
    assert b.verdict is not None
    chips = [verdict.environment.get("gpu") for verdict in (a.verdict, b.verdict)]
    if chips[0] != chips[1]:
        warnings.append(f"device differs: {chips[0]} and {chips[1]}")
    return [row], warnings


def _us(latency: Latency | None) -> float | None:
    return None if latency is None else 1e3 * latency.median


# --- for machines --------------------------------------------------------------------------------------------


def comparison_json(found: Comparison, limit: float | None) -> dict[str, Any]:
    """Return the public form; ``status`` is ``slower`` where a row is below the limit, else ``ok``."""
    failing = found.failing(limit) if limit is not None else []
    rows = [
        {
            "kind": row.kind,
            "name": row.name,
            "a_us": row.a_us,
            "b_us": row.b_us,
            "ratio": row.ratio,
            "low": row.low,
            "high": row.high,
            "samples": list(row.samples),
            "change": row.change,
            "below_limit": row in failing,
        }
        for row in found.rows
    ]
    return {
        "schema_version": 1,
        "status": "slower" if failing else "ok",
        "a": found.a,
        "b": found.b,
        "fail_below": limit,
        "rows": rows,
        "warnings": list(found.warnings),
    }
