"""Planned edits (:mod:`drk.assistant.apply`) as edits of the editor's workspace, and carrying them out safely.

The same code that ``drk apply`` and ``drk restore`` use decides what changes; here it becomes whole-line edits of the
buffer as it is now, guarded by its version, with the kernels' files created in the same edit, so that one undo takes
all of it back. A client that cannot create files gets them written by the server, before the edit.

Order matters: the note that lets ``drk restore`` undo is written first, then the client is asked, and a refusal takes
back the note and what the server wrote. Nothing of the user's is written here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from drk.assistant.apply import PlannedApply, PlannedRestore, applied_run, forget_apply, record_apply
from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import TargetError
from drk.assistant.source_edit import read_source
from drk.lsp.documents import SourceView, open_uri, path_of, uri_of
from drk.lsp.positions import text_edits

if TYPE_CHECKING:
    from drk.lsp.session import DrkServer

ANSWER_LIMIT_S = 600.0
"""How long an editor may take to say whether it made an edit; some ask the user."""

Change = lsp.TextDocumentEdit | lsp.CreateFile | lsp.RenameFile | lsp.DeleteFile


@dataclass(frozen=True)
class Answer:
    """Whether the client made the edit, and its reason when not."""

    applied: bool
    reason: str = ""


def can(server: DrkServer, operation: lsp.ResourceOperationKind) -> bool:
    """Say whether the client takes a resource operation in an edit."""
    workspace = server.client_capabilities.workspace
    edits = workspace.workspace_edit if workspace is not None else None
    return edits is not None and operation in (edits.resource_operations or ())


async def make_apply(server: DrkServer, view: SourceView, plan: PlannedApply) -> Answer:
    """Have the client make ``plan``; the note for ``drk restore`` stands exactly when it did.

    Raises:
        UsageError, TargetError: the note cannot be written, or another artefact is applied.
    """
    had_note = applied_run(plan.file) is not None
    record_apply(plan)
    written: list[Path] = []
    answer = Answer(False, "the edit did not come to an end")
    try:
        changes: list[Change] = []
        for path, data in plan.contents.items():
            if can(server, lsp.ResourceOperationKind.Create):
                changes += _file_changes(server, path, data)
            elif not path.exists() or path.read_bytes() != data:
                fresh = not path.exists()
                write_atomically(path, data)
                written += [path] if fresh else []
        changes.append(_text_change(server, view, plan.edited))
        answer = await _send(server, f"drk: apply kernels to {plan.file.name}", changes)
    except OSError as error:
        raise TargetError(f"cannot write beside {plan.file.name}", file=str(plan.file), cause=str(error)) from error
    finally:
        if not answer.applied:
            for path in written:
                path.unlink(missing_ok=True)
            if not had_note:
                forget_apply(plan.file)
    return answer


async def make_restore(server: DrkServer, view: SourceView, plan: PlannedRestore) -> Answer:
    """Have the client take drk's edit back; files that are still drk's own are removed, the note last."""
    changes: list[Change] = []
    if plan.restored != plan.before:
        changes.append(_text_change(server, view, plan.restored))
    by_client = can(server, lsp.ResourceOperationKind.Delete)
    if by_client:
        options = lsp.DeleteFileOptions(ignore_if_not_exists=True)
        changes += [lsp.DeleteFile(uri=open_uri(server, uri_of(path)), options=options) for path in plan.removable]
    answer = await _send(server, f"drk: take the kernels out of {plan.file.name}", changes) if changes else Answer(True)
    if answer.applied:
        for path in () if by_client else plan.removable:
            with contextlib.suppress(OSError):
                path.unlink()
        forget_apply(plan.file)
    return answer


def _text_change(server: DrkServer, view: SourceView, after: bytes) -> lsp.TextDocumentEdit:
    """Return the edit of a buffer as it is now; its version makes the client refuse it on another one."""
    text = "".join(read_source(after, view.path.name).lines)
    return lsp.TextDocumentEdit(
        text_document=lsp.OptionalVersionedTextDocumentIdentifier(uri=view.uri, version=view.version),
        edits=list(text_edits(view.text, text, server.units)),
    )


def _file_changes(server: DrkServer, path: Path, data: bytes) -> list[Change]:
    """Return what makes ``path`` hold ``data``: nothing, an edit of the older one, or a new file."""
    uri = open_uri(server, uri_of(path))
    text = data.decode("utf-8")
    document = server.workspace.text_documents.get(uri)
    now = document.source if document is not None else _read_text(path)
    if now == text and path.exists():
        return []
    if now is not None:
        version = document.version if document is not None else None
        target = lsp.OptionalVersionedTextDocumentIdentifier(uri=uri, version=version)
        return [lsp.TextDocumentEdit(text_document=target, edits=list(text_edits(now, text, server.units)))]
    start = lsp.Position(line=0, character=0)
    fill = lsp.TextEdit(range=lsp.Range(start=start, end=start), new_text=text)
    target = lsp.OptionalVersionedTextDocumentIdentifier(uri=uri, version=None)
    return [
        lsp.CreateFile(uri=uri, options=lsp.CreateFileOptions(ignore_if_exists=True)),
        lsp.TextDocumentEdit(text_document=target, edits=[fill]),
    ]


def _read_text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


async def _send(server: DrkServer, label: str, changes: list[Change]) -> Answer:
    workspace = server.client_capabilities.workspace
    wanted = workspace.workspace_edit if workspace is not None else None
    if wanted is not None and (wanted.document_changes or wanted.resource_operations):
        edit = lsp.WorkspaceEdit(document_changes=changes)
    else:  # an old client: plain edits, whose version only the server has checked
        plain = {one.text_document.uri: list(one.edits) for one in changes if isinstance(one, lsp.TextDocumentEdit)}
        edit = lsp.WorkspaceEdit(changes=plain)  # type: ignore[arg-type]
    metadata = None
    if wanted is not None and wanted.metadata_support:  # eglot refuses an edit with a field that it does not know
        metadata = lsp.WorkspaceEditMetadata(is_refactoring=True)  # lets VS Code save the files that it edits
    params = lsp.ApplyWorkspaceEditParams(edit=edit, label=label, metadata=metadata)
    try:
        result = await asyncio.wait_for(server.workspace_apply_edit_async(params), ANSWER_LIMIT_S)
    except TimeoutError:
        return Answer(False, "the editor did not answer")
    except JsonRpcException as error:
        return Answer(False, error.message)
    return Answer(bool(result.applied), result.failure_reason or "")


def unsaved_files(server: DrkServer, paths: list[Path]) -> list[str]:
    """Return the names of files whose text is in the editor only, or not on disk as it should be."""
    found = []
    for uri, document in server.workspace.text_documents.items():
        path = path_of(uri)
        if path in paths and path is not None and _digest_of(path) != _digest(document.source.encode("utf-8")):
            found.append(path.name)
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return ""
