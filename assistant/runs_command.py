"""``drk runs list|show|clean``: what was optimised here, how it ended, and removing it.

Reads run folders only; nothing is judged. ``clean`` keeps runs that a process is working on, and by default the newest
few; it never touches files outside the runs folder, so an applied artefact stays applied.

Left out: size limits by bytes (a run is small unless its task carries weights).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.console import console_from, format_table
from drk.assistant.errors import UsageError
from drk.assistant.events import Event
from drk.assistant.runs import LATEST, Run, delete_run, list_runs, open_run
from drk.assistant.settings import load_settings
from drk.assistant.summary import event_line
from drk.assistant.verdict_cache import VerdictCache

app = typer.Typer(help="Look at the runs of drk optimize, or remove them.", no_args_is_help=True, add_completion=False)

Format = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")]
RunsDir = Annotated[Path | None, typer.Option(help="Where run folders are (default .drk/runs).")]


@app.command("list")
def list_command(ctx: typer.Context, runs_dir: RunsDir = None, output: Format = "text") -> None:
    """List runs, newest first."""
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    rows = [_row(run) for run in list_runs(settings.runs_dir)]
    if output == "json":
        console.result_json({"schema_version": 1, "runs": rows})
    elif rows:
        cells = [[row["run"], row["status"], row["target"], str(row["judged"]), row["reason"][:60]] for row in rows]
        console.result(format_table(cells, header=["run", "status", "target", "judged", "reason"], right=[3]))
    else:
        console.info(f"no runs in {settings.runs_dir}")


@app.command("show")
def show_command(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="A run, or a unique part of its name.")] = LATEST,
    runs_dir: RunsDir = None,
    output: Format = "text",
) -> None:
    """Show one run: what was asked, each turn, the answer, its files."""
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    found = open_run(settings.runs_dir, run)
    events = found.events()
    if output == "json":
        config, result = found.config, found.result
        shown = {"schema_version": 1, "run": found.name, "config": config, "events": events, "result": result}
        console.result_json(shown)
        return
    row = _row(found)
    lines = [f"{row['run']}: {row['status']}", f"  target:  {row['target']}", f"  folder:  {found.folder}"]
    lines += [f"  {line}" for event in events if event["event"] == "judged" and (line := event_line(event))]
    if row["reason"]:
        lines.append(f"  answer:  {row['reason']}")
    artefact = (found.result or {}).get("artefact") or {}
    lines += [f"  {name + ':':8} {path}" for name, path in artefact.items()]
    console.result("\n".join(lines))


@app.command("clean")
def clean_command(
    ctx: typer.Context,
    runs: Annotated[list[str] | None, typer.Argument(help="Runs to remove (default: all but the newest).")] = None,
    keep: Annotated[int, typer.Option(min=0, help="How many of the newest to keep.")] = 5,
    cache: Annotated[bool, typer.Option("--cache", help="Empty the verdict cache too.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Remove runs."""
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    doomed = [open_run(settings.runs_dir, name) for name in runs] if runs else list_runs(settings.runs_dir)[keep:]
    removed = 0
    for run in doomed:
        try:
            delete_run(run)
            removed += 1
        except UsageError as error:
            console.warn(f"{run.name} is kept: {error.message}")
    if cache:
        VerdictCache(settings.cache_dir, {}).clear()
    console.result(
        f"removed {removed} {'run' if removed == 1 else 'runs'}" + (", emptied the verdict cache" if cache else "")
    )


def _row(run: Run) -> dict[str, Any]:
    """Return what a list shows of one run."""
    config, result, events = run.config, run.result or {}, run.events()
    return {
        "run": run.name,
        "status": result.get("status") or "unfinished",
        "interrupted": bool(result.get("interrupted")),
        "target": str(config.get("target", "")),
        "judged": _count(events),
        "reason": str(result.get("reason", "")),
    }


def _count(events: list[Event]) -> int:
    return sum(event.get("event") == "judged" for event in events)
