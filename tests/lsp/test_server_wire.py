"""The real server over raw messages: what must hold whatever the client, the user and the machine do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from lsp_parts import MODEL, call_of, edited, make_run, store_profile, titles
from lsp_wire import FULL, SERVER, WireClient, WireError

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLASS_LINE = MODEL.splitlines().index("class Net(nn.Module):")
BLOCK_LINE = MODEL.splitlines().index("class Block(nn.Module):")


async def test_opening_editing_and_closing_runs_nothing_and_imports_no_torch(start: Any, project: Path) -> None:
    marker = project / "was-imported"
    text = f"{MODEL}\nopen({str(marker)!r}, 'w').close()\nraise SystemExit(3)\n"
    (project / "model.py").write_text(text)
    store_profile(project / "model.py")
    client = await start(project)
    uri = client.open(project / "model.py")
    assert len(await client.diagnostics(uri)) >= 3
    client.change(uri, text + "\n# more\n", 2)
    await client.actions(uri, CLASS_LINE)
    await client.request("textDocument/codeLens", {"textDocument": {"uri": uri}})
    await client.request("textDocument/hover", {"textDocument": {"uri": uri}, "position": {"line": 5, "character": 1}})
    client.notify("textDocument/didSave", {"textDocument": {"uri": uri}})
    told = await client.command("drk.status", uri=uri)
    client.notify("textDocument/didClose", {"textDocument": {"uri": uri}})
    assert told["torch_imported"] is False
    assert told["jobs"] == []
    assert await client.stop() == 0
    assert not marker.exists()


async def test_diagnostics_follow_the_text(client_in: Any, project: Path) -> None:
    store_profile(project / "model.py")
    client = await client_in(project)
    uri = client.open(project / "model.py")
    first = {one["code"]: one for one in await client.diagnostics(uri)}
    assert set(first) == {"hotspot", "memory-bound", "launch-bound", "fusable"}
    block = first["memory-bound"]
    assert block["range"]["start"]["line"] == BLOCK_LINE
    assert "70 % of GPU time" in block["message"]
    assert "in 2 modules" in block["message"]
    assert block["severity"] == 3
    since = len(client.seen)
    client.change(uri, "# one line\n" + MODEL.replace("* 2.0", "* 3.0"), 2)
    later = {one["code"]: one for one in await client.diagnostics(uri, since, version=2)}
    assert set(later) == {"hotspot", "stale"}
    assert later["hotspot"]["range"]["start"]["line"] == CLASS_LINE + 1
    assert later["stale"]["severity"] == 4
    since = len(client.seen)
    client.change(uri, "class Net(:\n" + MODEL, 3)
    await asyncio.sleep(1)  # a text that does not parse keeps its diagnostics: nothing is sent
    assert not [one for one in client.seen[since:] if one.get("method") == "textDocument/publishDiagnostics"]
    client.change(uri, "x = 1\n", 4)
    assert await client.diagnostics(uri, since, version=4) == []


async def test_a_search_from_click_to_restore(client_in: Any, project: Path, scripted: Any) -> None:
    file = project / "model.py"
    client = await client_in(project, {"command": scripted("win")})
    applied: list[Any] = []
    client.answers["workspace/applyEdit"] = lambda params: applied.append(params) or {"applied": True}
    uri = client.open(file)
    (action,) = await client.actions(uri, CLASS_LINE, only=["refactor.rewrite.drk.fuse"])
    assert "command" not in action
    command = (await client.request("codeAction/resolve", action))["command"]
    job = await client.request("workspace/executeCommand", {k: command[k] for k in ("command", "arguments")})
    assert job.startswith("job-")
    assert "1.40x over compile" in await client.message("apply it")
    values = client.progress()
    assert (values[0]["kind"], values[-1]["kind"]) == ("begin", "end")
    assert [one["kind"] for one in values].count("end") == 1
    assert "turn 1/2, best 1.50x over compile" in [one.get("message") for one in values]
    found = await client.actions(uri, CLASS_LINE, only=["refactor.rewrite.drk.apply"])
    assert titles(found) == ["drk: apply kernels to Net (1.40x over compile)"]
    assert await client.command(**call_of(found[0])) is True
    assert applied[0]["metadata"] == {"isRefactoring": True}
    changes = applied[0]["edit"]["documentChanges"]
    assert [one.get("kind", "edit") for one in changes] == ["create", "edit", "create", "edit", "edit"]
    assert changes[-1]["textDocument"] == {"uri": uri, "version": 1}
    assert (project / ".drk" / "applied" / "model.py.json").exists()
    text = edited(MODEL, changes[-1]["edits"])
    assert "@optimized\nclass Net" in text
    for change in changes[1:4:2]:
        saved = change["edits"][0]["newText"] + "\n"  # some editors end a new file with an empty line
        Path(change["textDocument"]["uri"].removeprefix("file://")).write_text(saved)
    file.write_text(text)
    client.change(uri, text, 2)
    (taken,) = await client.actions(uri, CLASS_LINE, only=["refactor.rewrite.drk.restore"])
    assert await client.command(**call_of(taken)) is True
    changes = applied[1]["edit"]["documentChanges"]
    assert edited(text, changes[0]["edits"]) == MODEL
    assert {one["kind"] for one in changes[1:]} == {"delete"}
    assert not (project / ".drk" / "applied" / "model.py.json").exists()


async def test_two_editors_on_one_workspace(start: Any, project: Path, scripted: Any) -> None:
    file = project / "model.py"
    one, two = await start(project), await start(project)
    uri = one.open(file)
    two.open(file)
    make_run(file)  # what one of them, or a terminal, has found
    name = "drk: apply kernels to Net (1.40x over compile)"
    assert name in titles(await two.actions(uri, CLASS_LINE))
    one.answers["workspace/applyEdit"] = lambda _: {"applied": True}
    assert await one.command("drk.apply", uri=uri) is True
    file.write_text(
        MODEL.replace("from torch import nn\n", "from torch import nn\nfrom model_kernels import optimized\n")
    )
    for command in ("drk.apply", "drk.restore"):
        since = len(two.seen)
        assert await two.command(command, uri=uri) is None
        assert "reload it from disk" in await two.message("this text is older", since)
    assert (project / ".drk" / "applied" / "model.py.json").exists()


async def test_an_untrusted_workspace_shows_and_does_nothing(start: Any, project: Path, scripted: Any) -> None:
    make_run(project / "model.py")
    store_profile(project / "model.py")
    client = await start(project, {"command": scripted("win")}, trusted=False)
    uri = client.open(project / "model.py")
    assert await client.diagnostics(uri)
    for command in ("drk.optimize", "drk.apply", "drk.restore", "drk.profile", "drk.resume", "drk.openReport"):
        since = len(client.seen)
        assert await client.command(command, uri=uri) is None
        await client.message("not trusted", since)
    client.notify("drk/trusted", {})
    await client.command("drk.optimize", uri=uri, target="Net")
    await client.message("apply it")


async def test_settings_come_with_their_origin_and_folders_are_apart(start: Any, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "model.py").write_text(MODEL)
        store_profile(folder / "model.py")
    (two / "drk.toml").write_text("[lsp]\nmin-share = 0.9\ncommand = ['evil']\n")
    client = await start(one)
    uris = [client.open(folder / "model.py") for folder in (one, two)]
    added = {"added": [{"uri": two.as_uri(), "name": "two"}], "removed": []}
    client.notify("workspace/didChangeWorkspaceFolders", {"event": added})
    await client.message("a project's file cannot set command")
    told = [await client.command("drk.status", uri=uri) for uri in uris]
    rows = [{row["name"]: row for row in one["settings"]} for one in told]
    assert rows[0]["minShare"] == {"name": "minShare", "value": 0.05, "origin": "default"}
    assert rows[1]["minShare"] == {"name": "minShare", "value": 0.9, "origin": str(two / "drk.toml")}
    assert rows[1]["command"]["value"] == []
    since = len(client.seen)
    client.notify("workspace/didChangeConfiguration", {"settings": None})
    assert len(await client.diagnostics(uris[1], since)) == 2  # above 0.9, and fusable


async def test_malformed_requests_are_answered_and_survived(client_in: Any, project: Path) -> None:
    client = await client_in(project)
    uri = client.open(project / "model.py")
    for params in (
        {"command": "drk.optimize", "arguments": []},
        {"command": "drk.optimize", "arguments": ["text"]},
        {"command": "drk.optimize", "arguments": [{"uri": 5}]},
        {"command": "drk.nothing", "arguments": [{}]},
    ):
        with pytest.raises(WireError):
            await client.request("workspace/executeCommand", params)
    forged = {"title": "x", "data": {"command": "rm", "argument": {}}}
    assert "command" not in await client.request("codeAction/resolve", forged)
    for strange in ("untitled:Untitled-1", "file:///nowhere/at/all.py", "vscode-notebook-cell:/a#1"):
        assert await client.command("drk.optimize", uri=strange) is None
    client.notify("textDocument/didOpen", {"nonsense": True})
    client.notify("drk/unknown", {})
    assert (await client.command("drk.status", uri=uri))["jobs"] == []
    assert await client.command("drk.cancel", job="job-99") is False


async def test_tcp_serves_one_editor_of_this_machine(project: Path) -> None:
    process = await asyncio.create_subprocess_exec(*SERVER, "--tcp", "0", stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    port = 0
    while not port:
        line = (await process.stderr.readline()).decode()
        port = int(line.rpartition(",")[2].strip(" )\n")) if "Serving on" in line else 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = WireClient(reader, writer, None)
    assert "codeActionProvider" in await client.initialize(project, FULL)
    await client.request("shutdown", None)
    client.notify("exit", None)
    assert await asyncio.wait_for(process.wait(), 60) == 0
    await client.close()
    await writer.wait_closed()
