"""The user's file as editor and disk hold it, and what may be done to it.

A buffer may differ from the file: unsaved edits, or a file that another program changed under it. Jobs read the disk,
edits go to the buffer; each asks here first. Encoding, byte order mark and line ends are those of the file on disk, so
that a text of the editor becomes exactly the bytes that saving it would write.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pygls.uris import from_fs_path, to_fs_path

from drk.assistant.errors import TargetError
from drk.assistant.source_edit import read_source

if TYPE_CHECKING:
    from pygls.lsp.server import LanguageServer


@dataclass(frozen=True)
class SourceView:
    """A file as the editor shows it. ``version`` is null where no editor holds it open; bytes are as saved."""

    uri: str
    path: Path
    version: int | None
    text: str
    data: bytes
    on_disk: bytes | None

    @property
    def unsaved(self) -> bool:
        """Whether buffer and disk differ."""
        return self.data != self.on_disk


def path_of(uri: str) -> Path | None:
    """Return the path of a ``file:`` URI, or None for others (untitled buffers, notebooks' cells, remote files)."""
    name = to_fs_path(uri) if uri.startswith("file:") else None
    return Path(os.path.abspath(name)) if name else None  # noqa: PTH100 - links are kept


def uri_of(path: Path) -> str:
    """Return the ``file:`` URI of a path."""
    return from_fs_path(str(path)) or path.as_uri()


def split_target(target: str) -> tuple[str, str]:
    """Return file and name of ``/a/model.py:Net``, ``/a/model.py`` or ``Net``; either may be empty."""
    if ":" in target:
        file, _, name = target.rpartition(":")
        return file, name
    return (target, "") if target.endswith(".py") else ("", target)


def view(server: LanguageServer, uri: str) -> SourceView:
    """Return the file behind ``uri`` as the editor shows it, or as it is on disk when it is not open.

    Raises:
        TargetError: it is no local file, or it can neither be read nor is it open.
    """
    path = path_of(uri)
    if path is None:
        raise TargetError("not a file of this machine", kind="not-found", file=uri, help="save it to disk first")
    on_disk = _read(path)
    document = server.workspace.text_documents.get(open_uri(server, uri))
    if document is None:
        if on_disk is None:
            raise TargetError(f"cannot read {path.name}", file=str(path))
        source = read_source(on_disk, path.name)
        return SourceView(uri, path, None, "".join(source.lines), on_disk, on_disk)
    text = document.source
    return SourceView(document.uri, path, document.version, text, encode_like(on_disk, text), on_disk)


def open_uri(server: LanguageServer, uri: str) -> str:
    """Return the URI under which an editor holds the same file open (editors escape differently), else ``uri``."""
    if uri in server.workspace.text_documents:
        return uri
    path = path_of(uri)
    return next((one for one in server.workspace.text_documents if path is not None and path_of(one) == path), uri)


def encode_like(on_disk: bytes | None, text: str) -> bytes:
    """Return an editor's text as the bytes that saving it would write over ``on_disk``."""
    if on_disk is None:
        return text.encode("utf-8", "surrogatepass")
    try:
        source = read_source(on_disk)
        return source.bom + text.removeprefix("\ufeff").encode(source.encoding)
    except (TargetError, UnicodeEncodeError):
        return text.encode("utf-8", "surrogatepass")


def check_writable(path: Path) -> None:
    """Refuse a file that is marked read-only, or whose folder is.

    Raises:
        TargetError: kind ``read-only``. (The mark counts also for who could write in spite of it.)
    """
    for one, what in ((path, "is read-only"), (path.parent, "lies in a read-only folder")):
        try:
            marked = not one.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)
        except OSError:
            marked = False
        if marked or not os.access(one, os.W_OK):
            raise TargetError(
                f"{path.name} {what}", kind="read-only", file=str(path), help="make it writable, and apply again"
            )


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
