"""``drk``: the entry point, the table of commands, and the one place where exceptions become messages and exit codes.

Commands are named by strings and imported when they are called, so that ``drk --help`` imports neither torch nor
pydantic nor rich (a test holds it) and no import points from here to training or the language server. Help texts stand
in the table for the same reason.

``-q``, ``-v`` and ``--color`` may stand before or after the command's name. Exit codes are those of
:class:`drk.assistant.errors.ExitCode`; with ``--format json`` on the command line, errors too are JSON on stdout.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import typer
from typer.core import TyperGroup
from typer.main import get_command as build_command

from drk.assistant.console import Console, GlobalOptions
from drk.assistant.errors import DrkError, ExitCode, Interrupted, UsageError, did_you_mean, from_gym


@dataclass(frozen=True)
class Lazy:
    """A command that is imported when it is called. ``extra`` is what must be installed for it, if anything."""

    module: str
    attribute: str
    about: str
    extra: str = ""


COMMANDS: Mapping[str, Lazy] = {
    "profile": Lazy(
        "drk.assistant.profile_command", "profile", "Show where the time goes: kernels, modules, source lines."
    ),
    "optimize": Lazy(
        "drk.assistant.optimize_command", "optimize", "Find, verify and hand over faster Triton kernels for a module."
    ),
    "report": Lazy("drk.assistant.report_command", "report", "Show a run or a profile as text, as a page or as JSON."),
    "compare": Lazy("drk.assistant.compare_command", "compare_command", "Compare two profiles or two runs."),
    "check": Lazy("drk.assistant.check_command", "check", "Verify the kernels that a project has committed, again."),
    "verify": Lazy(
        "drk.assistant.verify_command",
        "verify",
        "Judge one candidate kernel against a reference: correct, honest, fast?",
    ),
    "apply": Lazy("drk.assistant.apply_command", "apply", "Put a run's kernels to use in your file."),
    "restore": Lazy("drk.assistant.apply_command", "restore", "Take them out of it again."),
    "eval": Lazy("drk.assistant.eval_command", "evaluate_command", "Measure a proposer on many problems (Fast@p)."),
    "runs": Lazy("drk.assistant.runs_command", "app", "List, show or remove runs of drk optimize."),
    "selftest": Lazy("drk.assistant.selftest_command", "selftest", "Judge the shipped cheats and their honest twins."),
    "gym": Lazy("drk.assistant.gym_command", "app", "Run the gym as a service, or look after one."),
    "train": Lazy("drk.training.train_command", "app", "Train models that write kernels.", extra="train"),
    "data": Lazy("drk.training.data_command", "app", "Make and check training data.", extra="train"),
    "lsp": Lazy("drk.lsp.lsp_command", "lsp", "Show hotspots and verified kernels in your editor.", extra="lsp"),
    "doctor": Lazy("drk.assistant.doctor", "doctor", "Check this machine, and show settings with their origins."),
}

PLAIN: Mapping[tuple[str, ...], str] = {("lsp",): "serve_stdio", ("lsp", "--stdio"): "serve_stdio"}
"""Command lines that editors give and wait for, by function: without the parser of options, which loads pydantic."""

EXAMPLES = """\b
Examples:
  drk optimize model.py               find faster kernels for the module in model.py
  drk optimize model.py:Net --input 'x=f32[128,1024]'
  drk apply                           put the latest run's kernels to use in your file
  drk verify model.py candidate.py    is this kernel right, honest and faster?
  drk doctor                          what works on this machine
"""


class LazyGroup(TyperGroup):
    """The root command: names and help come from :data:`COMMANDS`, code is imported on call."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the framework's signature
        """Return the names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Import the command, or return None when there is none of that name."""
        return load_command(cmd_name, COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that ``args`` name.

        Raises:
            UsageError: there is none; the nearest name is suggested.
        """
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = did_you_mean(args[0], COMMANDS)
            raise UsageError(f"no such command: {args[0]}", help=near or "commands are: " + ", ".join(COMMANDS))
        if getattr(ctx.obj, "protect", False):
            importlib.import_module("drk.gym.sandbox").protect_process()
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the table of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.about) for name, lazy in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; Ctrl-C becomes an error of ours here, before the framework makes it a bare exit."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted") from error


def load_command(name: str, lazy: Lazy) -> Any:
    """Import ``lazy`` and return it as a command that also takes the global options.

    Raises:
        UsageError: it needs an extra that is not installed.
    """
    found = import_command(name, lazy, lazy.attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(name, short_help=lazy.about)(found)
        found = app
    found.rich_markup_mode = None
    command = build_command(found)
    command.name = name
    if isinstance(command, TyperGroup):
        command.no_args_is_help = False  # "missing command", in our form, rather than a page of help as an error
    _add_global_options(command)
    return command


def import_command(name: str, lazy: Lazy, attribute: str) -> Any:
    """Import a command's module and return what it has of that name.

    Raises:
        UsageError: an extra that is needed is not installed.
    """
    try:
        return getattr(importlib.import_module(lazy.module), attribute)
    except ModuleNotFoundError as error:
        if not lazy.extra or (error.name or "").startswith("drk"):
            raise
        raise UsageError(
            f"drk {name} needs the {lazy.extra} extra",
            cause=f"the package {error.name} is not installed",
            help=f"pip install 'drk[{lazy.extra}]'",
        ) from error


def _add_global_options(command: Any) -> None:
    """Let ``command`` and everything below it take -q, -v and --color, unless it has its own of that name."""
    taken = {word for param in command.params for word in param.opts}
    command.params.extend(param for param in _params_of(_global_options) if not taken.intersection(param.opts))
    for child in getattr(command, "commands", {}).values():
        _add_global_options(child)


def _params_of(declaration: Callable[..., None]) -> list[Any]:
    """Return the options that a function declares, as parameters that can be added to any command."""
    app = typer.Typer(add_completion=False)
    app.command()(declaration)
    return list(build_command(app).params)


def _on_verbose(ctx: typer.Context, value: int) -> None:
    if value and isinstance(ctx.obj, GlobalOptions):
        ctx.obj.verbosity = value


def _on_quiet(ctx: typer.Context, value: bool) -> None:
    if value and isinstance(ctx.obj, GlobalOptions):
        ctx.obj.verbosity = -1


def _on_color(ctx: typer.Context, value: Literal["auto", "always", "never"] | None) -> None:
    if value is not None and isinstance(ctx.obj, GlobalOptions):
        ctx.obj.color = value


Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        callback=_on_verbose,
        expose_value=False,
        show_default=False,
        help="Say more (-vv: still more).",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("-q", "--quiet", callback=_on_quiet, expose_value=False, help="Say nothing but results and errors."),
]
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    typer.Option("--color", callback=_on_color, expose_value=False, help="Colour on the terminal."),
]


def _global_options(verbose: Verbose = 0, quiet: Quiet = False, color: Color = None) -> None:
    """Carry the options that every command takes."""


def version_text() -> str:
    """Return the versions of drk, Python, torch and triton, from package metadata (torch is not imported)."""
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    parts = [f"drk {installed('drk')}", f"python {platform.python_version()}"]
    return "\n".join([*parts, *(f"{name} {installed(name)}" for name in ("torch", "triton"))])


def _on_version(value: bool) -> None:
    if value:
        Console().result(version_text())
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_on_version, is_eager=True, expose_value=False, help="Show versions and exit."),
]


def _root_options(version: Version = False) -> None:
    """Carry the options of ``drk`` itself."""


app = typer.Typer(
    name="drk",
    cls=LazyGroup,
    help="Make your PyTorch modules faster with Triton kernels that are verified correct, honest and faster.",
    epilog=EXAMPLES,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def _root(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        Console().info(ctx.get_help())
        raise typer.Exit(ExitCode.USAGE)


def root_command() -> Any:
    """Return ``drk`` as a command object."""
    command = build_command(app)
    command.params[:0] = _params_of(_root_options)
    _add_global_options(command)
    return command


class Boundary:
    """Turns whatever escapes a command into one message and an exit code.

    Known errors (ours, the gym's, the command line parser's) are told as such. Anything else is a fault of drk's own:
    its traceback goes to a log file, whose path is printed, and to the terminal only under ``-v``.
    """

    def __init__(self, options: GlobalOptions, *, as_json: bool, log_dir: Path | None = None) -> None:
        self.exit_code: int = ExitCode.OK
        self._options = options
        self._as_json = as_json
        self._log_dir = log_dir

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, (SystemExit, GeneratorExit)):
            return False
        console = self._options.console()
        known = as_drk_error(error)
        if known is None:
            known = _Fault(error, write_fault_log(error, self._log_dir))
        elif known.exit_code != ExitCode.INTERRUPTED:
            console.debug("".join(traceback.format_exception(error)), level=2)
        if isinstance(known, _Fault):
            console.debug("".join(traceback.format_exception(error)))
        self.exit_code = known.exit_code
        if self._as_json:
            console.error_json(known)
        else:
            console.error(known)
        return True


class _Fault(DrkError):
    """A fault of drk's own."""

    default_kind = "internal"
    exit_code = ExitCode.INTERNAL

    def __init__(self, error: BaseException, log: Path | None) -> None:
        while isinstance(error, BaseExceptionGroup):  # its own text only counts its exceptions
            error = error.exceptions[0]
        text = "".join(traceback.format_exception_only(error)).strip()
        where = f"the traceback is in {log}" if log else "the traceback could not be saved; -v shows it"
        super().__init__("drk failed, by a fault of its own", cause=text, help=f"please report this; {where}")


def as_drk_error(error: BaseException) -> DrkError | None:
    """Return ``error`` as one that is told to the user, or None when it is a fault of drk's own."""
    if isinstance(error, DrkError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted")
    if isinstance(error, typer.Abort):
        return UsageError("aborted: no answer was given")
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        help_text = f"{context.command_path} --help shows usage" if context is not None else ""
        return UsageError(error.format_message().rstrip("."), help=help_text)
    if isinstance(error, BaseExceptionGroup):
        found = [as_drk_error(inner) for inner in error.exceptions]
        return None if None in found else found[0]
    gym_errors = sys.modules.get("drk.gym.errors")
    if gym_errors is not None and isinstance(error, gym_errors.GymError):
        return from_gym(error)
    return None


def write_fault_log(error: BaseException, folder: Path | None = None) -> Path | None:
    """Save the traceback where only the user can read it, and return the path (None when nothing could be written)."""
    import platformdirs

    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    text = "".join(traceback.format_exception(error))
    words = " ".join(sys.argv)
    for place in (folder or Path(platformdirs.user_log_dir("drk")), Path(tempfile.gettempdir())):
        path = place / f"drk-fault-{stamp}-{os.getpid()}.log"
        try:
            place.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{version_text()}\n{words}\n\n{text}")
        return path
    return None


def wants_json(argv: Sequence[str]) -> bool:
    """Say whether ``--format json`` is on the command line, even when the rest of it cannot be parsed."""
    words = list(argv[: argv.index("--")] if "--" in argv else argv)
    return "--format=json" in words or ("--format", "json") in itertools.pairwise(words)


def run(argv: Sequence[str], *, log_dir: Path | None = None, protect: bool = False) -> int:
    """Run one command line and return its exit code; nothing but SystemExit gets out.

    ``protect`` closes this process's memory and environment to code under test, which runs as the same user.
    """
    options = GlobalOptions(protect=protect)
    boundary = Boundary(options, as_json=wants_json(argv), log_dir=log_dir)
    with boundary:
        if plain := PLAIN.get(tuple(argv)):
            return _run_plain(argv[0], plain, protect=protect)
        code = root_command().main(args=list(argv), prog_name="drk", standalone_mode=False, obj=options)
        return int(code) if isinstance(code, int) else ExitCode.OK
    return boundary.exit_code


def _run_plain(name: str, attribute: str, *, protect: bool) -> int:
    """Do a command of :data:`PLAIN`. What its modules are made of stays: the garbage collector never looks at it."""
    if protect:
        importlib.import_module("drk.gym.sandbox").protect_process()
    gc.disable()
    work = import_command(name, COMMANDS[name], attribute)
    gc.freeze()
    gc.enable()
    return work() or ExitCode.OK


def main() -> None:
    """Run ``drk`` on the process's arguments and exit."""
    sys.exit(run(sys.argv[1:], protect=True))
