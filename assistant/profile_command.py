"""``drk profile``: where the time goes, by kernel, module, function and source line.

Either a target is called (``drk profile model.py:Net``, as ``drk optimize`` takes it), or the user's own program runs
unchanged with a recorder in it (``--capture "python train.py"``, ``-m "pkg --flag"``): its output passes through and
its exit code becomes ours. The report is stored under ``.drk/profiles``; its tables go to standard output.

Only wires: the work is in :mod:`drk.assistant.profile_run`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.atomic_write import write_atomically
from drk.assistant.console import Console, console_from
from drk.assistant.errors import UsageError
from drk.assistant.intake import resolve_target
from drk.assistant.profile_run import STEPS, CaptureFailed, Profiled, Wanted, profile_command, profile_target
from drk.assistant.report import Report, to_json
from drk.assistant.report_command import open_page, rendered, write_page
from drk.assistant.report_export import to_perfetto
from drk.assistant.report_page import Page
from drk.assistant.report_sources import source_excerpts
from drk.assistant.report_store import default_profiles_dir
from drk.assistant.report_text import render_text
from drk.assistant.settings import Settings, load_settings
from drk.assistant.task_building import Autocast, InitTexts, InputTexts, IsFactory, autocast_name
from drk.gym.devices import device_facts


@dataclass(frozen=True)
class _Request:
    """The command line."""

    target: str | None
    command: str | None
    intake: Mapping[str, Any]
    steps: int
    profiles_dir: Path | None
    output: Literal["text", "json"]
    export: Literal["perfetto"] | None
    out_file: Path | None
    estimate_for: str | None
    save_tasks: bool
    open_it: bool
    autocast: str | None
    keep: Path | None


def profile(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    target: Annotated[str | None, typer.Argument(help="model.py, model.py:Class, ...; none with --capture.")] = None,
    capture: Annotated[str | None, typer.Option(help='Run this command, as "python train.py --steps 3".')] = None,
    module: Annotated[str | None, typer.Option("-m", help='Run a module, as -m "pkg --steps 3".')] = None,
    inputs: InputTexts = None,
    init: InitTexts = None,
    mode: Annotated[Literal["eval", "train"], typer.Option(help="The module's mode; train adds backward.")] = "eval",
    factory: IsFactory = None,
    autocast: Autocast = "",
    state_dict: Annotated[Path | None, typer.Option(help="Trained weights.")] = None,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps that are measured.")] = STEPS,
    precision: Annotated[str | None, typer.Option(help="match, strict, tf32 or bf16, for the saved tasks.")] = None,
    device: Annotated[str | None, typer.Option(help="auto or cuda:N; without a GPU the CPU.")] = None,
    estimate_for: Annotated[
        str | None, typer.Option("--target", help="GPU for estimates without one: h100, a100, sm_90, ...")
    ] = None,
    max_time: Annotated[float | None, typer.Option("--max-time", help="End the program after so many seconds.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic (not for --capture).")] = None,
    profiles_dir: Annotated[Path | None, typer.Option(help="Where profiles go (default .drk/profiles).")] = None,
    tasks: Annotated[bool, typer.Option("--tasks/--no-tasks", help="Save tasks for drk optimize.")] = True,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the report.")] = "text",
    export: Annotated[Literal["perfetto"] | None, typer.Option(help="Write a trace for Perfetto to -o.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the JSON here; a page if it is named .html.")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report as a page in your browser.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the recorder's own files here, for a bug report.")] = None,
) -> None:
    """Measure where the time goes: by kernel, module, function and source line.

    With --capture your program runs unchanged, outside of any sandbox; its output and exit code pass through. Without
    a GPU the times are the CPU's, and what a GPU would need at best is estimated.

    \b
    Examples:
      drk profile model.py:Net --input 'x=f32[128,1024]'
      drk profile --capture "python train.py --steps 20"
      drk profile -m "mypackage.train --steps 20"
      drk profile model.py --export perfetto -o step.json
      drk profile model.py -o report.html              the same as one page; --open shows it
      drk optimize --from-profile                      then make the hottest module faster
    """
    command = _command(target, capture, module)
    if export is not None and out_file is None:
        raise UsageError("--export needs a file", help=f"--export {export} -o step.json")
    intake = {"inputs": inputs or [], "init": init or [], "mode": mode, "factory": factory, "state_dict": state_dict}
    given = {"precision": precision, "device": device, "max_time_s": max_time, "sandbox": sandbox}
    settings = load_settings(given).settings
    request = _Request(
        target=target,
        command=command,
        intake=intake,
        steps=steps,
        profiles_dir=profiles_dir,
        output=output,
        export=export,
        out_file=out_file,
        estimate_for=estimate_for or settings.target,
        save_tasks=tasks,
        open_it=open_it,
        autocast=autocast_name(autocast),
        keep=keep,
    )
    _run(ctx, request, settings)


def _command(target: str | None, capture: str | None, module: str | None) -> str | None:
    """Return the command to run; null where a target is called.

    Raises:
        UsageError: not exactly one of the three is named.
    """
    if module is not None:
        if capture is not None:
            raise UsageError("--capture and -m exclude each other")
        capture = f"-m {module}"
    if (target is None) == (capture is None):
        advice = "drk profile model.py:Net, or drk profile --capture 'python train.py'"
        raise UsageError("name either a target or a command", help=advice)
    return capture


def _run(ctx: typer.Context, request: _Request, settings: Settings) -> None:
    console = console_from(ctx, color=settings.color)
    if request.estimate_for is not None:
        device_facts(request.estimate_for)  # an unknown name is told before anything runs
    wanted = Wanted(
        profiles_dir=request.profiles_dir or default_profiles_dir(),
        steps=request.steps,
        target=request.estimate_for,
        max_time_s=settings.max_time_s,
        precision=settings.precision,
        save_tasks=request.save_tasks,
        keep=request.keep,
    )
    if request.command is not None:
        profiled = _capture(console, request, wanted)
        _show(console, request, profiled)
        raise typer.Exit(profiled.end.exit_code if profiled.end.ended != "time-limit" else 0)
    if request.target is not None:
        _show(console, request, _call(console, request.target, request, settings, wanted))


def _capture(console: Console, request: _Request, wanted: Wanted) -> Profiled:
    command = request.command or ""
    to_stderr = request.output == "json"  # standard output is the report's alone then
    try:
        return profile_command(command, wanted, stdout=sys.stderr if to_stderr else None)
    except CaptureFailed as error:
        if error.end.exit_code in (0, 2) or request.output == "json":
            raise
        console.error(error)
        raise typer.Exit(error.end.exit_code) from error


def _call(console: Console, target: str, request: _Request, settings: Settings, wanted: Wanted) -> Profiled:
    task = resolve_target(target, **request.intake, precision=settings.precision, tolerance=settings.tolerance)
    task = replace(task, autocast=request.autocast)
    with console.progress(f"profiling {task.target}"):
        return profile_target(task, target, settings, wanted)


def _show(console: Console, request: _Request, profiled: Profiled) -> None:
    report = profiled.report
    is_page = request.export is None and request.out_file is not None and request.out_file.suffix.lower() == ".html"
    if request.out_file is not None and not is_page:
        data = to_perfetto(report) if request.export == "perfetto" else to_json(report)
        _write(request.out_file, data)
        console.info(f"wrote {request.out_file}")
    if is_page or request.open_it:
        _page(console, request, profiled, request.out_file if is_page else None)
    if request.output == "json":
        console.result_json(to_json(report))
    else:
        console.result(_text(report, profiled.path))


def _page(console: Console, request: _Request, profiled: Profiled, path: Path | None) -> None:
    page = Page(profiled.report, excerpts=source_excerpts(profiled.report))
    path = path or profiled.path.with_suffix(".html")
    write_page(path, rendered(page, "html"))
    console.info(f"wrote {path}")
    if request.open_it:
        open_page(console, path)


def _text(report: Report, path: Path) -> str:
    here = Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return f"{render_text(report)}\nreport: {shown}"


def _write(path: Path, data: Any) -> None:
    try:
        write_atomically(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}", cause=error.strerror or str(error)) from error
