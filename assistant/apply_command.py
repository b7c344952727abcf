"""``drk apply RUN`` and ``drk restore FILE``: put an artefact into the user's folder, and take it back.

What they do, and when they refuse, is :mod:`drk.assistant.apply`; here are only options and words. ``drk apply`` prints
the diff with ``--diff`` and changes nothing then.

Left out: applying to another file than the one that was optimised, beyond its having moved (``--file``).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from drk.assistant.apply import apply_artefact, restore_file
from drk.assistant.console import console_from
from drk.assistant.errors import UsageError
from drk.assistant.runs import LATEST, open_run
from drk.assistant.settings import load_settings


def apply(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="A run, or a unique part of its name.")] = LATEST,
    file: Annotated[Path | None, typer.Option(help="Where your file lies now, if it was moved.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print the diff and change nothing.")] = False,
    runs_dir: Annotated[Path | None, typer.Option(help="Where run folders are (default .drk/runs).")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")] = "text",
) -> None:
    """Write a run's kernels and test beside your file, and add two lines to it.

    Refuses when your file changed since it was optimised. `drk restore FILE` takes everything back.
    """
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    found = open_run(settings.runs_dir, run)
    if diff:
        artefact = (found.result or {}).get("artefact")
        if not artefact:
            raise UsageError(f"run {found.name} has no artefact")
        console.result(Path(artefact["diff"]).read_text(encoding="utf-8", errors="backslashreplace"))
        return
    applied = apply_artefact(found, file)
    if output == "json":
        written = [str(path) for path in applied.written]
        console.result_json({"schema_version": 1, "file": str(applied.file), "written": written})
        return
    lines = [f"changed {applied.file}", *(f"wrote   {path}" for path in applied.written)]
    console.result("\n".join([*lines, f"undo:   drk restore {shlex.quote(str(applied.file))}"]))


def restore(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="Your file.")],
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print.")] = "text",
) -> None:
    """Take drk's lines out of FILE and remove the files that were written beside it."""
    console = console_from(ctx, color=load_settings().settings.color)
    restored = restore_file(file)
    if output == "json":
        removed, kept = ([str(path) for path in paths] for paths in (restored.removed, restored.kept))
        told = {"schema_version": 1, "file": str(restored.file), "exact": restored.exact}
        console.result_json({**told, "removed": removed, "kept": kept})
        return
    how = "byte for byte" if restored.exact else "without drk's lines; your later edits stay"
    lines = [f"restored {restored.file} ({how})", *(f"removed  {path}" for path in restored.removed)]
    lines += [f"kept     {path} (changed since)" for path in restored.kept]
    console.result("\n".join(lines))
