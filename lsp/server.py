"""The language server: which requests are answered, and by what. ``drk lsp`` starts it.

Reads (diagnostics, actions, lenses, hints, hover) are short plain functions over what is stored; everything longer is a
child process. Opening, editing and closing files runs nothing of the user's, and torch is never imported here (tests
hold both). Changes on disk (a run that ended, a new profile, from wherever) are found by looking every
:data:`LOOK_S` seconds, since many clients do not watch folders that begin with a dot.

Most of the start is the protocol's own types, which cannot be had in part. What is behind the features is therefore
imported when it is first needed, by imports inside the handlers: ``initialize`` is answered before (a test holds it).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lsprotocol import types as lsp

from drk.lsp.documents import path_of
from drk.lsp.names import COMMANDS, KINDS
from drk.lsp.session import DrkServer

LOOK_S = 2.0
QUIET_S = 0.25
"""How long a text must rest before its diagnostics are placed anew."""
TRUST = "drk/trusted"
"""Notification of clients whose editor has just been told to trust the workspace."""


def create_server() -> DrkServer:
    """Return a server with every handler registered; start it with ``start_io`` or ``start_tcp``."""
    server = DrkServer()
    _register_lifecycle(server)
    _register_documents(server)
    _register_features(server)
    for name in COMMANDS:
        server.command(name)(_command_handler(server, name))
    return server


def _command_handler(server: DrkServer, name: str) -> Callable[..., Awaitable[Any]]:
    async def handle(*arguments: Any) -> Any:
        from drk.lsp.commands import HANDLERS, guarded

        return await guarded(server, HANDLERS[name], arguments[0] if arguments else {})

    return handle


def _register_lifecycle(server: DrkServer) -> None:
    @server.feature(lsp.INITIALIZE)
    def initialize(params: lsp.InitializeParams) -> None:
        options = params.initialization_options
        options = options if isinstance(options, Mapping) else {}
        server.trusted = options.get("trusted", True) is not False
        settings = options.get("settings")
        server.initial_settings = settings if isinstance(settings, Mapping) else {}

    @server.feature(lsp.INITIALIZED)
    async def initialized(_: lsp.InitializedParams) -> None:
        server.run_task(_look_around(server))
        await server.pull_settings()
        _refresh(server)

    @server.feature(lsp.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def settings_changed(params: lsp.DidChangeConfigurationParams) -> None:
        given = params.settings
        own = given.get("drk") if isinstance(given, Mapping) else None
        if isinstance(own, Mapping):
            server.initial_settings = own
        server.forget_settings()
        await server.pull_settings()
        _refresh(server)

    @server.feature(lsp.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    async def folders_changed(_: lsp.DidChangeWorkspaceFoldersParams) -> None:
        server.forget_settings()
        await server.pull_settings()
        _refresh(server)

    @server.feature(TRUST)
    def trusted(_: Any) -> None:
        server.trusted = True

    @server.feature(lsp.WINDOW_WORK_DONE_PROGRESS_CANCEL)
    def cancel_job(params: lsp.WorkDoneProgressCancelParams) -> None:
        job = server.jobs.find(str(params.token))
        if job is not None:
            job.cancel()


def _register_documents(server: DrkServer) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: lsp.DidOpenTextDocumentParams) -> None:
        _publish(server, params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: lsp.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        waiting = server.pending.pop(uri, None)
        if waiting is not None:
            waiting.cancel()
        server.pending[uri] = asyncio.ensure_future(_publish_when_quiet(server, uri))

    @server.feature(lsp.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: lsp.DidSaveTextDocumentParams) -> None:
        path = path_of(params.text_document.uri)
        if path is not None and path.name in ("drk.toml", "pyproject.toml"):
            server.forget_settings()
            server.run_task(server.pull_settings())
        _publish(server, params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: lsp.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        server.forget_document(uri)
        if uri in server.published:
            server.clear_diagnostics(uri)


def _register_features(server: DrkServer) -> None:
    options = lsp.CodeActionOptions(code_action_kinds=list(KINDS), resolve_provider=True)

    @server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, options)
    def actions(params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        from drk.lsp.actions import code_actions

        return code_actions(server, params)

    @server.feature(lsp.CODE_ACTION_RESOLVE)
    def resolved(action: lsp.CodeAction) -> lsp.CodeAction:
        from drk.lsp.actions import resolve

        return resolve(action)

    @server.feature(lsp.TEXT_DOCUMENT_CODE_LENS, lsp.CodeLensOptions(resolve_provider=False))
    def lenses(params: lsp.CodeLensParams) -> list[lsp.CodeLens]:
        from drk.lsp.annotations import code_lenses

        return code_lenses(server, params.text_document.uri)

    @server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
    def hints(params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
        from drk.lsp.annotations import inlay_hints

        return inlay_hints(server, params.text_document.uri, params.range)

    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hovered(params: lsp.HoverParams) -> lsp.Hover | None:
        from drk.lsp.annotations import hover

        return hover(server, params.text_document.uri, params.position)


async def _publish_when_quiet(server: DrkServer, uri: str) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(QUIET_S)
        server.pending.pop(uri, None)
        _publish(server, uri)


def _publish(server: DrkServer, uri: str) -> None:
    from drk.lsp.diagnostics import publish

    publish(server, uri)


def _refresh(server: DrkServer) -> None:
    from drk.lsp.job_flow import refresh

    refresh(server)


async def _look_around(server: DrkServer) -> None:
    """Refresh when a profile or a run changed on disk."""
    known: object = None
    while True:
        seen = _stamp(server)
        if known is not None and seen != known:
            _refresh(server)
        known = seen
        await asyncio.sleep(LOOK_S)


def _stamp(server: DrkServer) -> object:
    """Return what changes when a profile or a run of an open document's folder does."""
    from drk.lsp.suggestions import runs_stamp

    paths = {path.parent: path for uri in server.workspace.text_documents if (path := path_of(uri)) is not None}
    folders = {folder for path in paths.values() for folder in server.runs_dirs(path)}
    profiles = {server.profiles.stamp(path) for path in paths.values()}
    return (profiles, runs_stamp(sorted(folders)))
