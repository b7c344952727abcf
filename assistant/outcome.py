"""What a search amounts to: the status with its reason, and the result JSON of ``drk optimize`` (DESIGN 4.2).

``optimised`` is said only where a GPU measured it: accepted, and the lower bound of the speed-up over the fastest
baseline is above 1. ``unmeasured``: the logic was checked by the interpreter; an estimate and the command that would
measure it stand beside it, and nothing is claimed about speed. ``no-win``: nothing accepted is faster, or nothing was
proposed. ``failed``: candidates were proposed and none was accepted.

Why nothing was won, and what else to try, is :mod:`drk.assistant.explanation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from drk.assistant.answer_parser import missing_reason
from drk.assistant.episode import Episode, Turn, best_of_history, describe_gain, headline_interval, is_usable
from drk.assistant.roofline import least_bytes, least_memory_us
from drk.assistant.search import Found
from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph
from drk.gym.graph_cost import graph_cost
from drk.gym.schema import RUNGS, SCHEMA_VERSION, Task, Verdict
from drk.gym.wire import candidate_id, candidate_to_json, task_id, verdict_to_json

OutcomeStatus = Literal["optimised", "unmeasured", "no-win", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The answer of a search. ``best`` is the best accepted turn, also where it is no win; null where none is."""

    status: OutcomeStatus
    reason: str
    best: Turn | None
    episode: Episode
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """0 for ``optimised`` and ``unmeasured``, 1 for ``no-win`` and ``failed``, 130 where it was interrupted."""
        if self.interrupted:
            return 130
        return 0 if self.status in ("optimised", "unmeasured") else 1


def decide(found: Found) -> Outcome:
    """Return what ``found`` amounts to."""
    best = best_of_history(found.episode)
    if best is not None:
        status, reason = _judge_best(best)
    elif unwritten := _unwritten(found.episode):
        status, reason = "no-win", f"no candidate: {unwritten}"
    elif found.episode.turns:
        status, reason = "failed", f"none of {_count(found.episode)} was accepted; {_nearest(found.episode)}"
    elif found.interrupted or "budget" in found.ended:
        status, reason = "failed", f"nothing was judged: {found.ended}"
    else:
        status, reason = "no-win", "nothing was proposed: no part of the module was found that a kernel would speed up"
    return Outcome(status, reason, best, found.episode, found.interrupted)


def _unwritten(episode: Episode) -> str:
    """Say why the builtin proposer wrote nothing at all, or return an empty string."""
    told = [missing_reason(turn.candidate) for turn in episode.turns if turn.candidate.proposer == "builtin"]
    return (told[0] or "") if told and all(told) and len(told) == len(episode.turns) else ""


def _judge_best(best: Turn) -> tuple[OutcomeStatus, str]:
    verdict = best.verdict
    if verdict.evidence != "gpu":
        return "unmeasured", "logic checked by the interpreter; speed not measured: no GPU"
    interval = headline_interval(verdict)
    if interval is None:
        return "no-win", "accepted, but its speed could not be measured"
    if interval.low > 1.0:
        return "optimised", describe_gain(verdict)
    kind = "slower than the baseline" if interval.high < 1.0 else "no significant difference"
    return "no-win", f"{kind}: the best accepted candidate is {describe_gain(verdict)}"


def is_win(verdict: Verdict) -> bool:
    """Say whether a candidate is an answer: accepted and, where a GPU measured it, faster than every baseline."""
    interval = headline_interval(verdict)
    faster = interval is not None and interval.low > 1.0
    return is_usable(verdict) and (faster or verdict.evidence != "gpu")


def _count(episode: Episode) -> str:
    count = len(episode.turns)
    return "1 candidate" if count == 1 else f"{count} candidates"


def _nearest(episode: Episode) -> str:
    """Say how far the best of the refused candidates came, and what stopped it."""
    far = max(episode.turns, key=lambda turn: RUNGS.index(turn.verdict.reached) if turn.verdict.reached else -1)
    verdict = far.verdict
    stopped = ""
    if verdict.error is not None:
        stopped = f"{verdict.error.kind}: {verdict.error.message.strip().splitlines()[0][:200]}"
    elif failed := [cell for cell in verdict.cells if not cell.passed]:
        stopped = f"cell {failed[0].name}: {failed[0].reason}"
    elif frauds := [flag.kind for flag in verdict.flags if flag.severity == "fraud"]:
        stopped = f"dishonest: {', '.join(frauds)}"
    where = f"the nearest reached {verdict.reached or 'nothing'}"
    return f"{where} ({stopped})" if stopped else where


@dataclass(frozen=True)
class Estimate:
    """What can be said about a candidate's gain without measuring; bytes and FLOPs of one call at the captured shapes.

    ``eager_bytes``: each operator reads its operands and writes its results (graph cost model). ``least_bytes``:
    inputs, weights and outputs once, which no fusion can go below; ``least_memory_us`` is their time on ``device``.
    """

    coverage_estimate: float | None
    eager_bytes: int | None = None
    least_bytes: int | None = None
    flops: int | None = None
    device: str = ""
    least_memory_us: float | None = None


def estimate(best: Turn | None, graph: Graph | None, hardware: DeviceFacts) -> Estimate | None:
    """Return the estimate for an accepted turn that was not measured, else null."""
    if best is None or best.verdict.evidence == "gpu":
        return None
    coverage = best.verdict.coverage_estimate
    if graph is None:
        return Estimate(coverage)
    cost, least = graph_cost(graph), least_bytes(graph)
    return Estimate(
        coverage, cost.size_bytes, least, cost.flops, hardware.name, round(least_memory_us(graph, hardware), 3)
    )


def result_json(
    outcome: Outcome,
    task: Task,
    *,
    run_dir: str,
    artefact: dict[str, str] | None = None,
    artefact_reason: str = "",
    estimated: Estimate | None = None,
    measure_command: str = "",
) -> dict[str, Any]:
    """Return the public result of ``drk optimize``; ``best`` and ``artefact`` are null where there is none."""
    best = outcome.best
    return {
        "schema_version": SCHEMA_VERSION,
        "status": outcome.status,
        "reason": outcome.reason,
        "task": {"name": task.name, "id": task_id(task), "entry": task.entry, "target": task.target},
        "best": None
        if best is None
        else {"candidate": candidate_to_json(best.candidate), "verdict": verdict_to_json(best.verdict)},
        "turns": [_turn_json(turn) for turn in outcome.episode.turns],
        "artefact": artefact,
        "artefact_reason": artefact_reason or None,
        "estimate": None if estimated is None else dict(estimated.__dict__),
        "measure_command": measure_command or None,
        "interrupted": outcome.interrupted,
        "run_dir": run_dir,
    }


def _turn_json(turn: Turn) -> dict[str, Any]:
    verdict = turn.verdict
    interval = headline_interval(verdict)
    return {
        "index": turn.index,
        "sample": turn.sample,
        "candidate_id": candidate_id(turn.candidate),
        "proposer": turn.candidate.proposer,
        "note": turn.candidate.note,
        "status": verdict.status,
        "reached": verdict.reached,
        "accepted": is_usable(verdict),
        "evidence": verdict.evidence,
        "speedup": None if interval is None else dict(interval.__dict__),
        "coverage_estimate": verdict.coverage_estimate,
        "error": None if verdict.error is None else f"{verdict.error.kind}: {verdict.error.message}",
        "seconds": round(turn.seconds, 3),
    }
