"""Neovim, headless, with the shipped client: diagnostics, search, progress, apply, one undo, restore.

Skipped without ``nvim``. With DRK_TEST_EDITORS=1 the whole path is real: it begins with a profile by the editor's own
command, the search is one by the command line (a minute), and the tests of the artefact are run between apply and
restore; else a stored profile and a scripted command stand for these.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lsp_parts
import pytest
from lsp_wire import SERVER

NVIM = shutil.which("nvim") or shutil.which("nvim", path=str(Path(sys.executable).parent))
REAL = os.environ.get("DRK_TEST_EDITORS") == "1"
pytestmark = [pytest.mark.editor, pytest.mark.skipif(NVIM is None, reason="needs nvim")]
HERE = Path(__file__).parent


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The user's file."""
    file = tmp_path / "project" / "model.py"
    file.parent.mkdir()
    file.write_text(lsp_parts.MODEL)
    return file


@pytest.fixture
def plugin(repository: Path) -> Path:
    """The client as it is shipped."""
    return repository / "lsp" / "editors" / "nvim"


def scripted(mode: str) -> list[str]:
    """The command line of a ``drk`` that does what it is told."""
    return [sys.executable, str(Path(lsp_parts.__file__).parent / "scripted_drk.py"), mode]


def drive(scenario: str, file: Path, plugin: Path, settings: dict[str, Any], **more: str) -> dict[str, Any]:
    """Run a scenario in Neovim and return what it saw."""
    log = file.parent.parent / "seen.json"
    home = file.parent.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "DRIVE_SCENARIO": scenario,
        "DRIVE_LOG": str(log),
        "DRIVE_PLUGIN": str(plugin),
        "DRIVE_FILE": str(file),
        "DRIVE_CMD": json.dumps(SERVER),
        "DRIVE_SETTINGS": json.dumps(settings),
        **more,
    }
    words = [str(NVIM), "--clean", "--headless", "-S", str(HERE / "drive_neovim.lua")]
    done = subprocess.run(
        words, env=environment, cwd=file.parent, capture_output=True, text=True, timeout=280, check=False
    )
    assert log.exists(), done.stderr
    seen: dict[str, Any] = json.loads(log.read_text())
    assert "fault" not in seen, (seen, done.stderr)
    return seen


def test_the_whole_path(file: Path, plugin: Path) -> None:
    settings: dict[str, Any] = {"device": "interpret"} if REAL else {"command": scripted("win")}
    check = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model_kernels.py"])
    if not REAL:
        lsp_parts.store_profile(file)
    seen = drive("whole", file, plugin, settings, **({"DRIVE_CHECK": check} if REAL else {}))
    codes = {one["code"] for one in seen["diagnostics"]}
    assert codes if REAL else codes >= {"hotspot", "memory-bound", "fusable"}
    assert [one["kind"] for one in seen["progress"]].count("end") == (2 if REAL else 1)
    assert seen["progress"][0]["kind"] == "begin"
    assert "@optimized\nclass Net" in seen["applied"]
    assert seen["saved"]
    assert seen["undone"]
    assert seen["restored"]
    assert not (file.parent / "model_kernels.py").exists(), seen["messages"]
    if REAL:
        assert seen["check_code"] == 0, seen["check"]
        assert " passed" in seen["check"]


@pytest.mark.slow
def test_a_profile_by_the_real_command_and_its_page(file: Path, plugin: Path) -> None:
    seen = drive("profile", file, plugin, {"device": "interpret", "profileArgs": ["--steps", "2"]})
    assert seen["before"] == 0
    assert {"Net", "Block"} <= {one["message"].split(":")[0] for one in seen["diagnostics"]}
    assert next(one["message"] for one in seen["progress"] if one["kind"] == "end") == "done"
    page = Path(seen["opened"].removeprefix("file://"))
    assert page.parent == file.parent / ".drk" / "profiles"
    assert "Net.first" in page.read_text()


def test_a_killed_server_is_started_anew_and_offers_what_was_found(file: Path, plugin: Path, tmp_path: Path) -> None:
    pid = tmp_path / "server.pid"
    words = ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(pid), *SERVER]
    more = {"DRIVE_CMD": json.dumps(words), "DRIVE_PID": str(pid)}
    seen = drive("killed", file, plugin, {"command": scripted("wait")}, **more)
    assert seen["kept"]
    assert "drk: no server for this buffer" in " ".join(seen["messages"])
    assert "@optimized\nclass Net" in seen["applied"]


def test_an_edit_that_cannot_be_made_is_not_half_made(file: Path, plugin: Path) -> None:
    lsp_parts.make_run(file)
    seen = drive("refused", file, plugin, {})
    assert seen["stale"] == {"applied": False, "failureReason": "model.py was changed meanwhile"}
    assert seen["stale_kept"]
    assert seen["fixed"]["applied"] is False
    assert seen["fixed_kept"]
    assert "('nomodifiable')" in " ".join(seen["messages"])
    assert seen["still"]
    assert seen["undone"]
    assert {path.name for path in file.parent.iterdir()} == {"model.py", ".drk"}
    assert not (file.parent / ".drk" / "applied" / "model.py.json").exists()
