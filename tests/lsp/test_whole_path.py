"""The whole path with the real command line and the builtin proposer: search, suggestion, apply, its tests, restore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lsp_wire
import pytest
from lsp_wire import WireClient

from drk.lsp.jobs import OWN_COMMAND

MODEL = """import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x) * 2.0 + 1.0


def example_inputs():
    return (torch.randn(16, 32),)
"""


def make_edits(params: dict[str, Any]) -> dict[str, bool]:
    """Make a workspace edit on disk, as an editor that saves does."""
    for change in params["edit"]["documentChanges"]:
        path = Path((change.get("textDocument") or change)["uri"].removeprefix("file://"))
        if change.get("kind") == "create":
            path.write_text("")
        elif change.get("kind") == "delete":
            path.unlink()
        else:
            lines = path.read_text().splitlines(keepends=True)
            for edit in sorted(change["edits"], key=lambda one: -one["range"]["start"]["line"]):
                low, high = (edit["range"][end]["line"] for end in ("start", "end"))
                lines[low:high] = [edit["newText"]]
            path.write_text("".join(lines))
    return {"applied": True}


@pytest.mark.long
async def test_search_apply_test_and_restore(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsp_wire, "WAIT_S", 280.0)
    file = project / "model.py"
    file.write_text(MODEL)
    client = await WireClient.start()
    try:
        client.settings = {"device": "interpret", "optimizeArgs": ["--turns", "1", "--samples", "1", "--seeds", "2"]}
        client.answers["workspace/applyEdit"] = make_edits
        await client.initialize(project)
        uri = client.open(file)
        (action,) = await client.actions(uri, 5, only=["refactor.rewrite.drk.fuse"])
        await client.command(action["data"]["command"], **action["data"]["argument"])
        assert "logic checked, speed not measured" in await client.message("apply it")
        messages = [one.get("message", "") for one in client.progress()]
        assert "turn 1/1, best verified, not measured" in messages
        (action,) = await client.actions(uri, 5, only=["refactor.rewrite.drk.apply"])
        assert await client.command("drk.apply", **action["data"]["argument"]) is True
        words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_model_kernels.py"]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        assert " passed" in done.stdout
        client.change(uri, file.read_text(), 2)
        assert await client.command("drk.restore", uri=uri) is True
        assert file.read_text() == MODEL
        assert not (project / "model_kernels.py").exists()
        assert (await client.command("drk.status", uri=uri))["torch_imported"] is False
        assert await client.stop() == 0
    finally:
        await client.close()


@pytest.mark.long
async def test_a_killed_search_is_gone_on_with(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lsp_wire, "WAIT_S", 280.0)
    file, pid = project / "model.py", project.parent / "search.pid"
    file.write_text(MODEL)
    client = await WireClient.start()
    try:
        client.settings = {
            "command": ["sh", "-c", 'echo $$ > "$0"; exec "$@"', str(pid), *OWN_COMMAND],
            "device": "interpret",
            "optimizeArgs": ["--turns", "1", "--samples", "1", "--seeds", "2"],
        }
        await client.initialize(project)
        uri = client.open(file)
        await client.command("drk.optimize", uri=uri, target="Net")
        await client.reported("turn 1/1")
        os.kill(int(pid.read_text()), signal.SIGKILL)
        assert "was killed" in await client.message("go on where it stopped")
        (action,) = await client.actions(uri, 5, only=["refactor.rewrite.drk.resume"])
        assert await client.command("drk.resume", **action["data"]["argument"])
        assert "logic checked, speed not measured" in await client.message("apply it")
        assert len(list((project / ".drk" / "runs").glob("2*"))) == 1
        assert await client.stop() == 0
    finally:
        await client.close()
