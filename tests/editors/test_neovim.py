"""Neovim, headless, with the shipped client: diagnostics, search, progress, apply, one undo, restore.

Skipped without ``nvim``. With DRK_TEST_EDITORS=1 the search is a real one by the command line (a minute), and the tests
of the artefact are run between apply and restore; else a scripted command stands for it.
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


def drive(file: Path, plugin: Path, settings: dict[str, Any], check: str = "") -> dict[str, Any]:
    """Run the script in Neovim and return what it saw."""
    log = file.parent.parent / "seen.json"
    home = file.parent.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "HOME": str(home),
        "DRIVE_LOG": str(log),
        "DRIVE_PLUGIN": str(plugin),
        "DRIVE_FILE": str(file),
        "DRIVE_CMD": json.dumps(SERVER),
        "DRIVE_SETTINGS": json.dumps(settings),
        "DRIVE_CHECK": check,
    }
    if not check:
        del environment["DRIVE_CHECK"]
    words = [str(NVIM), "--clean", "--headless", "-S", str(HERE / "drive_neovim.lua")]
    done = subprocess.run(
        words, env=environment, cwd=file.parent, capture_output=True, text=True, timeout=280, check=False
    )
    assert log.exists(), done.stderr
    seen: dict[str, Any] = json.loads(log.read_text())
    assert "fault" not in seen, (seen, done.stderr)
    return seen


def test_the_whole_path(tmp_path: Path, repository: Path) -> None:
    file = tmp_path / "project" / "model.py"
    file.parent.mkdir()
    file.write_text(lsp_parts.MODEL)
    lsp_parts.store_profile(file)
    scripted = [sys.executable, str(Path(lsp_parts.__file__).parent / "scripted_drk.py"), "win"]
    settings: dict[str, Any] = {"device": "interpret"} if REAL else {"command": scripted}
    check = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model_kernels.py"])
    seen = drive(file, repository / "lsp" / "editors" / "nvim", settings, check if REAL else "")
    assert {one["code"] for one in seen["diagnostics"]} >= {"hotspot", "memory-bound", "fusable"}
    assert [one["kind"] for one in seen["progress"]].count("end") == 1
    assert seen["progress"][0]["kind"] == "begin"
    assert "@optimized\nclass Net" in seen["applied"]
    assert seen["saved"]
    assert seen["undone"]
    assert seen["restored"]
    assert not (file.parent / "model_kernels.py").exists(), seen["messages"]
    if REAL:
        assert seen["check_code"] == 0, seen["check"]
        assert " passed" in seen["check"]
