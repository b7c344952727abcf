"""VS Code for real: the packaged extension in a browser-hosted workbench, driven by Chromium. Opt-in.

With DRK_TEST_EDITORS=1 profile, search and the artefact's tests are real too (minutes), as in test_neovim.py.
Needs DRK_TEST_VSCODE, a folder that holds npm's ``code-server`` and ``playwright-core`` and the extension's
``drk.vsix``, and a Chromium (``chromium`` on the path). docs/editors.md says how to make the folder.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import lsp_parts
import pytest
from lsp_wire import SERVER

REAL = os.environ.get("DRK_TEST_EDITORS") == "1"
TOOLS = os.environ.get("DRK_TEST_VSCODE", "")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.editor,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TOOLS or BROWSER is None, reason="needs DRK_TEST_VSCODE and a Chromium"),
]


@pytest.fixture
def workbench(tmp_path: Path) -> Iterator[str]:
    """A workbench with the extension installed; returns its address."""
    server = [str(Path(TOOLS) / "node_modules" / ".bin" / "code-server")]
    server += ["--user-data-dir", str(tmp_path / "data"), "--extensions-dir", str(tmp_path / "extensions")]
    subprocess.run(
        [*server, "--install-extension", str(Path(TOOLS) / "drk.vsix")], check=True, capture_output=True, timeout=300
    )
    script = Path(lsp_parts.__file__).parent / "scripted_drk.py"
    settings: dict[str, object] = {
        "drk.serverCommand": SERVER,
        "security.workspace.trust.enabled": False,
        "workbench.startupEditor": "none",
        "files.refactoring.autoSave": True,
    }
    if REAL:
        settings["drk.device"] = "interpret"
    else:
        settings["drk.command"] = [sys.executable, str(script), "win"]
    user = tmp_path / "data" / "User"
    user.mkdir(parents=True, exist_ok=True)
    (user / "settings.json").write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--bind-addr", f"127.0.0.1:{port}", "--auth", "none", "--disable-telemetry", "--disable-update-check"]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen([*server, *options], stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for(f"http://127.0.0.1:{port}/healthz")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(address: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(f"nothing answers at {address}")


def test_the_whole_path(workbench: str, tmp_path: Path) -> None:
    file = tmp_path / "project" / "model.py"
    file.parent.mkdir()
    file.write_text(lsp_parts.MODEL)
    if not REAL:
        lsp_parts.store_profile(file)
    check = shlex.join([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model_kernels.py"])
    log = tmp_path / "seen.json"
    environment = {
        **os.environ,
        "DRIVE_LOG": str(log),
        "DRIVE_URL": workbench,
        "DRIVE_FOLDER": str(file.parent),
        "DRIVE_BROWSER": str(BROWSER),
        "DRIVE_PLAYWRIGHT": TOOLS,
        **({"DRIVE_CHECK": check} if REAL else {}),
    }
    script = Path(__file__).parent / "drive_vscode.mjs"
    done = subprocess.run(
        ["node", str(script)], env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert log.exists(), done.stderr
    seen = json.loads(log.read_text())
    assert "fault" not in seen, (seen, done.stderr)
    assert seen["steps"] == ["workbench", "status bar", "lens", "suggestion", "applied", "restored"]
    assert ("% of CPU time" if REAL else "98 % of GPU time") in seen["lens"]
    assert "@optimized\nclass Net" in seen["applied"]
    if REAL:
        assert seen["check_code"] == 0, seen["check"]
        assert " passed" in seen["check"]
