"""A user's project, a client of raw messages, and a scripted ``drk`` command for the tests of the language server."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import lsp_parts
import pytest
import pytest_asyncio
from lsp_wire import WireClient

SUPPORT = Path(lsp_parts.__file__).parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the user's model.py."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.py").write_text(lsp_parts.MODEL)
    return folder


@pytest.fixture
def scripted() -> Callable[[str], list[str]]:
    """The command line of a ``drk`` that does what it is told (tests/support/scripted_drk.py)."""
    return lambda mode: [sys.executable, str(SUPPORT / "scripted_drk.py"), mode]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WireClient]:
    """One server for the tests of a module, since starting one takes a second."""
    home = str(tmp_path_factory.mktemp("home"))
    client = await WireClient.start(env={**os.environ, "XDG_CONFIG_HOME": home, "XDG_CACHE_HOME": home})
    await client.initialize(None)
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client_in(shared_client: WireClient) -> AsyncIterator[Callable[..., Awaitable[WireClient]]]:
    """Enter a folder with the module's server; it is left, with nothing running, when the test ends."""
    entered: list[Path] = []
    usual = dict(shared_client.answers)

    async def enter(folder: Path, settings: dict[str, Any] | None = None) -> WireClient:
        shared_client.seen.clear()
        shared_client.move(None, folder, settings)
        entered.append(folder)
        return shared_client

    yield enter
    shared_client.answers = usual
    for folder in entered:
        for job in (await shared_client.command("drk.status"))["jobs"]:
            await shared_client.command("drk.cancel", job=job["id"])
        for path in folder.rglob("*.py"):
            shared_client.notify("textDocument/didClose", {"textDocument": {"uri": path.as_uri()}})
        shared_client.move(folder, None)


@pytest_asyncio.fixture(loop_scope="module")
async def start() -> AsyncIterator[Callable[..., Awaitable[WireClient]]]:
    """Start real servers; they are stopped, or killed, when the test ends."""
    clients: list[WireClient] = []

    async def begin(root: Path | None, settings: dict[str, Any] | None = None, **options: Any) -> WireClient:
        client = await WireClient.start()
        clients.append(client)
        client.settings = settings or {}
        await client.initialize(root, **options)
        return client

    yield begin
    for client in clients:
        await client.close()
