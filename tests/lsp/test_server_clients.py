"""The server under the capabilities that Neovim, VS Code and Emacs announce, driven by pytest-lsp."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import lsp_parts
import pytest
import pytest_lsp
from lsp_wire import SERVER
from lsprotocol import types as lsp
from pytest_lsp import ClientServerConfig, LanguageClient, client_capabilities

WAIT_S = 120.0
CLIENTS = {"neovim": "neovim", "vscode": "visual_studio_code", "emacs": "emacs"}
CLASS_LINE = lsp_parts.MODEL.splitlines().index("class Net(nn.Module):")


@pytest.fixture(params=list(CLIENTS))
def editor(request: pytest.FixtureRequest) -> str:
    """The name of an editor."""
    return str(request.param)


@pytest_lsp.fixture(config=ClientServerConfig(server_command=SERVER))
async def client(lsp_client: LanguageClient, editor: str, tmp_path: Path) -> AsyncIterator[None]:
    """A session as that editor opens one, on a folder with a profile; edits are accepted and kept."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(lsp_parts.MODEL)
    lsp_parts.store_profile(folder / "model.py")
    script = Path(lsp_parts.__file__).parent / "scripted_drk.py"
    lsp_client.set_configuration({"drk": {"command": [sys.executable, str(script), "win"]}})
    lsp_client.edits = []  # type: ignore[attr-defined]

    @lsp_client.feature(lsp.WORKSPACE_APPLY_EDIT)
    def on_edit(params: lsp.ApplyWorkspaceEditParams) -> lsp.ApplyWorkspaceEditResult:
        lsp_client.edits.append(params)  # type: ignore[attr-defined]
        return lsp.ApplyWorkspaceEditResult(applied=True)

    @lsp_client.feature(lsp.WORKSPACE_CODE_LENS_REFRESH)
    def on_lenses(_: None) -> None:
        return None

    @lsp_client.feature(lsp.WORKSPACE_INLAY_HINT_REFRESH)
    def on_hints(_: None) -> None:
        return None

    await lsp_client.initialize_session(
        lsp.InitializeParams(
            capabilities=client_capabilities(CLIENTS[editor]),
            workspace_folders=[lsp.WorkspaceFolder(uri=folder.as_uri(), name="project")],
        )
    )
    yield
    await lsp_client.shutdown_session()


async def until(ready: Callable[[], Any]) -> Any:
    """Return what ``ready`` returns once it is true."""
    async with asyncio.timeout(WAIT_S):
        while not (found := ready()):
            await asyncio.sleep(0.05)
    return found


async def test_diagnostics_search_and_apply(client: LanguageClient, editor: str, tmp_path: Path) -> None:
    file = tmp_path / "project" / "model.py"
    uri = file.as_uri()
    item = lsp.TextDocumentItem(uri=uri, language_id="python", version=1, text=file.read_text())
    client.text_document_did_open(lsp.DidOpenTextDocumentParams(text_document=item))
    found = await until(lambda: client.diagnostics.get(uri))
    assert {one.code for one in found} == {"hotspot", "memory-bound", "launch-bound", "fusable"}
    linked = [one for one in found if one.code_description is not None]
    assert bool(linked) == (editor == "vscode")
    about = lsp.TextDocumentIdentifier(uri=uri)
    lenses = await client.text_document_code_lens_async(lsp.CodeLensParams(text_document=about))
    assert "98 % of GPU time · find faster kernels" in [one.command.title for one in lenses]
    everything = lsp.Range(start=lsp.Position(line=0, character=0), end=lsp.Position(line=99, character=0))
    hints = await client.text_document_inlay_hint_async(lsp.InlayHintParams(text_document=about, range=everything))
    assert "98 us, 98 %" in [one.label for one in hints]
    at = lsp.Position(line=CLASS_LINE, character=8)
    shown = await client.text_document_hover_async(lsp.HoverParams(text_document=about, position=at))
    assert "| `void gemm<float, '32/x'>` | 20 | 500 us | 50 % |" in shown.contents.value
    await client.workspace_execute_command_async(
        lsp.ExecuteCommandParams(command="drk.optimize", arguments=[{"uri": uri, "target": "Net"}])
    )
    await until(lambda: [one for one in client.messages if "apply it" in one.message])
    kinds = [type(one).__name__ for reports in client.progress_reports.values() for one in reports]
    assert (kinds[0], kinds[-1]) == ("WorkDoneProgressBegin", "WorkDoneProgressEnd")
    done = await client.workspace_execute_command_async(
        lsp.ExecuteCommandParams(command="drk.apply", arguments=[{"uri": uri}])
    )
    assert done is True
    (params,) = client.edits  # type: ignore[attr-defined]
    assert params.metadata is None  # none of the three knows it here, and eglot refuses what it does not know
    changes = params.edit.document_changes
    assert changes[-1].text_document.version == 1
    creates = [one for one in changes if isinstance(one, lsp.CreateFile)]
    assert len(creates) == (0 if editor == "emacs" else 2)
    assert (file.parent / "model_kernels.py").exists() == (editor == "emacs")
