"""A run folder of ``drk optimize`` as the :class:`~drk.assistant.report_page.RunReport` of a page, and as text.

Reads what the run recorded (``result.json``, the artefact's files); nothing is judged again. A run that is unfinished
has its turns so far and says so.

Left out: the candidates that were refused (their files lie in the run folder), and values of failing cells beyond what
the verdict itself says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drk.assistant.console import format_table
from drk.assistant.episode import describe_gain
from drk.assistant.explanation import explanation_lines
from drk.assistant.report_page import RunReport, TurnRow
from drk.assistant.runs import Run
from drk.assistant.verdict_rows import Baseline, baselines, cells_text, honesty_text
from drk.gym.schema import Interval, Verdict
from drk.gym.wire import verdict_from_json

MAX_TEXT_BYTES = 256 * 2**10


def run_report(run: Run) -> RunReport:
    """Return what the run says.

    Raises:
        BundleError: a recorded file is malformed.
    """
    result = run.result or {}
    best = result.get("best")
    artefact = result.get("artefact") or {}
    explanation = result.get("explanation") or {}
    return RunReport(
        name=run.name,
        target=str(run.config.get("target") or (result.get("task") or {}).get("target") or run.name),
        status=str(result.get("status") or "unfinished"),
        reason=str(result.get("reason") or "the run has no result yet; `drk optimize --resume` goes on with it"),
        verdict=None if best is None else verdict_from_json(best["verdict"]),
        turns=_turns(run, result),
        diff=_read(run, artefact.get("diff")),
        code=str(best["candidate"]["source"]) if best else "",  # the module is this and the same runtime each time
        explanation=(*_parts(result.get("regions") or []), *_explained(explanation)),
        spending=_spending(result.get("spending") or {}),
    )


def _read(run: Run, name: str | None) -> str:
    """Return the text of an artefact's file; the folder may have been moved, so only the name counts."""
    if not name:
        return ""
    try:
        data = (run.folder / Path(name).name).read_bytes()
    except OSError:
        return ""
    return data[:MAX_TEXT_BYTES].decode("utf-8", "replace")


def _turns(run: Run, result: Mapping[str, Any]) -> tuple[TurnRow, ...]:
    if "turns" in result:
        return tuple(_turn(row) for row in result["turns"])
    return tuple(
        TurnRow(
            index=int(event["turn"]),
            sample=int(event["sample"]),
            status=str(event["status"]),
            accepted=event["status"] == "accepted",
            proposer=str(event.get("source", "")),
            note=str(event.get("note") or event.get("gain") or ""),
            error=str(event.get("error") or ""),
            seconds=float(event.get("seconds", 0.0)),
        )
        for event in run.events()
        if event.get("event") == "judged"
    )


def _turn(row: Mapping[str, Any]) -> TurnRow:
    speedup = row.get("speedup")
    return TurnRow(
        index=int(row["index"]),
        sample=int(row["sample"]),
        status=str(row["status"]),
        accepted=bool(row["accepted"]),
        proposer=str(row.get("proposer", "")),
        note=str(row.get("note") or ""),
        speedup=None if speedup is None else Interval(**speedup),
        error=str(row.get("error") or ""),
        seconds=float(row.get("seconds", 0.0)),
    )


def _explained(explanation: Mapping[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in explanation_lines(explanation)] if explanation else []


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what came of each part, where the module was cut into parts."""
    found = []
    for row in rows:
        more = f" and {len(row['paths']) - 4} more" if len(row["paths"]) > 4 else ""
        places = ", ".join(row["paths"][:4]) + more
        found.append(f"part {places} ({row['type']}, {row['share']:.0%} of the time): {row['status']}")
    return found


def _spending(row: Mapping[str, Any]) -> str:
    parts = []
    if row.get("calls"):
        parts.append(
            f"{row['calls']} model calls, {row.get('prompt_tokens', 0)} + {row.get('completion_tokens', 0)} tokens"
        )
    if row.get("cost_usd") is not None and row.get("calls"):
        parts.append(f"{row['cost_usd']:.4f} dollars")
    if row.get("gpu_s"):
        parts.append(f"{row['gpu_s']:.1f} s of GPU time")
    return ", ".join(parts)


def run_text(run: RunReport) -> str:
    """Return the terminal form."""
    lines = [f"{run.target}: {run.status}", f"  {run.reason}", "", f"run  {run.name}"]
    if run.verdict is not None:
        lines += ["", "before and after", _baseline_table(run.verdict), ""]
        lines += [f"correctness  {cells_text(run.verdict)}", f"honesty      {honesty_text(run.verdict)}"]
    if run.turns:
        rows = [
            [
                f"{turn.index}.{turn.sample + 1}",
                turn.status,
                f"{turn.speedup.value:.2f}x" if turn.speedup is not None else "-",
                (turn.note or turn.error).strip().split("\n")[0][:70],
            ]
            for turn in run.turns
        ]
        lines += ["", "turns", format_table(rows, header=("turn", "status", "speed-up", "what"), right=(2,))]
    lines += ["", *run.explanation] if run.explanation else []
    if run.spending:
        lines += ["", f"spent  {run.spending}"]
    return "\n".join(lines)


def _baseline_table(verdict: Verdict) -> str:
    found = baselines(verdict)
    if not found:
        return f"  {describe_gain(verdict)}"
    return format_table(
        [_cells(row) for row in found],
        header=("what", "median", "95 % interval", "speed-up", "95 % interval"),
        right=(1, 3),
    )


def _cells(row: Baseline) -> list[str]:
    known, ratio = row.latency, row.speedup
    return [
        row.label,
        f"{known.median:.4g} ms" if known else "-",
        f"{known.low:.4g} to {known.high:.4g}" if known else "-",
        f"{ratio.value:.2f}x" if ratio else "-",
        f"{ratio.low:.2f} to {ratio.high:.2f} ({ratio.pairs} pairs)" if ratio else "-",
    ]
