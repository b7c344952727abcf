"""A user's project, a client of raw messages, and a scripted ``drk`` command for the tests of the language server."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import lsp_parts
import pytest
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


@pytest.fixture
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
