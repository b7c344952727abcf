"""``drk --help`` and its like import nothing heavy (what that costs in time: tests/benchmarks/bench_startup.py)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from drk.assistant.cli import COMMANDS

HEAVY = ("torch", "triton", "pydantic", "rich", "numpy", "safetensors", "jinja2", "asyncio")
REPORT = """
import json, sys
from drk.assistant.cli import run
code = run(sys.argv[1:])
sys.stderr.write("\\n@" + json.dumps([code, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def modules_after(*argv: str) -> tuple[int, set[str]]:
    """Run a command line in a fresh interpreter; return its exit code and the top-level modules it imported."""
    done = subprocess.run([sys.executable, "-c", REPORT, *argv], capture_output=True, text=True, check=True)
    code, names = json.loads(done.stderr.rpartition("@")[2])
    return code, set(names)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code, names = modules_after(*argv)
    assert code == 0
    assert names.intersection(HEAVY) == set()
    assert "typer" in names


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["--no-such-option"]])
def test_usage_errors_import_no_torch(argv: list[str]) -> None:
    """Typer itself reads options with pydantic; everything else stays away."""
    code, names = modules_after(*argv)
    assert code == 2
    assert names.intersection(HEAVY) <= {"pydantic"}


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "optimize"])
def test_a_commands_help_imports_no_torch(name: str) -> None:
    code, names = modules_after(name, "--help")
    assert code == 0
    assert names.isdisjoint({"torch", "triton", "rich"})


def test_the_installed_command_lists_every_command() -> None:
    script = Path(sys.executable).with_name("drk")
    done = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    for name in COMMANDS:
        assert f"  {name} " in done.stdout
