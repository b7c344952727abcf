"""``drk verify REFERENCE CANDIDATE``: judge one candidate and print its Verdict (DESIGN 4.2).

The reference goes through intake like any target; the candidate is a file that defines ``ModelNew``. This process runs
neither: both run in sandboxed processes of the gym. Settings come in layers (:mod:`drk.assistant.settings`), flags
last. A wrong candidate is an answer (exit 1), not an error; exit 2 is for usage, configuration and the host.
"""

from __future__ import annotations

import asyncio
import io
import shlex
import sys
import tokenize
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.console import Console, console_from
from drk.assistant.errors import ExitCode, TargetError
from drk.assistant.gym_address import open_gym
from drk.assistant.settings import Settings, load_settings
from drk.assistant.task_building import (
    Autocast,
    Captured,
    InitTexts,
    InputTexts,
    IsFactory,
    TaskOptions,
    Trains,
    build_task,
)
from drk.assistant.verdict_text import verdict_text
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.settings import GymSettings, Timing
from drk.gym.wire import MAX_SOURCE_BYTES, verdict_to_json

EXIT_CODES = {
    "accepted": ExitCode.OK,
    "rejected": ExitCode.NOT_ACCEPTED,
    "failed": ExitCode.NOT_ACCEPTED,
    "error": ExitCode.USAGE,
}


def read_candidate(path: Path) -> str:
    """Return the text of a candidate's file, decoded as Python would.

    Raises:
        TargetError: there is no such file, it is no text, or too large. (Text that is no Python is a verdict.)
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SOURCE_BYTES + 1)  # a device has no end
    except IsADirectoryError as error:
        raise TargetError(
            "the candidate is a folder", kind="candidate-folder", file=str(path), help="name a .py file"
        ) from error
    except OSError as error:
        raise TargetError(
            "the candidate cannot be read", kind="candidate-unreadable", file=str(path), cause=error.strerror or ""
        ) from error
    if len(raw) > MAX_SOURCE_BYTES:
        raise TargetError(
            f"the candidate is larger than {MAX_SOURCE_BYTES} bytes", kind="candidate-too-large", file=str(path)
        )
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise TargetError(
            "the candidate is not Python text", kind="candidate-encoding", file=str(path), cause=str(error)
        ) from error


async def judge(
    task: Task, candidate: Candidate, settings: Settings, *, timing: bool, gym: str | None = None
) -> Verdict:
    """Have the gym judge ``candidate`` under ``settings``; ``gym`` is a server's address.

    Raises:
        drk.gym.errors.TaskError: the reference itself cannot be judged.
        drk.gym.errors.HostError: the gym or this machine failed.
    """
    async with open_gym(_gym_settings(settings, timing=timing), gym) as opened:
        return await opened.evaluate(task, candidate)


def _gym_settings(settings: Settings, *, timing: bool) -> GymSettings:
    return GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        timing=Timing(enabled=timing),
    )


def print_verdict(console: Console, verdict: Verdict, *, source: str, path: str, as_json: bool) -> None:
    """Print ``verdict`` on stdout, in its public JSON form or as text."""
    if as_json:
        console.result_json(verdict_to_json(verdict))
    else:
        console.result(verdict_text(verdict, source=source, path=path, paint=console.style))


def verify(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    reference: Annotated[str, typer.Argument(help="model.py, model.py:Class, model.py:function, ...")],
    candidate: Annotated[Path, typer.Argument(help="A Python file that defines ModelNew.")],
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the verdict.")] = "text",
    inputs: InputTexts = None,
    init: InitTexts = None,
    mode: Annotated[Literal["eval", "train"], typer.Option(help="The module's mode.")] = "eval",
    train: Trains = False,
    factory: IsFactory = None,
    capture: Captured = "",
    autocast: Autocast = "",
    state_dict: Annotated[Path | None, typer.Option(help="Trained weights for the reference.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cuda:N or interpret.")] = None,
    target: Annotated[str | None, typer.Option(help="Architecture to compile for without a GPU, as sm_90.")] = None,
    precision: Annotated[str | None, typer.Option(help="match, strict, tf32 or bf16.")] = None,
    tolerance: Annotated[str | None, typer.Option(help="float64, or paper for KernelBench's rule.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Secret input draws.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic.")] = None,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Measure speed where there is a GPU.")] = True,
    gym: Annotated[str | None, typer.Option(help="A gym server to judge on (default DRK_GYM_URL; else here).")] = None,
) -> None:
    """Judge CANDIDATE, a file that defines ModelNew, against REFERENCE.

    Exits 0 when it is accepted (correct and not dishonest), 1 when it is rejected or failed, 2 when nothing was judged.
    """
    flags: dict[str, Any] = {
        "device": device,
        "target": target,
        "precision": precision,
        "tolerance": tolerance,
        "seeds": seeds,
        "sandbox": sandbox,
    }
    settings = load_settings(flags).settings
    console = console_from(ctx, color=settings.color)
    source = read_candidate(candidate)
    options = TaskOptions(reference, inputs or (), init or (), mode, factory, state_dict, capture, autocast, train)
    task = build_task(
        options,
        _gym_settings(settings, timing=timing),
        precision=settings.precision,
        tolerance=settings.tolerance,
        tell=console.info,
    )
    with console.progress(f"judging {candidate} against {reference} ..."):
        verdict = asyncio.run(judge(task, Candidate(source), settings, timing=timing, gym=gym))
    if not verdict.repro:
        verdict = replace(verdict, repro=shlex.join(["drk", *sys.argv[1:]]))
    print_verdict(console, verdict, source=source, path=str(candidate), as_json=output == "json")
    raise typer.Exit(EXIT_CODES[verdict.status])
