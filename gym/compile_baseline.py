"""The reference under ``torch.compile``: compiled in a process of its own while candidates are still being written.

Compiling takes the reference seconds in which its Runner could answer nothing else, and every timed candidate needs the
result. So it begins as soon as the reference is known to run, in a second Runner that holds the same module (same
seed) and has imported the compiler meanwhile. Compiling itself keeps nobody from being timed
(:mod:`drk.gym.runner.compile_ahead`); so that it does not disturb those who are, :func:`compilers` of them at most work
at once, which leaves cores free. Its warm-up takes turns with timing like any other work on the GPU, and its answer is
kept for all candidates.

Where that process cannot be had (no memory for a second reference, it died, or nobody looked at the task first), the
reference's own Runner compiles when the first candidate is about to be timed, in the same two steps. A module that
``torch.compile`` refuses has no such baseline; the verdict says so.

Left out: weights that the constructor draws otherwise than from the seed; they differ between the two processes, which
times do not show.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from drk.gym.errors import HostError
from drk.gym.gpu_lock import GpuTurns
from drk.gym.runner_handle import RunnerHandle

if TYPE_CHECKING:
    from drk.gym.reference import ReferenceSession

_HOST_FAULTS = ("out-of-memory", "process-flood", "disk-flood", "closed")
"""How a Runner may end without the compiler being at fault: then another process gets a chance."""


SPARE_CORES = 4
"""Cores that compilers leave to whoever is being timed: the Judge, the reference, its compiled form, the candidate."""


def compilers(cores: int | None = None) -> int:
    """Return how many baselines may be compiled at once on a host with so many cores (null: this one)."""
    return max(1, (cores or os.cpu_count() or 1) - SPARE_CORES)


async def start_compiler(start: Callable[[], Awaitable[RunnerHandle]], limit_s: float) -> RunnerHandle:
    """Return a Runner that has imported the compiler and holds nothing yet; ``start`` forks it.

    Raises:
        HostError: there can be none.
    """
    handle = await start()
    try:
        answer = await handle.call("import_compiler", limit_s)
        if not answer["ok"]:
            raise HostError(f"the compiler cannot be imported: {answer['error']['message']}")
    except BaseException:
        await handle.close()
        raise
    return handle


class CompileBaseline:
    """The compiled form of one session's reference; ``compiling`` bounds how many are compiled at once."""

    def __init__(self, session: ReferenceSession, turns: GpuTurns, compiling: asyncio.Semaphore | None = None) -> None:
        self._session = session
        self._turns = turns
        self._compiling = compiling or asyncio.Semaphore(compilers())
        self.compiled_ahead = False
        self._lock = asyncio.Lock()
        self._ahead: asyncio.Task[tuple[RunnerHandle, dict[str, Any]] | None] | None = None
        self._own: RunnerHandle | None = None
        self._found: tuple[RunnerHandle, dict[str, Any]] | None = None

    def begin(self, started: asyncio.Task[RunnerHandle]) -> None:
        """Begin to compile in the process that ``started`` brings; it is closed with this. May be called once."""
        self._ahead = asyncio.create_task(self._compile_ahead(started))

    async def ready(self) -> tuple[RunnerHandle, dict[str, Any]]:
        """Return the Runner that holds the compiled form, and what its warm-up answered (``ok`` false: no baseline).

        Must not be awaited by whoever holds the GPU alone or the session's lock.

        Raises:
            HostError: the channel to a Runner broke.
        """
        async with self._lock:
            if self._found is None and self._ahead is not None:
                self._found = await asyncio.shield(self._ahead)
            if self._found is None or (self._found[1]["ok"] and self._found[0].stopped_for is not None):
                handle, lock = self._session.handle, self._session.lock
                async with self._compiling, lock:
                    await self._compile(handle)
                async with self._turns.sharing(), lock:
                    self._found = (handle, await self._warm(handle))
            return self._found

    async def close(self) -> None:
        """End the process."""
        if self._ahead is not None:
            self._ahead.cancel()
            await asyncio.wait([self._ahead])
            self._ahead = None
        if self._own is not None:
            await self._own.close()
            self._own = None

    async def _compile_ahead(self, started: asyncio.Task[RunnerHandle]) -> tuple[RunnerHandle, dict[str, Any]] | None:
        """Return the Runner with the warm-up's answer, or nothing where this process is no place for it."""
        limits = self._session.settings.limits
        try:
            handle = self._own = await started
            loaded = await handle.call("load", limits.load_s, **self._session.load_message())
            if not loaded["ok"]:
                return None
            async with self._compiling:
                await self._compile(handle)
            async with self._turns.sharing():
                answer = await self._warm(handle)
        except (HostError, OSError):
            return None
        return None if not answer["ok"] and answer["error"]["kind"] in _HOST_FAULTS else (handle, answer)

    async def _compile(self, handle: RunnerHandle) -> None:
        """Compile without running; what fails here fails at the warm-up again, which tells."""
        answer = await handle.call("compile", 2 * self._session.settings.limits.compile_s, key=secrets.randbits(62))
        self.compiled_ahead = answer.get("compiled") is True

    async def _warm(self, handle: RunnerHandle) -> dict[str, Any]:
        limit_s = 2 * self._session.settings.limits.compile_s
        return await handle.call("warm", limit_s, form="compile", key=secrets.randbits(62))
