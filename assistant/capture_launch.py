"""Runs the user's own command with a recorder in its Python: unchanged, watched, and ended when it takes too long.

The command runs as the user would run it, outside of any sandbox and in the same terminal, since it needs the user's
data and devices; it is the user's own and typed on purpose. Standard input, output and error are its own; Ctrl-C
reaches it as it always does, and we wait for it. Its exit code is kept (128 + N when a signal N ended it).

At the time limit it gets SIGTERM, which the recorder turns into a last write, and SIGKILL with all its descendants
after a grace period.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Literal

import drk.assistant
from drk.assistant.capture_site import PARTS
from drk.assistant.errors import UsageError
from drk.gym.sandbox import terminate

GRACE_S = 20.0
RECORDERS = (
    "capture_values", "capture_recorder", "profile_clock", "profile_entry", "profile_graphs", "profile_hooks",
    "profile_marks", "profile_window",
)  # fmt: skip
"""Files that run in the user's process, which may have no drk: they import nothing of it but each other."""

Ended = Literal["finished", "crashed", "killed", "time-limit", "interrupted"]


@dataclass(frozen=True)
class CommandEnd:
    """How the user's command ended; ``exit_code`` is what a shell would tell."""

    exit_code: int
    ended: Ended
    signal_name: str = ""


def command_words(command: str, option: str = "--capture") -> list[str]:
    """Split a command line without a shell; ``-m pkg`` and ``train.py`` alone are run by this Python.

    Raises:
        UsageError: it is empty, or its quotes do not match.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{option}: {error}", help="quote it as you would in a shell") from error
    if not words:
        raise UsageError(f"{option}: the command is empty", help=f'type one, such as {option} "python train.py"')
    if words[0] == "-m" or (words[0].endswith(".py") and not os.access(words[0], os.X_OK)):
        return [sys.executable, *words]
    return words


def prepare(folder: Path, part: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Write the recorder's files into ``folder`` and return the environment that starts ``part`` in every Python."""
    site = folder / "site"
    parts = site / PARTS
    parts.mkdir(parents=True)
    own = Path(next(iter(drk.assistant.__path__)))
    (site / "sitecustomize.py").write_bytes((own / "capture_site.py").read_bytes())
    (parts / "__init__.py").write_text("")
    for name in RECORDERS:
        text = (own / f"{name}.py").read_text(encoding="utf-8")
        (parts / f"{name}.py").write_text(text.replace("from drk.assistant.", f"from {PARTS}."), encoding="utf-8")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        "KINETO_LOG_LEVEL": "99",  # its start and stop messages would stand among the program's own
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "DRK_CAPTURE_FOLDER": str(folder),
        "DRK_CAPTURE_PART": part,
        **variables,
    }


def run_watched(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    max_time_s: float,
    stdout: IO[Any] | int | None = None,
    option: str = "--capture",
) -> CommandEnd:
    """Run the command to its end, or to the time limit.

    Args:
        words: the command line.
        environment: from :func:`prepare`.
        cwd: where it runs.
        max_time_s: seconds after which it is ended.
        stdout: where its standard output goes; its own when null.
        option: the option's name, for messages.

    Raises:
        UsageError: the command cannot be started.
    """
    try:
        process = subprocess.Popen(words, cwd=cwd, env=dict(environment), stdout=stdout)
    except OSError as error:
        raise UsageError(f"{option}: cannot run {words[0]}: {error.strerror}") from error
    interrupts: list[int] = []
    with _keeping_interrupts(interrupts, process):
        timed_out = _wait(process, max_time_s)
    code = process.returncode
    name = signal.Signals(-code).name if code < 0 else ""
    exit_code = code if code >= 0 else 128 - code
    if timed_out:
        return CommandEnd(exit_code, "time-limit", name)
    if interrupts:
        return CommandEnd(exit_code, "interrupted", name)
    return CommandEnd(exit_code, "killed" if code < 0 else "crashed" if code else "finished", name)


def _wait(process: subprocess.Popen[bytes], max_time_s: float) -> bool:
    """Wait for the end; return whether it was ours, at the time limit."""
    try:
        process.wait(timeout=max_time_s)
        return False
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        _kill_all(process)
    return True


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    handle = os.pidfd_open(process.pid)
    try:
        terminate(process.pid, handle)
    finally:
        os.close(handle)
    process.wait()


@contextlib.contextmanager
def _keeping_interrupts(seen: list[int], process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Let Ctrl-C be the program's business: the terminal sends it there too. The third one ends the program."""

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        seen.append(number)
        if len(seen) >= 3:
            process.kill()

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: whoever runs us there handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
