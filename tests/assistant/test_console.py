"""The console: streams, colour, control characters, broken pipes, progress on a real terminal and elsewhere."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys

import pytest

from drk.assistant.console import Console, GlobalOptions, console_from, escape_controls, format_table, wants_color
from drk.assistant.errors import TargetError


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def console(**options: object) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Console(stdout=out, stderr=err, environ={}, **options), out, err  # type: ignore[arg-type]


def test_results_go_to_stdout_and_the_rest_to_stderr() -> None:
    speaker, out, err = console(verbosity=2)
    speaker.result("answer")
    speaker.info("info")
    speaker.warn("careful")
    speaker.debug("detail", level=2)
    speaker.error(TargetError("bad", file="m.py", line=2))
    assert out.getvalue() == "answer\n"
    assert err.getvalue() == "info\nwarning: careful\ndetail\nerror: bad\n  --> m.py:2\n"


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [(-1, "error: e\n"), (0, "i\nwarning: w\nerror: e\n"), (1, "i\nwarning: w\nd\nerror: e\n")],
)
def test_verbosity(verbosity: int, expected: str) -> None:
    speaker, out, err = console(verbosity=verbosity)
    speaker.info("i")
    speaker.warn("w")
    speaker.debug("d")
    speaker.debug("dd", level=2)
    speaker.error("e")
    speaker.result("r")
    assert err.getvalue() == expected
    assert out.getvalue() == "r\n"


@pytest.mark.parametrize(
    ("choice", "environ", "terminal", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"NO_COLOR": ""}, True, True),
        ("auto", {"FORCE_COLOR": "1"}, False, True),
        ("auto", {"FORCE_COLOR": "0"}, False, False),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, True, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_colour(choice: str, environ: dict[str, str], terminal: bool, expected: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    assert wants_color(choice, stream, environ) is expected  # type: ignore[arg-type]


def test_colour_codes_of_ours_pass_and_foreign_ones_are_shown() -> None:
    speaker, out, _ = console(color="always")
    speaker.result(speaker.style("good", "green") + " \x1b]0;title\x07\x1b[2J\x9b8m\u202e")
    assert out.getvalue() == "\x1b[32mgood\x1b[0m \\x1b]0;title\\x07\\x1b[2J\\x9b8m\\u202e\n"
    assert escape_controls("a\tb\nc\rd") == "a\tb\nc\\x0dd"


def test_text_that_the_stream_cannot_encode_is_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(stdout=stream, environ={}).result("caf\u00e9 \udce9")
    assert raw.getvalue() == b"caf\\xe9 \\udce9\n"


def test_json_is_strict() -> None:
    speaker, out, _ = console()
    speaker.result_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": "\u00e9\x1b"})
    assert json.loads(out.getvalue()) == {"a": None, "b": [None, 1.5], "c": "\u00e9\x1b"}
    assert out.getvalue().isascii()


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = "from drk.assistant.console import Console\nc = Console()\nfor i in range(20000): c.result('x' * 80)"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr.read() == b""
    child.stderr.close()
    assert child.wait() == 0


def test_table() -> None:
    text = format_table([["a", "1"], ["long", "22"]], header=("name", "n"), right=[1])
    assert text == "name   n\na      1\nlong  22"
    assert format_table([]) == ""


def test_progress_without_a_terminal_is_plain_lines() -> None:
    speaker, out, err = console()
    with speaker.progress("searching", total=3) as progress:
        progress.update("turn 1", done=1)
        progress.event("turn 1/3: 1.2x")
    assert err.getvalue() == "searching\nturn 1/3: 1.2x\n"
    assert out.getvalue() == ""


def test_progress_is_silent_when_quiet() -> None:
    speaker, _, err = console(verbosity=-1)
    with speaker.progress("searching", total=3) as progress:
        progress.update("turn 1", done=1)
        progress.event("turn 1/3")
    assert err.getvalue() == ""


def test_progress_on_a_terminal_redraws_one_line_and_leaves_nothing() -> None:
    program = """
from drk.assistant.console import Console
console = Console()
with console.progress("searching", total=2) as progress:
    progress.update("turn 1", done=1)
    console.info("found one")
    progress.update("turn 2\\x1b[2J", done=2)
console.result("done")
"""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    child = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=follower, env=environment, check=True
    )
    os.close(follower)
    text = os.read(leader, 65536).decode()
    os.close(leader)
    assert child.stdout == b"done\n"
    wipe = "\r\x1b[2K"
    assert f"searching [##########..........] 1/2  turn 1{wipe}found one\r\n" in text
    assert "2/2  turn 2\\x1b[2J" in text
    assert text.endswith(wipe)


def test_console_from_a_context() -> None:
    class Context:
        obj: object = GlobalOptions(verbosity=-1, color="never")

    quiet = console_from(Context(), color="always")
    assert quiet.quiet
    assert quiet.style("x", "red") == "x"
    assert console_from(object()).verbosity == 0
    assert console_from(object(), color="always").style("x", "red") == "\x1b[31mx\x1b[0m"
