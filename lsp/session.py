"""One editor's session: the server object with everything that it remembers, and how it speaks to people.

Memory is small and can be lost: settings by folder, parsed texts by version, rows of profiles, runs' results. What
matters lies in the workspace (``.drk``), so a server that is killed and started anew shows the same.

Several workspace folders are separate: each has settings of its own, and jobs run in the folder that holds the file.
Without a folder (a single file), the file's own counts. In a workspace that the editor calls untrusted nothing is run
or written; stored profiles are shown, since reading them runs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer

from drk.assistant.errors import ConfigError, DrkError
from drk.lsp.documents import path_of, uri_of

if TYPE_CHECKING:
    from drk.lsp.jobs import JobTable
    from drk.lsp.positions import TextMap
    from drk.lsp.profile_store import FileProfile, ProfileStore
    from drk.lsp.settings import LspSettings, ResolvedLsp
    from drk.lsp.suggestions import Suggestion, SuggestionStore

SETTINGS_WAIT_S = 5.0
SHOW_WAIT_S = 10.0


def own_version() -> str:
    """Return the installed version."""
    try:
        return version("drk")
    except PackageNotFoundError:
        return "unknown"


class DrkServer(LanguageServer):
    """The language server with its memory; handlers are in :mod:`drk.lsp.server`."""

    def __init__(self) -> None:
        super().__init__("drk", own_version(), text_document_sync_kind=lsp.TextDocumentSyncKind.Incremental)
        self.trusted = True
        self.initial_settings: Mapping[str, Any] = {}
        self.settings_known = asyncio.Event()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.pending: dict[str, asyncio.Task[Any]] = {}
        self.published: set[str] = set()
        self._settings: dict[Path, ResolvedLsp] = {}
        self._maps: dict[str, tuple[int | None, TextMap]] = {}
        self._runs_dirs: dict[Path, Path] = {}
        self._told: set[str] = set()

    # --- what is imported when first needed (drk.lsp.server) ---------------------------------------------------------

    @cached_property
    def profiles(self) -> ProfileStore:
        """The stored profiles."""
        from drk.lsp.profile_store import ProfileStore

        return ProfileStore()

    @cached_property
    def suggestions(self) -> SuggestionStore:
        """What runs offer."""
        from drk.lsp.suggestions import SuggestionStore

        return SuggestionStore()

    @cached_property
    def jobs(self) -> JobTable:
        """The jobs under way."""
        from drk.lsp.jobs import JobTable

        return JobTable()

    # --- folders and settings ------------------------------------------------------------------------------------

    def folders(self) -> list[Path]:
        """Return the workspace folders."""
        found = [path_of(uri) for uri in self.workspace.folders]
        if not found and self.workspace.root_uri:
            found = [path_of(self.workspace.root_uri)]
        return [path for path in found if path is not None]

    def root_for(self, path: Path) -> Path:
        """Return the innermost workspace folder that holds ``path``, or the file's own folder."""
        holding = [folder for folder in self.folders() if path.is_relative_to(folder)]
        return max(holding, key=lambda folder: len(folder.parts), default=path.parent)

    def settings_for(self, path: Path) -> LspSettings:
        """Return the settings for a file as known so far."""
        return self.resolved_for(path).settings

    def resolved_for(self, path: Path) -> ResolvedLsp:
        """Return the settings for a file with their origins."""
        root = self.root_for(path)
        if root not in self._settings:
            self.take_settings(root, self.initial_settings)
        return self._settings[root]

    def take_settings(self, root: Path, editor: Mapping[str, Any]) -> None:
        """Resolve a folder's settings anew from what the editor says; problems are told once."""
        from drk.lsp.settings import resolve_settings

        resolved = resolve_settings(root, editor)
        self._settings[root] = resolved
        self._runs_dirs.pop(root, None)
        for problem in resolved.problems:
            self.say_once(f"drk settings: {problem}", lsp.MessageType.Warning)

    async def pull_settings(self) -> None:
        """Ask the editor for the section ``drk`` of each folder; without an answer the start-up options hold."""
        self.settings_known.clear()
        roots = self.folders()
        capability = self.client_capabilities.workspace
        try:
            if capability is not None and capability.configuration and roots:
                items = [lsp.ConfigurationItem(scope_uri=uri_of(root), section="drk") for root in roots]
                asked = self.workspace_configuration_async(lsp.ConfigurationParams(items=items))
                answers = await asyncio.wait_for(asked, SETTINGS_WAIT_S)
                for root, answer in zip(roots, answers or [], strict=False):
                    editor = {**self.initial_settings, **(answer if isinstance(answer, dict) else {})}
                    self.take_settings(root, editor)
        except (TimeoutError, JsonRpcException) as error:
            self.log(f"the editor did not tell its settings: {error or 'no answer'}")
        finally:
            self.settings_known.set()

    def forget_settings(self) -> None:
        """Drop resolved settings, so that files are read again."""
        self._settings.clear()
        self._runs_dirs.clear()

    def runs_dirs(self, path: Path) -> list[Path]:
        """Return where runs that concern a file may lie: the configured folder, and ``.drk/runs`` from it upwards."""
        root = self.root_for(path)
        found = [self.own_runs_dir(root)]
        for folder in (path.parent, *path.parent.parents):
            found.append(folder / ".drk" / "runs")
            if folder == root:
                break
        return [folder for folder in dict.fromkeys(found) if folder.is_dir()]

    def own_runs_dir(self, root: Path) -> Path:
        """Return where jobs of a folder keep their runs."""
        from drk.assistant.settings import load_settings

        if root not in self._runs_dirs:
            try:
                self._runs_dirs[root] = load_settings(cwd=root).settings.runs_dir
            except ConfigError as error:
                self.say_once(f"drk settings: {error.message} ({error.file})", lsp.MessageType.Warning)
                self._runs_dirs[root] = root / ".drk" / "runs"
        return self._runs_dirs[root]

    # --- texts, profiles, suggestions ----------------------------------------------------------------------------

    def text_map(self, uri: str) -> TextMap | None:
        """Return the definitions of an open document; of its last text that parsed, where the present one does not."""
        from drk.lsp.positions import TextMap

        document = self.workspace.text_documents.get(uri)
        if document is None:
            return None
        known = self._maps.get(uri)
        if known is None or known[0] != document.version:
            fresh = TextMap(document.source)
            if not fresh.parsed and known is not None:
                return known[1]
            known = (document.version, fresh)
            self._maps[uri] = known
        return known[1]

    def forget_document(self, uri: str) -> None:
        """Drop what is remembered of a document that was closed."""
        self._maps.pop(uri, None)
        task = self.pending.pop(uri, None)
        if task is not None:
            task.cancel()

    def profile_for(self, path: Path) -> FileProfile | None:
        """Return what the newest profile says about a file; why it cannot be read is told once."""
        found = self.profiles.for_file(path)
        problem = self.profiles.problem_for(path) if found is None else ""
        if problem:
            self.say_once(f"drk: {problem}", lsp.MessageType.Warning)
        return found

    def suggestions_for(self, path: Path) -> tuple[Suggestion, ...]:
        """Return what runs offer for a file."""
        return self.suggestions.for_file(path, self.runs_dirs(path))

    def units(self, text: str) -> int:
        """Return the length of a text in the units of this connection."""
        return int(self.workspace.position_codec.client_num_units(text))

    # --- speaking ------------------------------------------------------------------------------------------------

    def say(self, message: str, kind: lsp.MessageType = lsp.MessageType.Info) -> None:
        """Show a message."""
        self.window_show_message(lsp.ShowMessageParams(type=kind, message=message))

    def clear_diagnostics(self, uri: str) -> None:
        """Take a document's diagnostics away."""
        self.published.discard(uri)
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri=uri, diagnostics=[]))

    def say_once(self, message: str, kind: lsp.MessageType) -> None:
        """Show a message unless it was shown before."""
        if message not in self._told:
            self._told.add(message)
            self.say(message, kind)

    def say_error(self, error: DrkError, what: str = "") -> None:
        """Show an error with its cause and the next step."""
        self.say(error_text(error, what), lsp.MessageType.Error)

    async def show_document(self, path: Path, *, external: bool) -> None:
        """Open a file in the editor, or outside of it; a message with the path where the client cannot."""
        window = self.client_capabilities.window
        shown = False
        if window is not None and window.show_document is not None and window.show_document.support:
            params = lsp.ShowDocumentParams(uri=uri_of(path), external=external, take_focus=True)
            with contextlib.suppress(TimeoutError, JsonRpcException):
                result = await asyncio.wait_for(self.window_show_document_async(params), SHOW_WAIT_S)
                shown = result.success
        if not shown:
            self.say(f"drk: {path}")

    def log(self, message: str) -> None:
        """Write to the editor's log."""
        self.window_log_message(lsp.LogMessageParams(type=lsp.MessageType.Log, message=message))

    def run_task(self, work: Any) -> None:
        """Run a coroutine in the background; a fault in it is told, not lost."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            with contextlib.suppress(BrokenPipeError):  # the editor is gone
                self.log(f"fault: {type(fault).__name__}: {fault}")
                self.say(f"drk failed, by a fault of its own: {fault}", lsp.MessageType.Error)


def error_text(error: DrkError, what: str = "") -> str:
    """Return an error as one paragraph: what, why, what next."""
    where = f" ({os.path.basename(error.file)}{f':{error.line}' if error.line else ''})" if error.file else ""  # noqa: PTH119
    parts = [f"drk: {what + ': ' if what else ''}{error.message}{where}"]
    parts += [text for text in (error.cause.splitlines()[0] if error.cause else "", error.help) if text]
    return ". ".join(part.rstrip(".") for part in parts) + "."
