"""Emacs in batch mode with eglot: diagnostics, apply (the server writes the kernels), undo, restore.

Skipped without ``emacs`` or without eglot (part of Emacs 29, a package before).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import lsp_parts
import pytest
from lsp_wire import SERVER

EMACS = shutil.which("emacs")
pytestmark = [pytest.mark.editor, pytest.mark.skipif(EMACS is None, reason="needs emacs")]


def test_apply_undo_and_restore(tmp_path: Path) -> None:
    words = [str(EMACS), "--batch", "--eval", "(require 'eglot)"]
    if subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs eglot")
    file = tmp_path / "project" / "model.py"
    file.parent.mkdir()
    file.write_text(lsp_parts.MODEL)
    lsp_parts.store_profile(file)
    lsp_parts.make_run(file)
    log = tmp_path / "seen.json"
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "DRIVE_LOG": str(log),
        "DRIVE_FILE": str(file),
        "DRIVE_CMD": json.dumps(SERVER),
    }
    script = str(Path(__file__).parent / "drive_emacs.el")
    done = subprocess.run(
        [str(EMACS), "--batch", "-l", script], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert log.exists(), done.stderr
    seen = json.loads(log.read_text())
    assert "fault" not in seen, (seen, done.stderr)
    assert any("Net: 98 % of GPU time" in one for one in seen["diagnostics"])
    assert "@optimized\nclass Net" in seen["applied"]
    assert seen["files"] == ["model.py", "model_kernels.py", "test_model_kernels.py"]
    assert seen["undone"] is True
    assert seen["redone"] is True
    assert seen["left"] == ["model.py"]
