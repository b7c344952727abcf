"""A Verdict as text for a person: short, in order of importance, nothing claimed that was not measured.

Pure functions of the verdict and the candidate's source. What was not measured is called "not measured", with the
reason; a speed-up is always given with its interval and the baseline's name. Everything that comes from the candidate
(kernel names, messages, source lines) is plain text here; the console escapes control characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drk.assistant.console import Style, format_table
from drk.gym.schema import Cell, Failure, Flag, Interval, KernelRow, Verdict

Paint = Callable[..., str]
"""``paint(text, *styles)`` colours text, or leaves it as it is."""

EXCERPT_LINES = 2
"""Source lines shown before and after the failing one."""
MAX_KERNELS = 10
MAX_CELLS = 3

_COLORS: dict[str, Style] = {"accepted": "green", "rejected": "red", "failed": "red", "error": "yellow"}
_EVIDENCE = {
    "gpu": "checked on the GPU",
    "interpreter": "logic checked by the interpreter",
    "compile-only": "compiled only, never run",
}
_PLACE = {"gpu": "on the GPU", "interpreter": "under the interpreter", "compile-only": "compiled only"}
_RAN = ("ran", "correct", "honest", "measured")


def plain(text: str, *styles: Style) -> str:  # noqa: ARG001 - the signature of a paint
    """Paint nothing."""
    return text


def verdict_text(verdict: Verdict, *, source: str = "", path: str = "candidate.py", paint: Paint = plain) -> str:
    """Return ``verdict`` as text. ``source`` and ``path`` are the candidate's, for the excerpt at a failing line."""
    lines = [_headline(verdict, paint)]
    if verdict.error is not None:
        lines += _error_lines(verdict, verdict.error, source, path, paint)
    lines += _cell_lines(verdict)
    lines += [line for flag in verdict.flags for line in _flag_lines(flag, paint)]
    facts = [(label, text) for label, text in _facts(verdict) if text]
    lines += [f"  {label:<9} {text}" for label, text in facts]
    lines += _kernel_lines(verdict.kernels)
    lines += [f"  note: {note}" for note in verdict.notes]
    if verdict.repro:
        lines.append(f"  repeat: {verdict.repro}")
    return "\n".join(lines)


def _headline(verdict: Verdict, paint: Paint) -> str:
    word = paint(verdict.status, "bold", _COLORS[verdict.status])
    if verdict.status == "accepted":
        honest = "honest" if verdict.honest else "honesty not judged"
        return f"{word}: correct, {honest} ({_EVIDENCE[verdict.evidence]})"
    place = f" {_PLACE[verdict.evidence]}" if verdict.reached in _RAN else ""
    return f"{word}: {_reason(verdict)} (reached: {verdict.reached or 'nothing'}{place})"


def _reason(verdict: Verdict) -> str:
    if verdict.error is not None and verdict.status in ("failed", "error"):
        return f"{verdict.error.stage} stage, {verdict.error.kind}"
    frauds = [flag.kind for flag in verdict.flags if flag.severity == "fraud"]
    if not verdict.correct:
        return "wrong result" + (f", and {', '.join(frauds)}" if frauds else "")
    return "not honest: " + ", ".join(frauds) if frauds else "not accepted"


def _error_lines(verdict: Verdict, error: Failure, source: str, path: str, paint: Paint) -> list[str]:
    repeated = any(cell.reason and cell.reason in error.message for cell in verdict.cells if not cell.passed)
    where = path + (f":{error.line}" if error.line else "")
    lines = [] if repeated else [f"  {part}" for part in error.message.splitlines() or [error.kind]]
    if error.line:
        lines += [f"  --> {where}", *_excerpt(source, error.line, paint)]
    return lines


def _excerpt(source: str, line: int, paint: Paint) -> list[str]:
    """Return the source around ``line`` (from 1), with that line marked."""
    all_lines = source.splitlines()
    if not 1 <= line <= len(all_lines):
        return []
    first, last = max(line - EXCERPT_LINES, 1), min(line + EXCERPT_LINES, len(all_lines))
    width = len(str(last))
    rows = []
    for number in range(first, last + 1):
        row = f"    {'>' if number == line else ' '} {number:>{width}} | {all_lines[number - 1]}".rstrip()
        rows.append(paint(row, "bold") if number == line else row)
    return rows


def _cell_lines(verdict: Verdict) -> Iterator[str]:
    failing = [cell for cell in verdict.cells if not cell.passed]
    if verdict.cells and not failing:
        worst = max((cell.rms for cell in verdict.cells if cell.rms is not None), default=None)
        own = max((cell.reference_rms for cell in verdict.cells if cell.reference_rms is not None), default=None)
        errors = f"; largest rms error {worst:.2g}" if worst is not None else ""
        errors += f", reference's own {own:.2g}" if errors and own is not None else ""
        yield f"  cells     {len(verdict.cells)} of {len(verdict.cells)} passed{errors}"
    for cell in failing[:MAX_CELLS]:
        yield f"  wrong in: {cell.name}: {_cell_reason(cell)}"
    if len(failing) > MAX_CELLS:
        yield f"            and {len(failing) - MAX_CELLS} more of {len(verdict.cells)} cells"


def _cell_reason(cell: Cell) -> str:
    if cell.reason:
        return cell.reason
    parts = []
    for name, value, limit, own in (
        ("rms error", cell.rms, cell.rms_limit, cell.reference_rms),
        ("max error", cell.max, cell.max_limit, cell.reference_max),
    ):
        if value is not None and limit is not None and not value <= limit:
            reference = f" (reference: {own:.2g})" if own is not None else ""
            parts.append(f"{name} {value:.2g} where {limit:.2g} is allowed{reference}")
    return "; ".join(parts) or "no reason was given"


def _flag_lines(flag: Flag, paint: Paint) -> list[str]:
    label = paint(flag.severity, "bold", "red" if flag.severity == "fraud" else "yellow")
    lines = [f"  {label}: {flag.kind} ({flag.family})", f"    proof: {flag.proof}"]
    lines += [f"    {name}: {value}" for name, value in flag.evidence.items()]
    return lines


def _facts(verdict: Verdict) -> Iterator[tuple[str, str]]:
    yield "speed", _speed(verdict)
    if verdict.latency_ms is not None:
        base = ", ".join(f"{name} {ms.median:.4g} ms" for name, ms in verdict.baselines_ms.items())
        yield "latency", f"{verdict.latency_ms.median:.4g} ms" + (f" against {base}" if base else "")
    if verdict.coverage is not None:
        yield "coverage", f"{verdict.coverage:.0%} of device time in its own kernels"
    elif verdict.coverage_estimate is not None:
        yield "coverage", f"not measured; about {verdict.coverage_estimate:.0%} of the work, estimated from the graph"
    yield "weights", {"seeded": "seeded: equal seeds for both, not copied"}.get(verdict.weights or "", "")
    yield "sandbox", verdict.sandbox_level


def _speed(verdict: Verdict) -> str:
    speedups = verdict.speedups
    if speedups is None:
        if verdict.status != "accepted":
            return ""
        return "not measured" + (" (no GPU)" if verdict.evidence != "gpu" else "")
    named: tuple[tuple[str, Interval | None], ...] = (
        ("eager", speedups.eager),
        ("compile", speedups.compile),
        ("max_autotune", speedups.max_autotune),
        ("cuda_graph", speedups.cuda_graph),
    )
    parts = []
    for name, ratio in named:
        if ratio is not None:
            mark = ", fastest baseline" if name == verdict.headline else ""
            note = "" if ratio.low > 1 or ratio.high < 1 else ", no significant difference"
            parts.append(f"{ratio.value:.2f}x over {name} [{ratio.low:.2f}, {ratio.high:.2f}{mark}{note}]")
    return "; ".join(parts) + f" ({speedups.eager.pairs} pairs)"


def _kernel_lines(kernels: tuple[KernelRow, ...]) -> list[str]:
    if not kernels:
        return []
    ordered = sorted(kernels, key=lambda row: -(row.time_us or 0.0))[:MAX_KERNELS]
    rows = [
        [
            row.name,
            "own" if row.owned else "library",
            str(row.launches),
            _figure(row.time_us, "{:.1f}"),
            _figure(row.share, "{:.0%}"),
            _figure(row.num_warps),
            _figure(row.registers),
            _figure(row.spill_bytes),
            _figure(row.shared_bytes),
        ]
        for row in ordered
    ]
    header = ("kernel", "whose", "launches", "us", "share", "warps", "regs", "spill B", "shared B")
    table = format_table(rows, header=header, right=range(2, len(header)))
    more = [f"  and {len(kernels) - MAX_KERNELS} more"] if len(kernels) > MAX_KERNELS else []
    return ["", *(f"  {line}" for line in table.splitlines()), *more]


def _figure(value: float | None, form: str = "{}") -> str:
    return "-" if value is None else form.format(value)
