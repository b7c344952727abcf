"""The command line: lazy commands, global options, and one boundary from exceptions to exit codes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from drk.assistant import cli
from drk.assistant.cli import COMMANDS, Lazy, load_command, run, wants_json
from drk.assistant.console import console_from
from drk.assistant.errors import ConfigError, UsageError
from drk.gym.errors import DeviceError, TaskError

Capture = pytest.CaptureFixture[str]
Install = Callable[[Callable[..., None]], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that makes the command ``try`` out of a function of the test's."""

    def put(function: Callable[..., None]) -> None:
        module = type(sys)("tests_try_command")
        module.try_it = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(cli, "COMMANDS", {**COMMANDS, "try": Lazy(module.__name__, "try_it", "Try.")})

    return put


def raising(error: BaseException) -> Callable[..., None]:
    def command(output: str = typer.Option("text", "--format")) -> None:
        raise error

    return command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_in_the_table_exists_and_has_help(name: str, capsys: Capture) -> None:
    lazy = COMMANDS[name]
    assert hasattr(importlib.import_module(lazy.module), lazy.attribute)
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: drk {name}")
    assert "--verbose" in out
    assert "--color" in out


@pytest.mark.parametrize("argv", [["--help"], ["-h"]])
def test_help_lists_commands_and_examples(argv: list[str], capsys: Capture) -> None:
    assert run(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert all(name in captured.out for name in COMMANDS)
    assert "Examples:\n" in captured.out


def test_without_a_command_help_goes_to_stderr(capsys: Capture) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: drk")


def test_version_names_the_stack(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    words = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert list(words) == ["drk", "python", "torch", "triton"]
    assert words["torch"] == importlib.import_module("torch").__version__


def test_an_unknown_command_gets_a_suggestion(capsys: Capture) -> None:
    assert run(["verfy"]) == 2
    assert capsys.readouterr().err == "error: no such command: verfy\n  help: did you mean 'verify'?\n"


@pytest.mark.parametrize("flag", [["--format", "json"], ["--format=json"]])
def test_usage_errors_are_json_when_json_was_asked_for(flag: list[str], capsys: Capture) -> None:
    assert run(["doctor", "--no-such", *flag]) == 2
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert (data["status"], data["error"]["kind"]) == ("error", "usage")
    assert "--no-such" in data["error"]["message"]
    assert data["error"]["help"] == "drk doctor --help shows usage"
    assert captured.err == ""


def test_wants_json() -> None:
    assert not wants_json(["--format", "text", "json"])
    assert not wants_json(["--", "--format", "json"])
    assert not wants_json(["--format"])
    assert wants_json(["verify", "--format", "json", "--", "x"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("no", help="yes"), 2, "error: no\n  help: yes\n"),
        (ConfigError("bad", file="drk.toml"), 2, "error: bad\n  --> drk.toml\n"),
        (TaskError("fails", file="m.py", line=3), 2, "error: fails\n  --> m.py:3\n"),
        (DeviceError("no cuda:9", help="use auto"), 2, "error: no cuda:9\n  help: use auto\n"),
        (ExceptionGroup("g", [UsageError("inner")]), 2, "error: inner\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (typer.Abort(), 2, "error: aborted: no answer was given\n"),
        (typer.Exit(1), 1, ""),
        (typer.Exit(), 0, ""),
    ],
)
def test_errors_become_messages_and_codes(
    error: BaseException, code: int, text: str, install: Install, capsys: Capture
) -> None:
    install(raising(error))
    assert run(["try"]) == code
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", text)


def test_errors_are_json_on_stdout(install: Install, capsys: Capture) -> None:
    install(raising(TaskError("fails", kind="reference-raised", file="m.py", line=3)))
    assert run(["try", "--format", "json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"] == {
        "kind": "reference-raised",
        "message": "fails",
        "file": "m.py",
        "line": 3,
        "cause": None,
        "help": None,
    }
    assert captured.err == ""


def test_a_fault_of_ours_is_logged_and_not_thrown_at_the_user(
    install: Install, capsys: Capture, tmp_path: Path
) -> None:
    install(raising(KeyError("lost")))
    assert run(["try"], log_dir=tmp_path) == 101
    captured = capsys.readouterr()
    (log,) = tmp_path.glob("drk-fault-*.log")
    assert str(log) in captured.err
    assert "KeyError: 'lost'" in captured.err
    assert "Traceback" not in captured.out + captured.err
    assert "Traceback" in log.read_text()
    assert log.read_text().startswith("drk ")
    assert log.stat().st_mode & 0o077 == 0


def test_a_fault_is_shown_when_verbose(install: Install, capsys: Capture, tmp_path: Path) -> None:
    install(raising(KeyError("lost")))
    assert run(["try", "-v"], log_dir=tmp_path) == 101
    assert "Traceback" in capsys.readouterr().err
    group = ExceptionGroup("g", [UsageError("known"), KeyError("unknown")])
    install(raising(group))
    assert run(["try"], log_dir=tmp_path) == 101


def test_a_fault_log_goes_elsewhere_when_its_folder_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    elsewhere = tmp_path / "temporary"
    monkeypatch.setattr(cli.tempfile, "gettempdir", lambda: str(elsewhere))
    path = cli.write_fault_log(ValueError("x"), blocked / "below")
    assert path is not None
    assert path.parent == elsewhere


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["try"], (0, "x")),
        (["-v", "try"], (1, "x")),
        (["try", "-vv"], (2, "x")),
        (["try", "-q"], (-1, "x")),
        (["try", "--color", "always"], (0, "\x1b[31mx\x1b[0m")),
        (["--color=always", "try", "--quiet"], (-1, "\x1b[31mx\x1b[0m")),
    ],
)
def test_global_options_stand_before_or_after_the_command(
    argv: list[str], expected: tuple[int, str], install: Install
) -> None:
    seen: list[tuple[int, str]] = []

    def command(ctx: typer.Context) -> None:
        console = console_from(ctx)
        seen.append((console.verbosity, console.style("x", "red")))

    install(command)
    assert run(argv) == 0
    assert seen == [expected]


def test_a_group_of_commands_takes_the_global_options(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    group = typer.Typer()
    seen: list[int] = []

    @group.command()
    def show(ctx: typer.Context) -> None:
        seen.append(console_from(ctx).verbosity)

    @group.command()
    def clean(verbose: int = typer.Option(0, "--verbose", "-v", count=True)) -> None:
        seen.append(verbose + 100)

    module = type(sys)("tests_group_command")
    module.group = group  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cli, "COMMANDS", {"things": Lazy(module.__name__, "group", "Things.")})
    assert run(["things", "show", "-vv"]) == 0
    assert run(["things", "clean", "-v"]) == 0
    assert seen == [2, 101]
    assert run(["things", "shwo"]) == 2
    assert "show" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests_needs_extra.py").write_text("import package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="drk train needs the train extra") as caught:
        load_command("train", Lazy("tests_needs_extra", "app", "Train.", extra="train"))
    assert caught.value.help == "pip install 'drk[train]'"
    with pytest.raises(ModuleNotFoundError):
        load_command("train", Lazy("tests_needs_extra", "app", "Train."))


def test_ctrl_c_in_a_real_process_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        "from drk.assistant import cli\n"
        "def wait() -> None:\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "sys.modules['waiting'] = type(sys)('waiting')\n"
        "sys.modules['waiting'].wait = wait\n"
        "cli.COMMANDS = {'wait': cli.Lazy('waiting', 'wait', 'Wait.')}\n"
        "sys.argv = ['drk', 'wait']\n"
        "cli.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert err == "error: interrupted\n"


def test_the_process_closes_itself_before_a_command_runs(tmp_path: Path) -> None:
    """PR_GET_DUMPABLE (3) is 0 in a real ``drk`` process: other processes of this user cannot read its memory."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, sys\n"
        "from drk.assistant import cli\n"
        "def look() -> None:\n"
        "    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))\n"
        "sys.modules['looking'] = type(sys)('looking')\n"
        "sys.modules['looking'].look = look\n"
        "cli.COMMANDS = {'look': cli.Lazy('looking', 'look', 'Look.')}\n"
        "sys.argv = ['drk', 'look']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
