"""What ``drk optimize`` prints: one line a turn while it runs, and the final summary. Pure functions, no output here.

A speed is only ever printed with its interval and its baseline; without a GPU the words are "not measured". Estimates
are called estimates and stand beside the command that would replace them by a measurement.

Left out: the HTML report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drk.assistant.budget import spending_line
from drk.assistant.episode import Turn, describe_gain
from drk.assistant.events import Event
from drk.assistant.explanation import explanation_lines
from drk.assistant.hotspots import counted
from drk.assistant.outcome import Outcome
from drk.gym.schema import Cell, Verdict

TITLES: Mapping[str, str] = {
    "optimised": "optimised: verified correct, honest and faster",
    "unmeasured": "unmeasured: logic verified, speed not measured (no GPU)",
    "no-win": "no win: nothing accepted is faster",
    "failed": "failed: no candidate was accepted",
}


def event_line(event: Event) -> str:
    """Return the line that stays for an event, or an empty string where nothing needs saying."""
    kind = event["event"]
    if kind == "started":
        word = "resuming" if event["resumed"] else "run"
        return f"{word} {Path(event['run_dir']).name}: {event['task']['target']}"
    if kind == "baseline":
        facts = event["device"]
        where = facts.get("gpu") or "no GPU: candidates run under Triton's interpreter"
        inputs = ", ".join(f"{row['dtype']}{list(row['shape'])}" for row in event["inputs"][:4])
        reduced = " (reduced for the interpreter)" if event.get("reduced") else ""
        return f"reference runs ({where})" + (f", inputs {inputs}{reduced}" if inputs else "")
    if kind == "captured":
        if event["nodes"] is None:
            return f"graph not captured: {event['reason']}"
        return f"captured {event['nodes']} operations"
    if kind == "hotspots":
        return _hotspots_line(event)
    if kind == "judged":
        return _judged_line(event)
    return str(event["text"]) if kind == "note" else ""


def _hotspots_line(event: Event) -> str:
    if event["rows"]:
        return f"measured {counted(event['kernels'], 'kernel')} of the reference, {event['time_us']:.1f} us a call"
    reason = event["reason"]
    return f"the reference's kernels were not measured, only estimated: {reason}" if reason else ""


def _judged_line(event: Event) -> str:
    what = event["gain"] or event["error"] or f"reached {event['reached'] or 'nothing'}"
    source = "" if event["source"] == "gym" else f" ({event['source']})"
    mark = "  best so far" if event["best"] else ""
    note = f"  {event['note']}" if event["note"] else ""
    text = f"turn {event['turn']}.{event['sample'] + 1}  {event['status']}{source}  {_short(what)}{mark}"
    return f"{text}{note}  {event['seconds']:.1f} s"


def progress_text(event: Event) -> str:
    """Return what a live progress line says while a candidate is judged."""
    eta = f", at most {event['eta_s']:.0f} s to go" if event.get("eta_s") else ""
    return f"turn {event['turn']}: judging candidate {event['number']}{eta}"


def summary(outcome: Outcome, result: Mapping[str, Any], *, where: Path) -> str:
    """Return the final text; paths are shown relative to ``where`` when they lie below it."""
    lines = [f"{result['task']['target']}: {TITLES[outcome.status]}", f"  {result['reason']}"]
    if outcome.interrupted:
        lines.append("  interrupted: this is the best of what was judged so far")
    if outcome.best is not None:
        lines += _best_lines(outcome.best)
    lines += explanation_lines(result.get("explanation"))
    lines += _region_lines(result.get("regions") or [])
    lines += _estimate_lines(result.get("estimate"))
    judged = len(result["turns"])
    lines.append(f"  judged:    {judged} candidate{'' if judged == 1 else 's'}")
    if (result.get("spending") or {}).get("calls"):
        lines.append(f"  spent:     {spending_line(result['spending'])}")
    artefact = result.get("artefact")
    if artefact:
        names = [_relative(Path(path), where) for path in artefact.values()]
        lines.append("  files:     " + "\n             ".join(names))
    elif result.get("artefact_reason"):
        lines.append(f"  files:     no artefact: {result['artefact_reason']}")
    lines.append(f"  run:       {_relative(Path(result['run_dir']), where)}")
    lines += [f"  next:      {line}" for line in _next_steps(outcome, result)]
    return "\n".join(lines)


def _best_lines(best: Turn) -> list[str]:
    verdict = best.verdict
    lines = [
        f"  best:      candidate of turn {best.index}" + (f": {best.candidate.note}" if best.candidate.note else "")
    ]
    lines.append(f"  speed:     {_speed(verdict)}")
    if verdict.latency_ms is not None:
        times = [f"{name} {latency.median:.4g} ms" for name, latency in verdict.baselines_ms.items()]
        lines.append(f"  latency:   {verdict.latency_ms.median:.4g} ms" + (f" ({', '.join(times)})" if times else ""))
    worst = worst_cell(verdict)
    if worst is not None:
        lines.append(f"  error:     {_error(worst)}")
    names = [row.name for row in verdict.kernels if row.owned]
    if names:
        lines.append(f"  kernels:   {', '.join(dict.fromkeys(names))}")
    labels = [flag.kind for flag in verdict.flags]
    return [*lines, f"  labels:    {', '.join(labels)}"] if labels else lines


def _speed(verdict: Verdict) -> str:
    if verdict.speedups is None:
        return "not measured: no GPU" if verdict.evidence != "gpu" else "not measured"
    parts = [
        f"{interval.value:.2f}x over {name} [{interval.low:.2f}, {interval.high:.2f}]"
        for name in ("eager", "compile", "max_autotune", "cuda_graph")
        if (interval := getattr(verdict.speedups, name)) is not None
    ]
    return ", ".join(parts) or describe_gain(verdict)


def worst_cell(verdict: Verdict) -> Cell | None:
    """Return the cell whose error is the largest multiple of the reference's own, or null."""
    known = [cell for cell in verdict.cells if cell.rms is not None]
    return max(known, key=lambda cell: (cell.rms or 0.0) / max(cell.reference_rms or 0.0, 1e-30), default=None)


def _error(cell: Cell) -> str:
    own = f", the original's own is {cell.reference_rms:.2g}" if cell.reference_rms is not None else ""
    return f"{cell.rms:.2g} relative to float64 (rms, worst cell){own}"


def _region_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        places = ", ".join(row["paths"][:4]) + (f" and {len(row['paths']) - 4} more" if len(row["paths"]) > 4 else "")
        lines.append(f"  part:      {places} ({row['type']}, {row['share']:.0%} of the time): {row['status']}")
    return [*lines, "  parts:     judged alone, then in the whole module; the rest stays as it is"] if lines else []


def _estimate_lines(estimated: Mapping[str, Any] | None) -> list[str]:
    if estimated is None:
        return []
    parts = []
    if estimated["coverage_estimate"] is not None:
        parts.append(f"own kernels do about {estimated['coverage_estimate']:.0%} of the work")
    if estimated["eager_bytes"]:
        moved, least = estimated["eager_bytes"] / 1e6, estimated["least_bytes"] / 1e6
        parts.append(f"eager moves about {moved:.4g} MB a call, inputs, weights and outputs are {least:.4g} MB")
    return [f"  estimate:  {'; '.join(parts)}"] if parts else []


def _next_steps(outcome: Outcome, result: Mapping[str, Any]) -> list[str]:
    run = Path(result["run_dir"]).name
    steps = []
    if outcome.interrupted:
        steps.append(f"drk optimize --resume {run}   (goes on where it stopped)")
    if result.get("artefact"):
        steps.append(f"drk apply {run}   (writes the files beside yours and adds two lines; drk restore undoes it)")
    if result.get("measure_command"):
        steps.append(f"{result['measure_command']}   (on a machine with a GPU: measures it)")
    return steps


def _relative(path: Path, where: Path) -> str:
    return str(path.relative_to(where)) if path.is_relative_to(where) else str(path)


def _short(text: str) -> str:
    first = text.strip().splitlines()[0] if text.strip() else ""
    return first if len(first) <= 120 else first[:117] + "..."
