"""Writing a file whole or not at all: a temporary neighbour, fsync, rename.

A reader, or whoever comes after ``kill -9`` or a power cut, sees the old bytes or the new ones, never half. The file
keeps the permissions of the one it replaces; a symbolic link is followed, so that the link stays.

Left out: ownership and extended attributes are those of whoever writes. On file systems without atomic rename (some
network mounts) the promise is theirs to break.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the contents of ``path`` by ``data``.

    Raises:
        OSError: the folder is missing or not writable, or the disk is full; ``path`` is then unchanged.
    """
    path = path.resolve()
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(_mode_for(path))
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    _sync_folder(path.parent)


def _mode_for(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0o666 & ~_umask()


def _umask() -> int:
    # Linux tells it without changing it; elsewhere the usual one is assumed, since setting it is not thread-safe
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0o022
    for line in status.splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
