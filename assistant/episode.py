"""Turns, episodes, best of history, the STTS policies, and the digest that is fed back (DESIGN 5 and 9).

Pure functions over frozen values: the loop, the trainer's rollouts and ``drk eval`` use the same code. A *turn* is one
candidate and its verdict; several samples of one step share ``index`` and differ in ``sample``.

The policies choose which earlier turns a proposer sees: all of them, the ``w`` best (the paper's text), or the best
window of ``w`` consecutive turns (the paper's released code, whose ties go to the first window).

Left out: token counting (budgets are in characters, since tokenisers differ) and rewards: whoever trains brings scores
of its own; :func:`turn_score` is only the order in which a search prefers turns. A digest never shows a reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drk.gym.schema import RUNGS, Candidate, Cell, Flag, Interval, KernelRow, Verdict

SPEEDUP_CAP = 10.0
"""Speed-ups above this count alike in :func:`turn_score`, so that one outlier does not decide a window."""


@dataclass(frozen=True)
class Turn:
    """One propose-judge-feedback step. ``index`` counts steps from 1, ``sample`` the candidates of one step from 0."""

    index: int
    candidate: Candidate
    verdict: Verdict
    seconds: float = 0.0
    sample: int = 0


@dataclass(frozen=True)
class Episode:
    """The turns on one task, in the order in which they were judged."""

    task_id: str
    turns: tuple[Turn, ...] = ()

    def extended(self, turn: Turn) -> Episode:
        """Return the episode with ``turn`` at its end."""
        return Episode(self.task_id, (*self.turns, turn))


Scorer = Callable[[Turn], float]
Policy = Callable[[Sequence[Turn]], tuple[Turn, ...]]


def headline_interval(verdict: Verdict) -> Interval | None:
    """Return the speed-up over the fastest baseline, or null where nothing was measured."""
    if verdict.speedups is None:
        return None
    if verdict.headline:
        chosen: Interval | None = getattr(verdict.speedups, verdict.headline, None)
        if chosen is not None:
            return chosen
    return verdict.speedups.eager


def is_usable(verdict: Verdict) -> bool:
    """Say whether the verdict proves a candidate right: accepted, and it really ran (not only compiled)."""
    return verdict.accepted and verdict.correct and verdict.evidence != "compile-only"


def best_of_history(episode: Episode) -> Turn | None:
    """Return the best accepted turn, or null.

    Turns measured on a GPU come first, by the lower bound of their headline speed-up; the others by
    ``coverage_estimate``. Among equals the earliest wins, so that an answer does not depend on how a run was cut.
    """
    best: Turn | None = None
    for turn in episode.turns:
        if is_usable(turn.verdict) and (best is None or _rank(turn.verdict) > _rank(best.verdict)):
            best = turn
    return best


def _rank(verdict: Verdict) -> tuple[int, float]:
    interval = headline_interval(verdict)
    if verdict.evidence == "gpu" and interval is not None:
        return (1, interval.low)
    return (0, -1.0 if verdict.coverage_estimate is None else verdict.coverage_estimate)


def turn_score(turn: Turn) -> float:
    """Return a number that orders turns: rung reached (below 1), then correctness, then speed or coverage."""
    verdict = turn.verdict
    if not is_usable(verdict):
        return 0.0 if verdict.reached is None else 0.1 * (RUNGS.index(verdict.reached) + 1)
    interval = headline_interval(verdict)
    if verdict.evidence == "gpu" and interval is not None:
        return 1.0 + min(max(interval.low, 0.0), SPEEDUP_CAP)
    return 1.0 + (verdict.coverage_estimate or 0.0)


# --- STTS policies -------------------------------------------------------------------------------------------


def append_all(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return every turn ("vanilla extrapolation")."""
    return tuple(turns)


def top_w(turns: Sequence[Turn], w: int = 4, *, score: Scorer = turn_score) -> tuple[Turn, ...]:
    """Return the ``w`` best turns in the order they happened; among equals the earlier stays."""
    return tuple(turns[i] for i in top_w_indices([score(turn) for turn in turns], w))


def best_window(turns: Sequence[Turn], w: int = 4, *, score: Scorer = turn_score) -> tuple[Turn, ...]:
    """Return the ``w`` consecutive turns with the largest sum of scores; the first such window wins."""
    return tuple(turns[i] for i in best_window_indices([score(turn) for turn in turns], w))


def top_w_indices(scores: Sequence[float], w: int = 4) -> list[int]:
    """Return the positions of the ``w`` largest scores, in rising order.

    Raises:
        ValueError: ``w`` is below 1.
    """
    _check_width(w)
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:w])


def best_window_indices(scores: Sequence[float], w: int = 4) -> list[int]:
    """Return the positions of the best window of ``w``; all positions when there are not more than ``w``.

    Raises:
        ValueError: ``w`` is below 1.
    """
    _check_width(w)
    if len(scores) <= w:
        return list(range(len(scores)))
    # fsum: a running sum would let rounding break ties that the definition gives to the first window
    start = max(range(len(scores) - w + 1), key=lambda i: (math.fsum(scores[i : i + w]), -i))
    return list(range(start, start + w))


def _check_width(w: int) -> None:
    if w < 1:
        raise ValueError(f"w must be at least 1, not {w}")


POLICIES: dict[str, Policy] = {"append-all": append_all, "top-w": top_w, "best-window": best_window}
"""The policies by the names that settings use (``w`` = 4)."""


# --- Digest --------------------------------------------------------------------------------------------------


def digest(
    verdict: Verdict,
    budget_chars: int = 2000,
    *,
    candidate: Candidate | None = None,
    best: Turn | None = None,
    previous: Verdict | None = None,
) -> str:
    """Return what a proposer is told about ``verdict``, most telling lines first, in at most ``budget_chars``.

    Args:
        verdict: the judged candidate's verdict.
        budget_chars: hard limit of the text's length.
        candidate: its source, for the text of the failing line.
        best: the best turn so far.
        previous: the verdict of the turn before, for the difference.
    """
    lines = [_verdict_line(verdict), *_error_lines(verdict, candidate), *_cell_lines(verdict)]
    lines += [f"dishonest: {flag.kind} ({flag.family}), proven by {flag.proof}" for flag in _frauds(verdict)]
    lines += _speed_lines(verdict)
    lines += _change_lines(verdict, previous)
    if best is not None:
        lines.append(f"best so far: turn {best.index}, {describe_gain(best.verdict)}")
    lines += [_kernel_line(row) for row in _top_kernels(verdict)]
    return _fit(lines, budget_chars)


def describe_gain(verdict: Verdict) -> str:
    """Return the speed-up with its interval, or what is known instead, in one phrase."""
    interval = headline_interval(verdict)
    if interval is not None:
        over = verdict.headline or "eager"
        return f"{interval.value:.2f}x over {over} (95 % interval {interval.low:.2f} to {interval.high:.2f})"
    if verdict.coverage_estimate is not None:
        return f"speed not measured, own kernels cover about {verdict.coverage_estimate:.0%} of the work"
    return "speed not measured"


def _verdict_line(verdict: Verdict) -> str:
    rung = verdict.reached or "nothing"
    return f"status: {verdict.status}; reached: {rung}; evidence: {verdict.evidence}"


def _error_lines(verdict: Verdict, candidate: Candidate | None) -> list[str]:
    error = verdict.error
    if error is None:
        return []
    where = f" at line {error.line}" if error.line is not None else ""
    message = error.message.strip().splitlines()[:6]
    lines = [f"error in {error.stage}{where}: {error.kind}: {message[0] if message else ''}", *message[1:]]
    source = candidate.source.splitlines() if candidate else []
    if error.line is not None and 0 < error.line <= len(source):
        lines.append(f"  {error.line} | {source[error.line - 1].strip()}")
    return lines


def _cell_lines(verdict: Verdict) -> list[str]:
    failed = [cell for cell in verdict.cells if not cell.passed]
    lines = [_cell_line(cell) for cell in failed[:3]]
    if len(failed) > 3:
        lines.append(f"and {len(failed) - 3} more failing cells of {len(verdict.cells)}")
    return lines


def _cell_line(cell: Cell) -> str:
    figures = [
        f"{name} error {value:.3g} (limit {limit:.3g})"
        for name, value, limit in (("rms", cell.rms, cell.rms_limit), ("max", cell.max, cell.max_limit))
        if value is not None and limit is not None
    ]
    return f"failing cell {cell.name}: " + "; ".join([*([cell.reason] if cell.reason else []), *figures])


def _frauds(verdict: Verdict) -> list[Flag]:
    return [flag for flag in verdict.flags if flag.severity == "fraud"]


def _speed_lines(verdict: Verdict) -> list[str]:
    lines = []
    if verdict.speedups is not None:
        lines.append(f"speed: {describe_gain(verdict)}")
    if verdict.coverage is not None:
        lines.append(f"coverage: own kernels take {verdict.coverage:.0%} of the device time")
    elif verdict.coverage_estimate is not None:
        lines.append(f"coverage: own kernels do about {verdict.coverage_estimate:.0%} of the work (estimated)")
    return lines


def _change_lines(verdict: Verdict, previous: Verdict | None) -> list[str]:
    if previous is None:
        return []
    now, before = headline_interval(verdict), headline_interval(previous)
    if now is not None and before is not None:
        return [f"against the last turn: {before.value:.2f}x -> {now.value:.2f}x"]
    if verdict.reached != previous.reached:
        return [f"against the last turn: reached {previous.reached or 'nothing'} -> {verdict.reached or 'nothing'}"]
    return []


def _top_kernels(verdict: Verdict, count: int = 5) -> list[KernelRow]:
    return sorted(verdict.kernels, key=lambda row: (-(row.share or 0.0), -(row.time_us or 0.0), row.name))[:count]


def _kernel_line(row: KernelRow) -> str:
    facts = [
        "own" if row.owned else "library",
        *([f"{row.share:.0%} of the time"] if row.share is not None else []),
        *([f"{row.time_us:.1f} us"] if row.time_us is not None else []),
        *([f"{row.registers} registers"] if row.registers is not None else []),
        *([f"{row.spill_bytes} bytes spilled"] if row.spill_bytes else []),
        *([f"{row.shared_bytes} bytes shared"] if row.shared_bytes else []),
    ]
    return f"kernel {row.name}: " + ", ".join(facts)


def _fit(lines: Sequence[str], budget_chars: int) -> str:
    """Join whole lines while they fit; a first line that is too long alone is cut."""
    text = ""
    for line in lines:
        grown = f"{text}\n{line}" if text else line
        if len(grown) > budget_chars:
            break
        text = grown
    return text or lines[0][: max(budget_chars, 0)]
