"""``drk report [WHAT]``: shows a run or a profile as text, as one HTML page, or as JSON.

A profile says where the time goes; a run adds before and after with intervals, the correctness cells, the honesty
checks, the turns, the change and the code. The page is self-contained and needs no network. Nothing is judged or
measured here.

Only wires: the page is :mod:`drk.assistant.report_html`.
"""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated, Literal

import typer

from drk.assistant.atomic_write import write_atomically
from drk.assistant.console import Console, console_from
from drk.assistant.errors import UsageError
from drk.assistant.report_page import Page, page_json
from drk.assistant.report_run import run_text
from drk.assistant.report_sources import find_page
from drk.assistant.report_text import render_text
from drk.assistant.settings import load_settings

Format = Literal["text", "html", "json"]
_SUFFIXES: dict[str, Format] = {".html": "html", ".htm": "html", ".json": "json", ".txt": "text"}


def report(
    ctx: typer.Context,
    what: Annotated[str | None, typer.Argument(help="A run, a profile or a report file (default: the newest).")] = None,
    out_file: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here; the name says how.")] = None,
    output: Annotated[Format | None, typer.Option("--format", help="How to show it (default: text).")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Write the HTML page and open it in your browser.")] = False,
    source: Annotated[bool, typer.Option("--source/--no-source", help="With or without any source text.")] = True,
    runs_dir: Annotated[Path | None, typer.Option(help="Where run folders are (default .drk/runs).")] = None,
    profiles_dir: Annotated[Path | None, typer.Option(help="Where profiles are (default .drk/profiles).")] = None,
) -> None:
    """Show a run or a profile: where the time went, and what an optimisation changed.

    \b
    Examples:
      drk report                          the newest run or profile, as text
      drk report --open                   as a page in your browser
      drk report 20260101T1 -o report.html --no-source
    """
    settings = load_settings({"runs_dir": runs_dir}).settings
    console = console_from(ctx, color=settings.color)
    found = find_page(what, settings.runs_dir, profiles_dir)
    page = found.page if source else found.page.without_sources()
    form = _form(output, out_file, open_it=open_it)
    text = rendered(page, form)
    if open_it and out_file is None:
        out_file = found.place / f"{found.name}.html"
    if out_file is not None:
        write_page(out_file, text)
        console.info(f"wrote {out_file}")
    else:
        console.result(text)
    if open_it and out_file is not None:
        open_page(console, out_file)


def _form(output: Format | None, out_file: Path | None, *, open_it: bool) -> Format:
    named = _SUFFIXES.get(out_file.suffix.lower(), "html") if out_file is not None else None
    if open_it:
        if output not in (None, "html"):
            raise UsageError(f"--open shows a page, not {output}", help="leave --format out")
        return "html"
    return output or named or "text"


def rendered(page: Page, form: Format) -> str:
    """Return the page as text, HTML or JSON."""
    if form == "html":
        from drk.assistant.report_html import report_html  # jinja2: not needed for text

        return report_html(page)
    if form == "json":
        return json.dumps(page_json(page), indent=1, allow_nan=False)
    parts = [run_text(page.run)] if page.run is not None else []
    parts += [render_text(page.report)] if page.report is not None else []
    return "\n\n".join(parts)


def write_page(path: Path, text: str) -> None:
    """Write a rendered page.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        write_atomically(path, (text.removesuffix("\n") + "\n").encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"cannot write {path}", cause=error.strerror or str(error)) from error


def open_page(console: Console, path: Path) -> None:
    """Open a written page in the user's browser; where there is none, say where the page is."""
    try:
        opened = webbrowser.open(path.resolve().as_uri())
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        console.warn(f"no browser could be started; the page is {path.resolve()}")
