"""The assistant's error tree, exit codes, and the form in which a person sees an error.

::

    DrkError                 root of everything that a command reports; exit code 2 unless said otherwise
    +-- UsageError           the command line is wrong
    +-- ConfigError          a setting is wrong; names the file and the key
    +-- TargetError          the user's file or target cannot be used as it stands
    +-- EnvironmentFault     this machine lacks something (device, sandbox level, package), or failed us
    +-- Interrupted          Ctrl-C (exit code 130)

Errors are raised anywhere and printed in one place (:mod:`drk.assistant.cli`), as::

    error: WHAT
      --> model.py:41
      cause: WHY
      help: NEXT STEP

A candidate that is wrong is no error: it is a Verdict, and ends with exit code 1. Errors of :mod:`drk.gym` are mapped
by :func:`from_gym`; a test fails when the gym grows a class that has no place here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from drk.gym.errors import GymError

SCHEMA_VERSION = 1
"""Version of the JSON form of errors; it moves together with ``drk.gym.schema.SCHEMA_VERSION`` (a test holds it)."""


class ExitCode(IntEnum):
    """What the process returns (docs/cli.md)."""

    OK = 0
    """Accepted, optimised, unmeasured, or simply done."""
    NOT_ACCEPTED = 1
    """It ran, and the answer is no: rejected, failed, no win, or a failing check."""
    USAGE = 2
    """Usage, configuration, environment or host error: nothing was judged."""
    INTERNAL = 101
    """A fault of drk's own; the traceback is in the log file that the message names."""
    INTERRUPTED = 130
    """Ctrl-C."""


class DrkError(Exception):
    """Root of the tree.

    ``kind`` is a stable identifier for machines; ``file`` and ``line`` point into the user's source where known;
    ``cause`` says why; ``help`` is the next step that a person can take. Empty strings mean "nothing to say".
    """

    default_kind: ClassVar[str] = "error"
    exit_code: ClassVar[ExitCode] = ExitCode.USAGE

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        file: str = "",
        line: int | None = None,
        cause: str = "",
        help: str = "",  # noqa: A002 - the word users read
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.file = file
        self.line = line
        self.cause = cause
        self.help = help


class UsageError(DrkError):
    """The command line is wrong."""

    default_kind = "usage"


class ConfigError(DrkError):
    """A setting has a wrong name, type or value; ``file`` is the file, or the origin such as ``DRK_SEEDS``."""

    default_kind = "config"


class TargetError(DrkError):
    """The user's file or target cannot be used: not found, not Python, ambiguous, inputs missing, fails when run."""

    default_kind = "target"


class EnvironmentFault(DrkError):
    """This machine lacks what was asked for, or the gym failed for no fault of the candidate: retrying may help."""

    default_kind = "environment"


class Interrupted(DrkError):
    """The user pressed Ctrl-C."""

    default_kind = "interrupted"
    exit_code = ExitCode.INTERRUPTED


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the nearest of ``known``, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


def from_gym(error: GymError) -> DrkError:
    """Map an error of :mod:`drk.gym` onto the tree; message, help, file and line are kept."""
    from drk.gym import errors as gym

    if isinstance(error, gym.TaskError):
        return TargetError(error.message, kind=error.kind, file=error.file, line=error.line, help=error.help)
    if isinstance(error, gym.BundleError):
        return TargetError(error.message, kind="bundle", help=error.help)
    kinds: tuple[tuple[type[GymError], str], ...] = (
        (gym.SandboxUnavailable, "sandbox"),
        (gym.DeviceError, "device"),
        (gym.ZygoteError, "zygote"),
        (gym.ProtocolError, "protocol"),
        (gym.HostError, "host"),
    )
    kind = next((name for cls, name in kinds if isinstance(error, cls)), "gym")
    return EnvironmentFault(error.message, kind=kind, help=error.help)


def format_error(error: DrkError) -> str:
    """Return the text form of ``error``; several lines in ``cause`` and ``help`` are indented below their label."""
    lines = [f"error: {error.message}"]
    if error.file:
        lines.append(f"  --> {error.file}" + (f":{error.line}" if error.line is not None else ""))
    for label, text in (("cause", error.cause), ("help", error.help)):
        if text:
            lines.append(f"  {label}: " + text.replace("\n", "\n" + " " * (len(label) + 4)))
    return "\n".join(lines)


def error_json(error: DrkError) -> dict[str, Any]:
    """Return the JSON form of ``error`` (DESIGN 4.2): every key is there, null where there is nothing to say."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": "error",
        "error": {
            "kind": error.kind,
            "message": error.message,
            "file": error.file or None,
            "line": error.line,
            "cause": error.cause or None,
            "help": error.help or None,
        },
    }
