"""A verdict's evidence as rows and phrases that pages and tables share: baselines, correctness cells, honesty.

Pure functions; a speed never stands without its interval, and what was not judged is called so.
"""

from __future__ import annotations

from dataclasses import dataclass

from drk.gym.schema import Cell, Interval, Latency, Verdict

NAMES = ("eager", "compile", "max_autotune", "cuda_graph")
LABELS = {"eager": "eager", "compile": "torch.compile", "max_autotune": "max-autotune", "cuda_graph": "CUDA graph"}


@dataclass(frozen=True)
class Baseline:
    """One thing that was timed; ``speedup`` is the candidate's over it, null for the candidate itself (``own``)."""

    label: str
    latency: Latency | None
    speedup: Interval | None = None
    own: bool = False


def baselines(verdict: Verdict) -> list[Baseline]:
    """Return what was timed, baselines first, the candidate last; nothing where nothing was measured."""
    rows = []
    for name in NAMES:
        speedup = getattr(verdict.speedups, name, None) if verdict.speedups is not None else None
        known = verdict.baselines_ms.get(name)
        if speedup is not None or known is not None:
            rows.append(Baseline(LABELS[name], known, speedup))
    if verdict.latency_ms is not None:
        rows.append(Baseline("this kernel", verdict.latency_ms, own=True))
    return rows


def worst_cells(verdict: Verdict, limit: int = 40) -> list[Cell]:
    """Return the correctness cells, those that failed first, then by how near they came to what is allowed."""
    return sorted(verdict.cells, key=lambda cell: (cell.passed, -(used(cell) or 0.0)))[:limit]


def used(cell: Cell) -> float | None:
    """Return the share (0..1 where it passed) of the allowed error that a cell used, or null where it is not known."""
    pairs = ((cell.rms, cell.rms_limit), (cell.max, cell.max_limit))
    shares = [value / limit for value, limit in pairs if value is not None and limit]
    return max(shares, default=None)


def cells_text(verdict: Verdict) -> str:
    """Return how many cells passed, and how near the nearest came to its limit."""
    if not verdict.cells:
        return "no cell was judged"
    passed = sum(cell.passed for cell in verdict.cells)
    known = [share for cell in verdict.cells if (share := used(cell)) is not None]
    near = f"; at most {100 * max(known):.0f} % of the allowed error" if known else ""
    return f"{passed} of {len(verdict.cells)} cells passed against float64{near}"


def honesty_text(verdict: Verdict) -> str:
    """Return what the honesty checks say."""
    frauds = sorted({flag.kind for flag in verdict.flags if flag.severity == "fraud"})
    labels = sorted({flag.kind for flag in verdict.flags if flag.severity == "label"})
    if frauds:
        told = f"dishonest: {', '.join(frauds)}"
    elif verdict.honest:
        told = "checks passed"
    else:
        told = "not judged" if verdict.honest is None else "dishonest"
    return f"{told}; labels: {', '.join(labels)}" if labels else told
