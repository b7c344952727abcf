"""The only module that writes to the terminal: results on stdout, everything else on stderr.

A :class:`Console` is made once, by the command line, and passed to whatever needs to speak; there is no global one.
Colour follows ``--color``, then NO_COLOR, FORCE_COLOR and whether the stream is a terminal, and is never the only sign
of anything. Progress is a live line on a terminal, one plain line per event elsewhere, and nothing under ``-q``.

Text that comes from a candidate or a user's file may hold terminal escape codes: all control characters but our own
colours are shown as ``\\x1b`` and the like. A reader that goes away (``drk ... | head``) ends output quietly.

Left out: wide (East Asian) characters count as one column, so tables holding them are a little ragged.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from drk.assistant.errors import DrkError, error_json, format_error

ColorChoice = Literal["auto", "always", "never"]
Style = Literal["bold", "dim", "red", "green", "yellow", "blue"]

_SGR: Mapping[str, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
_RESET = "\x1b[0m"
_OUR_CODE = re.compile(r"(\x1b\[(?:[0-2]|3[1-4])m)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_CLEAR_LINE = "\r\x1b[2K"


@dataclass
class GlobalOptions:
    """What the global options of the command line say; it travels as the ``obj`` of the command's context.

    ``protect``: whether the process closes itself to others of its user before a command runs.
    """

    verbosity: int = 0
    color: ColorChoice = "auto"
    protect: bool = False

    def console(self, *, color: ColorChoice = "auto") -> Console:
        """Return a console; ``color`` (from the settings) holds where no ``--color`` was given."""
        return Console(verbosity=self.verbosity, color=color if self.color == "auto" else self.color)


def console_from(context: Any, *, color: ColorChoice = "auto") -> Console:
    """Return the console for a command's context (``typer.Context``), also where it was called without ``drk``."""
    options = getattr(context, "obj", None)
    return (options if isinstance(options, GlobalOptions) else GlobalOptions()).console(color=color)


def escape_controls(text: str) -> str:
    """Return ``text`` with control and bidirectional-override characters made visible; tab and newline stay."""
    return _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)


def wants_color(choice: ColorChoice, stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Say whether ``stream`` gets colour: the flag first, then NO_COLOR, FORCE_COLOR, TERM and the terminal test."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return _is_terminal(stream) and environ.get("TERM") != "dumb"


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # a closed stream
        return False


def _finite(value: Any) -> Any:
    """Return ``value`` with NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def format_table(rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), right: Sequence[int] = ()) -> str:
    """Return ``rows`` as aligned columns, two blanks apart; columns listed in ``right`` are aligned right."""
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    if not lines:
        return ""
    widths = [max(_width(line[i]) for line in lines) for i in range(len(lines[0]))]
    text: list[str] = []
    for line in lines:
        cells = [
            " " * (widths[i] - _width(cell)) + cell if i in right else cell + " " * (widths[i] - _width(cell))
            for i, cell in enumerate(line)
        ]
        text.append("  ".join(cells).rstrip())
    return "\n".join(text)


def _width(text: str) -> int:
    return len(_OUR_CODE.sub("", text))


class Console:
    """Where a command speaks.

    ``verbosity``: -1 quiet (errors and results only), 0 normal, 1 ``-v`` (debug lines, tracebacks), 2 ``-vv``.
    Streams and environment can be given for tests; by default they are the process's own, looked up at each write.
    """

    def __init__(
        self,
        *,
        verbosity: int = 0,
        color: ColorChoice = "auto",
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.verbosity = verbosity
        self._color = color
        self._stdout = stdout
        self._stderr = stderr
        self._environ = os.environ if environ is None else environ
        self._progress: Progress | None = None

    @property
    def stdout(self) -> TextIO:
        """The stream of results."""
        return self._stdout or sys.stdout

    @property
    def stderr(self) -> TextIO:
        """The stream of everything else."""
        return self._stderr or sys.stderr

    @property
    def quiet(self) -> bool:
        """Whether ``-q`` was given."""
        return self.verbosity < 0

    @property
    def live(self) -> bool:
        """Whether progress may redraw its line: stderr is a terminal and ``-q`` was not given."""
        return not self.quiet and _is_terminal(self.stderr) and self._environ.get("TERM") != "dumb"

    @property
    def width(self) -> int:
        """Columns of the terminal (80 when unknown)."""
        return shutil.get_terminal_size((80, 24)).columns

    def style(self, text: str, *styles: Style, on: Literal["stdout", "stderr"] = "stdout") -> str:
        """Return ``text`` wrapped in colour codes where that stream has colour, else as it is."""
        stream = self.stdout if on == "stdout" else self.stderr
        if not styles or not wants_color(self._color, stream, self._environ):
            return text
        return "".join(f"\x1b[{_SGR[name]}m" for name in styles) + text + _RESET

    def result(self, text: str) -> None:
        """Write a result to stdout, ending in one newline."""
        self._write("stdout", text)

    def result_json(self, value: Any, *, indent: int | None = 2) -> None:
        """Write a result to stdout as strict JSON (ASCII; NaN and infinities become null)."""
        self._write("stdout", json.dumps(_finite(value), indent=indent, allow_nan=False, default=str))

    def info(self, text: str) -> None:
        """Write a line to stderr, unless quiet."""
        if not self.quiet:
            self._write("stderr", text)

    def warn(self, text: str) -> None:
        """Write a warning to stderr, unless quiet."""
        if not self.quiet:
            self._write("stderr", self.style("warning:", "yellow", "bold", on="stderr") + f" {text}")

    def debug(self, text: str, *, level: int = 1) -> None:
        """Write a line to stderr under ``-v`` (``level`` 1) or ``-vv`` (``level`` 2)."""
        if self.verbosity >= level:
            self._write("stderr", self.style(text, "dim", on="stderr"))

    def error(self, error: DrkError | str) -> None:
        """Write an error to stderr, in the form of :func:`drk.assistant.errors.format_error`."""
        text = format_error(error if isinstance(error, DrkError) else DrkError(error))
        label = self.style("error:", "red", "bold", on="stderr")
        self._write("stderr", text.replace("error:", label, 1))

    def error_json(self, error: DrkError) -> None:
        """Write an error to stdout as JSON, for ``--format json``."""
        self.result_json(error_json(error))

    def progress(self, title: str, total: int | None = None) -> Progress:
        """Return a progress display; use it as a context manager. ``total`` is the number of steps, where known."""
        return Progress(self, title, total)

    def _write(self, name: Literal["stdout", "stderr"], text: str) -> None:
        parts = _OUR_CODE.split(text.removesuffix("\n"))
        safe = "".join(part if i % 2 else escape_controls(part) for i, part in enumerate(parts))
        live = self._progress
        if live is not None:
            live.hide()
        self._emit(name, safe + "\n")
        if live is not None:
            live.show()

    def _emit(self, name: Literal["stdout", "stderr"], text: str) -> None:
        stream = self.stdout if name == "stdout" else self.stderr
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except BrokenPipeError:
            self._discard(name)
        except ValueError:  # the stream was closed under us: nobody reads it
            return

    def _discard(self, name: Literal["stdout", "stderr"]) -> None:
        """Point a stream without a reader at nothing, so that neither we nor the interpreter's exit complain."""
        stream = self.stdout if name == "stdout" else self.stderr
        with contextlib.suppress(OSError, ValueError):
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)


class Progress:
    """A live line on a terminal, one plain line per event elsewhere, nothing under ``-q``.

    ``update`` tells the present state (drawn only on a terminal, so a log file is not flooded); ``event`` tells
    something that stays: a line of its own in both cases.
    """

    def __init__(self, console: Console, title: str, total: int | None) -> None:
        self._console = console
        self._title = title
        self._total = total
        self._done = 0
        self._text = ""
        self._open = False

    def __enter__(self) -> Self:
        self._open = True
        if self._console.live:
            self._console._progress = self
            self.show()
        else:
            self._console.info(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hide()
        self._open = False
        if self._console._progress is self:
            self._console._progress = None

    def update(self, text: str = "", *, done: int | None = None) -> None:
        """Set the state: ``done`` steps of the total, and what is going on now."""
        self._text = text
        if done is not None:
            self._done = done
        if self._open and self._console.live:
            self.hide()
            self.show()

    def event(self, text: str) -> None:
        """Write a line that stays, such as the outcome of one turn."""
        self._console.info(text)

    def hide(self) -> None:
        """Wipe the live line."""
        if self._open and self._console.live:
            self._console._emit("stderr", _CLEAR_LINE)

    def show(self) -> None:
        """Draw the live line, cut to the terminal's width."""
        if self._open and self._console.live:
            line = escape_controls(self._line()).replace("\n", " ")
            self._console._emit("stderr", line[: max(self._console.width - 1, 1)])

    def _line(self) -> str:
        if self._total is None:
            head = self._title
        else:
            cells = 20 * min(self._done, self._total) // max(self._total, 1)
            head = f"{self._title} [{'#' * cells}{'.' * (20 - cells)}] {self._done}/{self._total}"
        return f"{head}  {self._text}" if self._text else head
