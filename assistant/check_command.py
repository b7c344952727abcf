"""``drk check [PATHS]``: a guard for CI. Are this project's committed kernels still right, honest and faster?

Exit code 0 when all are, 1 when one is not, 2 when nothing could be judged (no kernels found, a fault of the machine).
Without a GPU the logic is checked by Triton's interpreter and the output says that speed was not.

Only wires: the work is in :mod:`drk.assistant.check`, the forms in :mod:`drk.assistant.check_output`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.check import SLACK, Check, check_all, checks_json, find_artefacts
from drk.assistant.check_output import checks_text, github_annotations, junit_xml
from drk.assistant.console import Console, console_from
from drk.assistant.errors import ExitCode
from drk.assistant.gym_address import open_gym
from drk.assistant.report_command import write_page
from drk.assistant.report_page import compact
from drk.assistant.settings import Settings, load_settings
from drk.gym.settings import GymSettings, Timing

Format = Literal["text", "json", "junit", "github"]


def check(  # noqa: PLR0913, PLR0917 - one parameter for each option
    ctx: typer.Context,
    paths: Annotated[list[Path] | None, typer.Argument(help="Files or folders (default: this folder).")] = None,
    output: Annotated[Format, typer.Option("--format", help="How to print.")] = "text",
    out_file: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here instead of printing.")] = None,
    slack: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the recorded speed-up that may be lost.")
    ] = SLACK,
    device: Annotated[str | None, typer.Option(help="auto, cuda:N or interpret.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Secret input draws.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="strict, standard or basic.")] = None,
    timing: Annotated[bool, typer.Option("--timing/--no-timing", help="Measure speed where there is a GPU.")] = True,
    gym: Annotated[str | None, typer.Option(help="A gym server to judge on (default DRK_GYM_URL; else here).")] = None,
) -> None:
    """Verify the kernels that a project has committed, on this device and with these versions.

    \b
    Examples:
      drk check
      drk check src --format github          annotations in a pull request
      drk check --format junit -o drk.xml
    """
    flags: dict[str, Any] = {"device": device, "seeds": seeds, "sandbox": sandbox}
    settings = load_settings(flags).settings
    console = console_from(ctx, color=settings.color)
    files = find_artefacts(paths or [Path()])
    checks = asyncio.run(_judged(console, files, settings, slack=slack, timing=timing, gym=gym))
    text = _rendered(checks, output)
    if out_file is not None:
        write_page(out_file, text)
        console.info(f"wrote {out_file}")
        console.info(checks_text(checks))
    else:
        console.result(text)
    if not all(one.good for one in checks):
        raise typer.Exit(ExitCode.NOT_ACCEPTED)


async def _judged(
    console: Console, files: Sequence[Path], settings: Settings, *, slack: float, timing: bool, gym: str | None
) -> list[Check]:
    wanted = GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        timing=Timing(enabled=timing),
    )
    found: list[Check] = []
    with console.progress(f"checking {len(files)} {'file' if len(files) == 1 else 'files'}"):
        async with open_gym(wanted, gym) as opened:
            async for one in check_all(files, opened, slack=slack, timed=timing):
                found.append(one)
                console.debug(f"{one.status}  {one.file}: {one.reason}")
    return found


def _rendered(checks: Sequence[Check], output: Format) -> str:
    if output == "json":
        return json.dumps(compact(checks_json(checks)), indent=2, allow_nan=False)
    if output == "junit":
        return junit_xml(checks)
    return github_annotations(checks) if output == "github" else checks_text(checks)
