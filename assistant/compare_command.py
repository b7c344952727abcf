"""``drk compare A B``: is B faster or slower than A, and where? Profiles with profiles, runs with runs.

Each side is a run, a profile, a ``.json`` report or an ``.html`` page. ``--fail-below 0.97`` makes it a check for CI:
exit code 1 when the whole, or a module with at least 5 % of the time, is surely slower than that ratio (by the
interval's upper end where there is an interval, else by the ratio).

Only wires: the comparison is :mod:`drk.assistant.compare`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from drk.assistant.compare import Comparison, Row, compare, comparison_json
from drk.assistant.console import console_from, format_table
from drk.assistant.errors import ExitCode, UsageError
from drk.assistant.report_sources import find_page
from drk.assistant.report_verdict import duration_text
from drk.assistant.settings import load_settings

ROWS = 15
_WORDS = {"only-a": "only in A", "only-b": "only in B", "unknown": "no interval", "same": "no difference"}


def compare_command(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(help="Before: a run, a profile or a report file.")],
    b: Annotated[str, typer.Argument(help="After: the same kind.")],
    fail_below: Annotated[
        float | None, typer.Option("--fail-below", help="Exit 1 where A/B is below this ratio, as 0.97.")
    ] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")] = "text",
    runs_dir: Annotated[Path | None, typer.Option(help="Where run folders are (default .drk/runs).")] = None,
    profiles_dir: Annotated[Path | None, typer.Option(help="Where profiles are (default .drk/profiles).")] = None,
) -> None:
    """Compare two profiles or two runs: ratios of time, A over B (above 1: B is faster).

    \b
    Examples:
      drk compare before.json after.html
      drk compare main.json branch.json --fail-below 0.97      a check for CI: exits 1 when slower
    """
    if fail_below is not None and not 0 < fail_below < 100:
        raise UsageError(f"--fail-below must be a ratio above 0, not {fail_below:g}", help="--fail-below 0.97")
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    pages = [find_page(name, settings.runs_dir, profiles_dir).page for name in (a, b)]
    found = compare(*pages)
    if output == "json":
        console.result_json(comparison_json(found, fail_below))
    else:
        for text in found.warnings:
            console.warn(text)
        console.result(comparison_text(found, fail_below))
    failing = found.failing(fail_below) if fail_below is not None else []
    if any(row.high is None for row in failing):
        console.warn("what failed has no interval, and may be noise: profile both sides with more steps (--steps 30)")
    if failing:
        raise typer.Exit(ExitCode.NOT_ACCEPTED)


def comparison_text(found: Comparison, limit: float | None) -> str:
    """Return the table, at most :data:`ROWS` rows of each kind, and what is below the limit."""
    lines = [f"A: {found.a}", f"B: {found.b}", "ratio: time of A over time of B; above 1, B is faster", ""]
    shown: list[Row] = []
    for kind in ("run", "whole", "module", "kernel"):
        shown += [row for row in found.rows if row.kind == kind][:ROWS]
    header = ("what", "name", "A", "B", "ratio", "95 % interval", "")
    lines.append(format_table([_cells(row) for row in shown], header=header, right=(2, 3, 4)))
    if len(shown) < len(found.rows):
        lines.append(f"{len(found.rows) - len(shown)} more rows: --format json has all")
    if limit is not None:
        failing = found.failing(limit)
        lines += [
            "",
            f"below {limit:g}: {', '.join(row.name for row in failing)}" if failing else f"none below {limit:g}",
        ]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    name = row.name if len(row.name) <= 56 else row.name[:53] + "..."
    return [
        row.kind,
        name,
        duration_text(row.a_us) if row.a_us is not None else "-",
        duration_text(row.b_us) if row.b_us is not None else "-",
        f"{row.ratio:.3f}" if row.ratio is not None else "-",
        f"{row.low:.3f} to {row.high:.3f}" if row.low is not None and row.high is not None else "-",
        _WORDS.get(row.change, row.change),
    ]
