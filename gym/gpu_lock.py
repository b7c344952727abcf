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
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
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

    def contended(self) -> bool:
        """Whether another process waits for the lock right now."""
        fd = os.open(self.turnstile, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False


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


class GpuTurns:
    """Turns of one gym's evaluations on its GPU: many share it for correctness, then all that wait are timed in a row.

    Timing one candidate whenever it is ready would stop all others each time. Here a timer waits until nobody shares;
    once timing has begun, and from ``batch`` waiting timers on, newcomers wait until every waiting timer is done. Since
    a gym bounds what is in flight, both sides make progress. Other processes are kept out by the :class:`GpuLock` that
    is held meanwhile.
    """

    def __init__(self, lock: GpuLock, batch: int = 8) -> None:
        self.lock = lock
        self.batch = batch
        self._changed = asyncio.Condition()
        self._sharers = 0
        self._waiting = 0
        self._timing = False
        self._held: AsyncExitStack | None = None

    @asynccontextmanager
    async def sharing(self) -> AsyncIterator[None]:
        """Use the GPU beside others; nobody is timed meanwhile."""
        async with self._changed:
            await self._changed.wait_for(self._open)
            # Joining would keep another process that waits from its turn for as long as anybody of ours shares.
            while self._sharers and self.lock.contended():
                await self._changed.wait()
                await self._changed.wait_for(self._open)
            if self._sharers == 0:
                await self._hold(self.lock.shared())
            self._sharers += 1
        try:
            yield
        finally:
            async with self._changed:
                self._sharers -= 1
                if self._sharers == 0:
                    await self._let_go()
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Use the GPU with nobody beside."""
        async with self._changed:
            self._waiting += 1
            try:
                await self._changed.wait_for(lambda: self._sharers == 0 and not self._busy())
                self._timing = True
                await self._hold(self.lock.exclusive())
            except BaseException:
                self._waiting -= 1
                if self._sharers == 0 and not self._busy():
                    self._timing = self._waiting > 0
                self._changed.notify_all()
                raise
            self._waiting -= 1
        try:
            yield
        finally:
            async with self._changed:
                await self._let_go()
                self._timing = self._waiting > 0
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """How many wait to be timed."""
        return self._waiting

    def _open(self) -> bool:
        return not self._timing and self._waiting < self.batch

    def _busy(self) -> bool:
        return self._held is not None

    async def _hold(self, lock: AbstractAsyncContextManager[None]) -> None:
        stack = AsyncExitStack()
        await stack.enter_async_context(lock)
        self._held = stack

    async def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.aclose()
