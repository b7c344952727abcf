"""Edits that the real server asks for: refused, overtaken by the user, read-only, unparsed, by plain clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lsp_parts import MODEL, edited, files_in, make_edit, make_run

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLASS_LINE = MODEL.splitlines().index("class Net(nn.Module):")
BLOCK_LINE = MODEL.splitlines().index("class Block(nn.Module):")


async def test_an_edit_that_the_editor_refuses_changes_nothing(client_in: Any, project: Path) -> None:
    make_run(project / "model.py")
    client = await client_in(project)
    client.answers["workspace/applyEdit"] = lambda _: {"applied": False, "failureReason": "busy"}
    uri = client.open(project / "model.py")
    before = files_in(project)
    assert await client.command("drk.apply", uri=uri) is False
    assert "(busy)" in await client.message("did not make the edit")
    assert files_in(project) == before
    del client.answers["workspace/applyEdit"]
    assert await client.command("drk.apply", uri=uri) is False
    assert files_in(project) == before


async def test_a_restore_that_the_editor_refuses_changes_nothing(client_in: Any, project: Path) -> None:
    file = project / "model.py"
    make_run(file)
    client = await client_in(project)
    applied: list[Any] = []
    client.answers["workspace/applyEdit"] = lambda params: applied.append(params) or {"applied": True}
    uri = client.open(file)
    assert await client.command("drk.apply", uri=uri) is True
    make_edit(applied[0])
    client.change(uri, file.read_text(), 2)
    before = files_in(project)
    client.answers["workspace/applyEdit"] = lambda _: {"applied": False, "failureReason": "busy"}
    assert await client.command("drk.restore", uri=uri) is False
    await client.message("did not make the edit of model.py (busy)")
    assert files_in(project) == before >= {"model_kernels.py", ".drk/applied/model.py.json"}


async def test_a_text_that_changed_is_followed_or_refused(client_in: Any, project: Path) -> None:
    make_run(project / "model.py")
    client = await client_in(project)
    applied: list[Any] = []
    client.answers["workspace/applyEdit"] = lambda params: applied.append(params) or {"applied": True}
    uri = client.open(project / "model.py")
    client.change(uri, MODEL.replace("* 2.0", "* 3.0"), 2)
    assert await client.command("drk.apply", uri=uri) is None
    assert "run drk optimize again" in await client.message("changed since it was optimised")
    assert applied == []
    moved = MODEL.replace("import torch\n", "# moved\nimport torch\n", 1)
    client.change(uri, moved, 3)
    assert await client.command("drk.apply", uri=uri) is True
    change = applied[0]["edit"]["documentChanges"][-1]
    assert change["textDocument"]["version"] == 3
    assert "@optimized\nclass Net" in edited(moved, change["edits"])


@pytest.mark.parametrize(("place", "word"), [("model.py", "is read-only"), (".", "lies in a read-only folder")])
async def test_a_read_only_file_is_refused(client_in: Any, project: Path, place: str, word: str) -> None:
    make_run(project / "model.py")
    mode = (project / place).stat().st_mode
    (project / place).chmod(mode & ~0o222)
    client = await client_in(project)
    uri = client.open(project / "model.py")
    before = files_in(project)
    for command in ("drk.apply", "drk.restore"):
        since = len(client.seen)
        assert await client.command(command, uri=uri) is None
        assert "make it writable" in await client.message(word, since)
    assert files_in(project) == before
    (project / place).chmod(mode)


@pytest.mark.parametrize("command", ["drk.optimize", "drk.profile"])
async def test_unsaved_and_broken_texts_are_not_run(client_in: Any, project: Path, scripted: Any, command: str) -> None:
    client = await client_in(project, {"command": scripted("win")})
    uri = client.open(project / "model.py")
    client.change(uri, MODEL + "# more\n", 2)
    assert await client.command(command, uri=uri, target="Net") is None
    assert "save it" in await client.message("changes that are not saved")
    broken = MODEL + "def (:\n"
    (project / "model.py").write_text(broken)
    client.change(uri, broken, 3)
    assert await client.command(command, uri=uri, target="Net") is None
    assert f"model.py:{len(broken.splitlines())}" in await client.message("not valid Python")
    assert (await client.command("drk.status", uri=uri))["jobs"] == []


async def test_a_text_that_does_not_parse_gets_no_kernels_and_loses_none(client_in: Any, project: Path) -> None:
    file = project / "model.py"
    make_run(file)
    client = await client_in(project)
    applied: list[Any] = []
    client.answers["workspace/applyEdit"] = lambda params: applied.append(params) or {"applied": True}
    uri = client.open(file)
    client.change(uri, MODEL + "def (:\n", 2)
    assert await client.command("drk.apply", uri=uri) is None
    await client.message("changed since it was optimised")
    assert applied == []
    client.change(uri, MODEL, 3)
    assert await client.command("drk.apply", uri=uri) is True
    text = edited(MODEL, applied[0]["edit"]["documentChanges"][-1]["edits"])
    file.write_text(text)
    client.change(uri, text + "def (:\n", 4)
    assert await client.command("drk.restore", uri=uri) is True
    change = applied[1]["edit"]["documentChanges"][0]
    assert change["textDocument"]["version"] == 4
    assert edited(text + "def (:\n", change["edits"]) == MODEL + "def (:\n"


async def test_a_client_without_any_capability_gets_plain_edits_and_written_files(start: Any, project: Path) -> None:
    make_run(project / "model.py")
    client = await start(project, capabilities={})
    applied: list[Any] = []
    client.answers["workspace/applyEdit"] = lambda params: applied.append(params) or {"applied": True}
    uri = client.open(project / "model.py")
    (action,) = await client.actions(uri, CLASS_LINE, only=["refactor.rewrite.drk.apply"])
    assert action["command"]["command"] == "drk.apply"
    assert await client.command("drk.apply", uri=uri) is True
    assert list(applied[0]["edit"]["changes"]) == [uri]
    assert {"model_kernels.py", "test_model_kernels.py"} <= files_in(project)
