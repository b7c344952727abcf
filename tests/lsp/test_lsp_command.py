"""How ``drk lsp`` starts and ends: without the parser where editors start it, and without what it does not need yet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from drk.lsp.commands import HANDLERS
from drk.lsp.names import COMMANDS

REPORT = """
import json, sys
from drk.assistant.cli import run
code = run(sys.argv[1:], protect=True)
sys.stderr.write("\\n@" + json.dumps([code, sorted(sys.modules)]))
"""


def modules_after(*argv: str) -> tuple[int, set[str]]:
    """Start a server whose editor leaves at once; return its exit code and the modules that it imported."""
    words = [sys.executable, "-c", REPORT, *argv]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    code, names = json.loads(done.stderr.rpartition("@")[2])
    return code, set(names)


@pytest.mark.parametrize("argv", [("lsp",), ("lsp", "--stdio")])
def test_before_the_handshake_only_the_protocol_is_imported(argv: tuple[str, ...]) -> None:
    code, names = modules_after(*argv)
    assert code == 0
    assert names >= {"pygls", "drk.lsp.server", "drk.gym.sandbox"}
    assert names.isdisjoint({"pydantic", "rich", "torch", "drk.gym.schema", "drk.assistant.report", "drk.lsp.commands"})


def test_other_command_lines_go_through_the_parser() -> None:
    code, names = modules_after("lsp", "--stdio", "-q")
    assert code == 0
    assert "drk.lsp.server" in names
    done = subprocess.run(
        [sys.executable, "-c", REPORT, "lsp", "--stdio", "--tcp", "0"], capture_output=True, text=True, check=True
    )
    assert "--tcp and --stdio exclude each other" in done.stderr


def test_a_missing_extra_is_named_on_this_way_too() -> None:
    program = REPORT.replace("code = ", "sys.modules['pygls'] = None\ncode = ")
    words = [sys.executable, "-c", program, "lsp"]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    assert "drk lsp needs the lsp extra" in done.stderr
    assert "pip install 'drk[lsp]'" in done.stderr
    assert json.loads(done.stderr.rpartition("@")[2])[0] == 2


def test_every_announced_command_has_its_code() -> None:
    assert set(HANDLERS) == set(COMMANDS)
