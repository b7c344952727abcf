"""From a file that nobody measured to diagnostics and the report's page, by the real command line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import lsp_parts
import pytest
import pytest_lsp
from lsp_wire import SERVER
from lsprotocol import types as lsp
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

WAIT_S = 280.0


@pytest_lsp.fixture(config=ClientServerConfig(server_command=SERVER))
async def client(lsp_client: LanguageClient, tmp_path: Path) -> AsyncIterator[None]:
    """A session as VS Code opens one, on a folder without a profile."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(lsp_parts.MODEL)
    lsp_client.set_configuration({"drk": {"device": "interpret", "profileArgs": ["--steps", "2"]}})
    for method in (lsp.WORKSPACE_CODE_LENS_REFRESH, lsp.WORKSPACE_INLAY_HINT_REFRESH):
        lsp_client.feature(method)(lambda _: None)
    folders = [lsp.WorkspaceFolder(uri=folder.as_uri(), name="project")]
    capabilities = client_capabilities("visual_studio_code")
    await lsp_client.initialize_session(lsp.InitializeParams(capabilities=capabilities, workspace_folders=folders))
    yield
    await lsp_client.shutdown_session()


async def until(ready: Callable[[], Any]) -> Any:
    """Return what ``ready`` returns once it is true."""
    async with asyncio.timeout(WAIT_S):
        while not (found := ready()):
            await asyncio.sleep(0.05)
    return found


async def file_actions(client: LanguageClient, uri: str) -> dict[str, lsp.CodeAction]:
    """Return the actions that concern the whole file, by kind."""
    start = lsp.Position(line=0, character=0)
    context = lsp.CodeActionContext(diagnostics=[], only=[lsp.CodeActionKind.Source])
    about = lsp.TextDocumentIdentifier(uri=uri)
    params = lsp.CodeActionParams(text_document=about, range=lsp.Range(start=start, end=start), context=context)
    found = await client.text_document_code_action_async(params)
    return {str(one.kind): one for one in found or [] if isinstance(one, lsp.CodeAction)}


async def pick(client: LanguageClient, action: lsp.CodeAction) -> str:
    """Do what an editor does with a picked action; return the job's id."""
    data: Any = action.data
    given = lsp.ExecuteCommandParams(command=data["command"], arguments=[data["argument"]])
    return str(await client.workspace_execute_command_async(given))


def ends(client: LanguageClient) -> list[str | None]:
    """Return the last words of the progress bars that ended."""
    values = [one for reports in client.progress_reports.values() for one in reports]
    return [one.message for one in values if isinstance(one, lsp.WorkDoneProgressEnd)]


@pytest.mark.slow
async def test_profile_diagnostics_and_report(client: LanguageClient, tmp_path: Path) -> None:
    file = tmp_path / "project" / "model.py"
    uri = file.as_uri()
    item = lsp.TextDocumentItem(uri=uri, language_id="python", version=1, text=file.read_text())
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(text_document=item))
    before = await file_actions(client, uri)
    assert list(before) == ["source.drk.profile"]
    assert uri not in client.diagnostics
    assert (await pick(client, before["source.drk.profile"])).startswith("job-")
    found = await until(lambda: client.diagnostics.get(uri))
    lines = {one.message.split(":")[0]: one.range.start.line for one in found if one.code != "fusable"}
    names = lsp_parts.MODEL.splitlines()
    assert lines["Net"] == names.index("class Net(nn.Module):")
    assert lines["Block"] == names.index("class Block(nn.Module):")
    assert all(one.severity == lsp.DiagnosticSeverity.Information for one in found)
    assert "% of CPU time" in found[0].message
    await until(lambda: ends(client))
    assert ends(client) == ["done"]

    at = lsp.Position(line=lines["Net"], character=0)
    context = lsp.CodeActionContext(diagnostics=[], only=["refactor.rewrite.drk.fuse"])
    about = lsp.TextDocumentIdentifier(uri=uri)
    params = lsp.CodeActionParams(text_document=about, range=lsp.Range(start=at, end=at), context=context)
    (search,) = await client.text_document_code_action_async(params) or []
    assert search.data["argument"]["target"] == f"{file}:Net"  # type: ignore[union-attr, index]

    after = await file_actions(client, uri)
    await pick(client, after["source.drk.openReport"])
    (shown,) = await until(lambda: client.shown_documents)
    assert shown.external is True
    page = Path(shown.uri.removeprefix("file://"))
    assert page.parent == tmp_path / "project" / ".drk" / "profiles"
    text = page.read_text()
    assert text.lower().startswith("<!doctype html>")
    assert "Net.first" in text
    status = lsp.ExecuteCommandParams(command="drk.status", arguments=[{"uri": uri}])
    assert (await client.workspace_execute_command_async(status))["torch_imported"] is False
