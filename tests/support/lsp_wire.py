"""A language client of a few lines: raw JSON-RPC over pipes or a socket, so that faults can be sent and seen.

Requests of the server are answered by ``answers`` (method -> function of the params), or refused as unknown. Every
message is kept in ``seen``, in order of arrival.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_S = 120.0
SERVER = [sys.executable, "-P", "-c", "from drk.assistant.cli import main; main()", "lsp"]
NOTHING: dict[str, Any] = {}
FULL: dict[str, Any] = {
    "workspace": {
        "applyEdit": True,
        "workspaceEdit": {
            "documentChanges": True,
            "resourceOperations": ["create", "rename", "delete"],
            "metadataSupport": True,
        },
        "configuration": True,
        "workspaceFolders": True,
    },
    "window": {"workDoneProgress": True, "showDocument": {"support": True}},
    "textDocument": {
        "codeAction": {"resolveSupport": {"properties": ["edit", "command"]}, "dataSupport": True},
        "publishDiagnostics": {"codeDescriptionSupport": True, "versionSupport": True},
    },
}


class WireClient:
    """Speaks to one server process."""

    def __init__(self, reader: asyncio.StreamReader, writer: Any, process: asyncio.subprocess.Process | None) -> None:
        self.process = process
        self.seen: list[dict[str, Any]] = []
        self.answers: dict[str, Callable[[Any], Any]] = {
            "window/workDoneProgress/create": lambda _: None,
            "client/registerCapability": lambda _: None,
            "workspace/configuration": lambda params: [self.settings_of(one) for one in params["items"]],
            "window/showDocument": lambda _: {"success": True},
        }
        self.settings: dict[str, Any] = {}
        self.folder_settings: dict[str, dict[str, Any]] = {}
        self._reader, self._writer = reader, writer
        self._ids = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._arrived = asyncio.Condition()
        self._pump = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, argv: list[str] | None = None, **options: Any) -> WireClient:
        """Start a server process and speak to it over its pipes."""
        process = await asyncio.create_subprocess_exec(
            *(argv or SERVER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, **options
        )
        assert process.stdout is not None
        return cls(process.stdout, process.stdin, process)

    def settings_of(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return what this editor is set to for a folder."""
        return self.folder_settings.get(item.get("scopeUri") or "", self.settings)

    def move(self, gone: Path | None, folder: Path | None, settings: dict[str, Any] | None = None) -> None:
        """Leave one workspace folder and enter another, with settings of its own."""
        if folder is not None:
            self.folder_settings[folder.as_uri()] = settings or {}
        about = ([{"uri": one.as_uri(), "name": one.name}] if one is not None else [] for one in (folder, gone))
        added, removed = about
        self.notify("workspace/didChangeWorkspaceFolders", {"event": {"added": added, "removed": removed}})

    async def initialize(
        self, root: Path | None, capabilities: dict[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Do the handshake and return the server's capabilities."""
        folders = None if root is None else [{"uri": root.as_uri(), "name": root.name}]
        params = {
            "processId": None,
            "rootUri": None if root is None else root.as_uri(),
            "workspaceFolders": folders,
            "capabilities": FULL if capabilities is None else capabilities,
            "initializationOptions": options,
        }
        result = await self.request("initialize", params)
        self.notify("initialized", {})
        return dict(result["capabilities"])

    async def request(self, method: str, params: Any) -> Any:
        """Send a request and return its result.

        Raises:
            WireError: the server answered with an error.
        """
        self._ids += 1
        future = asyncio.get_running_loop().create_future()
        self._waiting[self._ids] = future
        self.send({"jsonrpc": "2.0", "id": self._ids, "method": method, "params": params})
        answer = await asyncio.wait_for(future, WAIT_S)
        if "error" in answer:
            raise WireError(answer["error"])
        return answer.get("result")

    def notify(self, method: str, params: Any) -> None:
        """Send a notification."""
        self.send({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, message: Any) -> None:
        """Send anything."""
        body = json.dumps(message).encode()
        self._writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def open(self, path: Path, text: str | None = None, version: int = 1) -> str:
        """Open a document; ``text`` is what the editor shows, by default the file. Returns the URI."""
        text = path.read_bytes().decode() if text is None else text
        document = {"uri": path.as_uri(), "languageId": "python", "version": version, "text": text}
        self.notify("textDocument/didOpen", {"textDocument": document})
        return path.as_uri()

    def change(self, uri: str, text: str, version: int) -> None:
        """Replace a document's text."""
        about = {"uri": uri, "version": version}
        self.notify("textDocument/didChange", {"textDocument": about, "contentChanges": [{"text": text}]})

    async def command(self, name: str, **argument: Any) -> Any:
        """Execute a command."""
        return await self.request("workspace/executeCommand", {"command": name, "arguments": [argument]})

    async def until(self, found: Callable[[dict[str, Any]], bool], since: int = 0) -> dict[str, Any]:
        """Return the first message (from number ``since``) that ``found`` accepts, once it has arrived."""

        def hit() -> dict[str, Any] | None:
            return next((one for one in self.seen[since:] if found(one)), None)

        async with self._arrived:
            await asyncio.wait_for(self._arrived.wait_for(lambda: hit() is not None), WAIT_S)
        return hit() or {}

    async def message(self, word: str, since: int = 0) -> str:
        """Return the first shown message that holds ``word``."""
        one = await self.until(
            lambda m: m.get("method") == "window/showMessage" and word in m["params"]["message"], since
        )
        return str(one["params"]["message"])

    async def diagnostics(self, uri: str, since: int = 0, version: int | None = None) -> list[dict[str, Any]]:
        """Return the next diagnostics of a document, or those of a version."""

        def ours(one: dict[str, Any]) -> bool:
            if one.get("method") != "textDocument/publishDiagnostics" or one["params"]["uri"] != uri:
                return False
            return version is None or one["params"].get("version") == version

        return list((await self.until(ours, since))["params"]["diagnostics"])

    async def actions(self, uri: str, line: int, only: list[str] | None = None, **context: Any) -> list[dict[str, Any]]:
        """Return the code actions of a line."""
        place = {"line": line, "character": 0}
        params = {"textDocument": {"uri": uri}, "range": {"start": place, "end": place}}
        asked = {"diagnostics": [], **({"only": only} if only else {}), **context}
        return list(await self.request("textDocument/codeAction", {**params, "context": asked}) or [])

    async def reported(self, word: str) -> dict[str, Any]:
        """Return the params of the first progress notification whose message holds ``word``."""
        one = await self.until(
            lambda m: m.get("method") == "$/progress" and word in str(m["params"]["value"].get("message"))
        )
        return dict(one["params"])

    def progress(self) -> list[dict[str, Any]]:
        """Return the values of all progress notifications so far."""
        return [one["params"]["value"] for one in self.seen if one.get("method") == "$/progress"]

    def hang_up(self) -> None:
        """Close the server's input, as the end of the editor's process does."""
        self._writer.close()

    async def stop(self) -> int | None:
        """Shut the server down and return its exit code."""
        if self.process is not None and self.process.returncode is None:
            await self.request("shutdown", None)
            self.notify("exit", None)
            await asyncio.wait_for(self.process.wait(), WAIT_S)
        await self.close()
        return self.process.returncode if self.process is not None else None

    async def close(self) -> None:
        """End the server however it can be ended."""
        self._pump.cancel()
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self._writer.close()
        if self.process is not None:
            self.process._transport.close()  # type: ignore[attr-defined]

    async def _read(self) -> None:
        while header := await self._reader.readline():
            size = int(header.split(b":")[1])
            while (await self._reader.readline()).strip():
                pass
            message = json.loads(await self._reader.readexactly(size))
            self._take(message)
            async with self._arrived:
                self.seen.append(message)
                self._arrived.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            future = self._waiting.pop(message.get("id") or 0, None)
            if future is not None and not future.done():
                future.set_result(message)
        elif "id" in message:
            answer = self.answers.get(message["method"])
            if answer is None:
                refusal = {"code": -32601, "message": "not supported"}
                self.send({"jsonrpc": "2.0", "id": message["id"], "error": refusal})
                return
            try:
                self.send({"jsonrpc": "2.0", "id": message["id"], "result": answer(message.get("params"))})
            except WireError as error:
                self.send({"jsonrpc": "2.0", "id": message["id"], "error": error.args[0]})


class WireError(Exception):
    """An error answer."""
