"""``drk train rl|sft|scratch|report``: trains models, from one configuration that can be printed and tried first.

Reached from the command line by name; heavy packages are imported when training begins, so that ``--help`` and
``--print-config`` need neither torch nor TRL. Several processes: ``accelerate launch ... -m drk.training rl ...``.
Errors of the training stack become the command line's own, with exit code 2; Ctrl-C leaves the last whole checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.console import Console, console_from
from drk.assistant.errors import EnvironmentFault, UsageError
from drk.training.config import TrainConfig, config_to_toml, load_config
from drk.training.live_table import step_reporter

app = typer.Typer(help="Train models that write kernels.", no_args_is_help=True, add_completion=False)

ConfigName = Annotated[str, typer.Option("--config", help="A .toml file, or a recipe such as nano-cpu.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value; repeatable, wins over the file.")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved configuration and stop.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the first batch, sizes and a memory estimate, and stop.")]
Format = Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the result.")]


@app.command("rl")
def rl(
    ctx: typer.Context,
    config: ConfigName,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    output: Format = "text",
) -> None:
    """Train by reinforcement against the gym; goes on where an earlier run of the same configuration stopped."""
    console = console_from(ctx)
    settings = load_config(config, overrides or ())
    if print_config:
        console.result(config_to_toml(settings).rstrip())
        return
    with training_errors(), quiet_libraries():
        if dry_run:
            from drk.training.dry_run import describe_run

            facts = describe_run(settings, processes=_processes())
            print_facts(console, facts, as_json=output == "json")
            return
        from drk.training.rl import train_rl

        main = _rank() == 0
        with step_reporter(console, settings.run.steps, main=main) as tell:
            done = train_rl(settings, tell)
        if main:
            print_facts(console, done.facts(), as_json=output == "json")


@app.command("sft")
def sft(
    ctx: typer.Context,
    config: ConfigName,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    dry_run: DryRun = False,
    output: Format = "text",
) -> None:
    """Fine-tune on demonstrations (drk data trajectories), loss on answers only."""
    console = console_from(ctx)
    settings = load_config(config, overrides or ())
    if print_config:
        console.result(config_to_toml(settings).rstrip())
        return
    with training_errors(), quiet_libraries():
        if dry_run:
            from drk.training.dry_run import describe_sft

            print_facts(console, describe_sft(settings, processes=_processes()), as_json=output == "json")
            return
        from drk.training.sft import train_sft

        main = _rank() == 0
        with step_reporter(console, 0, main=main) as tell:
            done = train_sft(settings, tell)
        if main:
            print_facts(console, done.facts(), as_json=output == "json")


@app.command("scratch")
def scratch(
    ctx: typer.Context,
    config: ConfigName,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    output: Format = "text",
) -> None:
    """Make a small model from nothing, and train it on pairs in bulk or on demonstrations (sft.path)."""
    console = console_from(ctx)
    settings = load_config(config, overrides or ())
    if print_config:
        console.result(config_to_toml(settings).rstrip())
        return
    with training_errors(), quiet_libraries():
        from drk.training.scratch import train_scratch

        with step_reporter(console, _scratch_steps(settings)) as tell:
            done = train_scratch(settings, tell)
        print_facts(console, done.facts(), as_json=output == "json")


@app.command("report")
def report(ctx: typer.Context, folder: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Write a run's curves into its folder as report.html."""
    with training_errors():
        from drk.training.training_report import write_report

        console_from(ctx).result(str(write_report(folder)))


def _scratch_steps(settings: TrainConfig) -> int:
    """Return how many steps there will be, or 0 where that depends on the data or the clock."""
    return 0 if settings.sft.path or settings.scratch.minutes else settings.run.steps


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def print_facts(console: Console, facts: dict[str, Any], *, as_json: bool) -> None:
    """Print facts on stdout, as JSON or as lines of name and value."""
    if as_json:
        console.result_json({"schema_version": 1, **facts})
        return
    console.result("\n".join(f"{name}: {_text(value)}" for name, value in facts.items()))


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"\n{value}" if isinstance(value, str) and "\n" in value else str(value)


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """Make errors of the training stack, and missing packages, errors of the command line.

    Raises:
        UsageError: the ``train`` extra is not installed, or an option makes no sense.
        EnvironmentFault: training stopped, with what to do.
    """
    from drk.training.errors import OptionError, TrainingError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("drk"):
            raise
        raise UsageError(
            "drk train needs the train extra",
            cause=f"the package {error.name} is not installed",
            help="pip install 'drk[train]'",
        ) from error
    except OptionError as error:
        raise UsageError(error.message, help=error.help) from error
    except TrainingError as error:
        raise EnvironmentFault(error.message, kind="training", help=error.help) from error


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep progress bars and notices of the libraries off the terminal; errors of theirs are still shown."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"(torch|trl|transformers|accelerate)\b.*")
        with contextlib.suppress(ModuleNotFoundError):
            from transformers.utils import logging

            logging.disable_progress_bar()
        yield
