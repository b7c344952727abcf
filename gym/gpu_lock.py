"""One lock per GPU, across processes: correctness shares it, timing holds it alone.

``flock`` on a file named after the GPU's UUID, released by the kernel when the holder dies. A second file is a
turnstile that a waiting timer holds, so that a stream of sharers cannot starve it. Descriptors are close-on-exec and
live in the Judge only: a forked child that inherited one would keep the lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

POLL_S = 0.002


class GpuLock:
    """The lock of one GPU."""

    def __init__(self, uuid: str, folder: Path | None = None) -> None:
        folder = folder or Path(tempfile.gettempdir()) / f"drk-gpu-locks-{os.getuid()}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        safe = "".join(character if character.isalnum() or character == "-" else "_" for character in uuid)
        self.path = folder / f"{safe}.lock"
        self.turnstile = folder / f"{safe}.turnstile"

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Hold the lock together with others."""
        async with _held(self.turnstile, fcntl.LOCK_EX):
            fd = await _acquire(self.path, fcntl.LOCK_SH)
        try:
            yield
        finally:
            os.close(fd)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Hold the lock alone."""
        async with _held(self.turnstile, fcntl.LOCK_EX), _held(self.path, fcntl.LOCK_EX):
            yield


@asynccontextmanager
async def _held(path: Path, operation: int) -> AsyncIterator[None]:
    fd = await _acquire(path, operation)
    try:
        yield
    finally:
        os.close(fd)


async def _acquire(path: Path, operation: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, operation | fcntl.LOCK_NB)
                return fd
            except BlockingIOError:
                await asyncio.sleep(POLL_S)
    except BaseException:
        os.close(fd)
        raise
