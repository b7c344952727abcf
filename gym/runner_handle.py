"""The Judge's handle on one Runner: start, call with a deadline, classify how it ended, clean up.

Everything a Runner can do to end early is told apart here, from outside: signals, exit codes, silence, floods of memory
or disk, frames that are none. A call never raises for what user code did; it returns an answer with ``ok`` false and an
error whose ``kind`` is one of the stable words in :data:`KINDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drk.gym.arena import Arena
from drk.gym.errors import HostError, ProtocolError, TaskError, ZygoteError
from drk.gym.protocol import AsyncChannel
from drk.gym.runner.files import write_files
from drk.gym.sandbox import MemoryWatch, cpu_seconds, descendants, scratch_bytes, terminate
from drk.gym.settings import GymSettings
from drk.gym.zygote_client import ZygoteClient

KINDS = {
    "timeout": "it did not finish in time and was stopped",
    "out-of-memory": "it used more memory than it may",
    "process-flood": "it started more processes or threads than it may",
    "disk-flood": "it wrote more to its scratch folder than it may",
    "segfault": "it crashed with a segmentation fault",
    "signal": "it was ended by a signal",
    "early-exit": "it ended its process before it answered",
    "protocol": "it wrote to drk's own channel",
    "closed": "it was closed",
}
WATCH_INTERVAL_S = 0.05
WATCH_REST = 10
DISK_INTERVAL_S = 0.5


class RunnerHandle:
    """One Runner process. Made by :meth:`start`; always end it with :meth:`close`."""

    def __init__(self, settings: GymSettings, role: str, scratch: Path) -> None:
        self.settings = settings
        self.role = role
        self.scratch = scratch
        self.arena = Arena(f"drk-{role}")
        self.pid = 0
        self.log = bytearray()
        self.stopped_for: str | None = None
        self._channel: AsyncChannel | None = None
        self._exited: asyncio.Future[int] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._log_fd = -1
        self._born_with = 0
        self._pidfd = -1
        self._zygote: ZygoteClient | None = None
        self._killer: asyncio.Task[bool] | None = None

    @classmethod
    async def start(
        cls,
        zygote: ZygoteClient,
        settings: GymSettings,
        role: str,
        files: dict[str, bytes],
        *,
        gpu: str = "",
        threads: int = 1,
    ) -> RunnerHandle:
        """Fork a Runner whose scratch folder holds ``files``.

        Raises:
            ZygoteError: the zygote cannot fork, or the child did not come up in its sandbox.
        """
        scratch = Path(tempfile.mkdtemp(prefix="drk-"))
        handle = cls(settings, role, scratch)
        try:
            write_files(scratch, files)
            await handle._fork(zygote, gpu, threads)
        except BaseException:
            await handle.close()
            raise
        return handle

    async def _fork(self, zygote: ZygoteClient, gpu: str, threads: int) -> None:
        self._zygote = zygote
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self._log_fd = read_fd
        limits = self.settings.limits
        request = {
            "role": self.role,
            "gpu": gpu,
            "threads": threads,
            "target": self.settings.target,
            "programs": self.settings.interpret_programs,
            "policy": {
                "level": self.settings.sandbox,
                "scratch": str(self.scratch),
                "memory_bytes": limits.memory_bytes,
                "processes": limits.processes,
                "file_bytes": limits.scratch_bytes,
                "gpu": bool(gpu),
            },
        }
        try:
            with theirs:
                fds = (theirs.fileno(), self.arena.fd, write_fd)
                self.pid, self._exited = await zygote.fork(request, fds)
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(write_fd)
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(self.pid)
        self._channel = AsyncChannel(ours)
        self._tasks = [asyncio.create_task(self._read_log()), asyncio.create_task(self._watch())]
        hello = await self._answer(30.0)
        self._born_with = len(descendants(self.pid))
        if not hello.get("ok"):
            raise ZygoteError(f"a Runner did not start: {hello['error']['message']} {self.log_text()[-500:]}".strip())

    # --- calls -------------------------------------------------------------------------------------------

    async def call(
        self, command: str, timeout_s: float, *, fds: tuple[int, ...] = (), **message: Any
    ) -> dict[str, Any]:
        """Send a command and return its answer; never raises for what user code did."""
        if self._channel is None or self.stopped_for is not None:
            return self._failure(self.stopped_for or "early-exit")
        try:
            await self._channel.send({"command": command, **message}, fds)
        except OSError:
            return await self._death()
        return await self._answer(timeout_s)

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        assert self._channel is not None
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the answer.
            async with asyncio.timeout(timeout_s):
                answer = await self._channel.receive()
        except TimeoutError:
            self.kill("timeout")
            return self._failure("timeout", f"no answer within {timeout_s:g} s")
        except ProtocolError as error:
            self.kill("protocol")
            return self._failure("protocol", str(error))
        except (EOFError, OSError):
            return await self._death()
        return check_answer(answer) or self._failure("protocol", "an answer is malformed")

    async def _death(self) -> dict[str, Any]:
        code: int | None = None
        if self._exited is not None:
            with contextlib.suppress(TimeoutError, ZygoteError):
                async with asyncio.timeout(5.0):
                    code = await asyncio.shield(self._exited)
        if self.stopped_for is not None:
            return self._failure(self.stopped_for)
        self.kill("early-exit")
        if code is None and self._zygote is not None and not self._zygote.alive:
            raise ZygoteError("the zygote died, and its Runners with it")
        if code is not None and code < 0:
            kind = "segfault" if -code in (signal.SIGSEGV, signal.SIGBUS) else "signal"
            self.stopped_for = kind
            return self._failure(kind, f"signal {signal.Signals(-code).name}")
        return self._failure("early-exit", f"exit code {code}" if code is not None else "")

    def _failure(self, kind: str, detail: str = "") -> dict[str, Any]:
        message = KINDS[kind] + (f" ({detail})" if detail else "")
        error = {"kind": kind, "message": message, "file": "", "line": None, "help": ""}
        return {"ok": False, "died": True, "error": error}

    async def left_behind(self) -> int:
        """Return how many processes live below this Runner beyond those that it started with."""
        now = await asyncio.to_thread(descendants, self.pid)
        return max(len(now) - self._born_with, 0)

    def cpu_s(self) -> float:
        """Return the processor time that the Runner and what lives below it have used."""
        return cpu_seconds(self.pid)

    def log_text(self) -> str:
        """Return what user code printed, cut to the limit."""
        return self.log.decode(errors="replace")

    # --- watching and ending -----------------------------------------------------------------------------

    async def _read_log(self) -> None:
        loop = asyncio.get_running_loop()
        os.set_blocking(self._log_fd, False)
        ready: asyncio.Event = asyncio.Event()
        loop.add_reader(self._log_fd, ready.set)
        try:
            while True:
                await ready.wait()
                ready.clear()
                with contextlib.suppress(BlockingIOError):
                    data = os.read(self._log_fd, 65536)
                    if not data:
                        return
                    room = self.settings.limits.log_bytes - len(self.log)
                    self.log += data[: max(room, 0)]
                    ready.set()
                    await asyncio.sleep(0)
        finally:
            loop.remove_reader(self._log_fd)

    async def _watch(self) -> None:
        limits = self.settings.limits
        table = self._zygote.processes if self._zygote is not None else None
        watch = MemoryWatch(self.pid, limits.memory_bytes, table=table)
        next_disk = time.monotonic() + DISK_INTERVAL_S
        took_s = 0.0
        while self.stopped_for is None:
            # Where many are watched, looking at all of them takes long: then less often, up to a quarter of a second.
            await asyncio.sleep(max(WATCH_INTERVAL_S, min(WATCH_REST * took_s, 5 * WATCH_INTERVAL_S)))
            watch.baseline_bytes = self.arena.size_bytes
            start = time.monotonic()
            usage = await asyncio.to_thread(watch.usage)
            took_s = time.monotonic() - start
            if usage.memory_bytes > limits.memory_bytes:
                self.kill("out-of-memory")
            elif usage.processes > limits.processes:
                self.kill("process-flood")
            elif time.monotonic() >= next_disk:
                next_disk = time.monotonic() + DISK_INTERVAL_S
                if await asyncio.to_thread(scratch_bytes, self.scratch) + usage.unlinked_bytes > limits.scratch_bytes:
                    self.kill("disk-flood")

    def kill(self, why: str) -> None:
        """Begin to end the Runner and all its descendants; :meth:`close` waits until they are gone."""
        if self.stopped_for is None:
            self.stopped_for = why
        if self._pidfd >= 0 and self._killer is None:
            self._killer = asyncio.create_task(asyncio.to_thread(terminate, self.pid, self._pidfd))

    async def close(self) -> None:
        """End the Runner if it still lives, wait for it, and remove every trace."""
        self.kill("closed")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._exited is not None:
            await asyncio.wait([self._exited], timeout=5.0)
        if self._killer is not None:
            await self._killer
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self._channel is not None:
            self._channel.close()
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1
        self.arena.close()
        await asyncio.to_thread(shutil.rmtree, self.scratch, ignore_errors=True)


async def close_started(started: asyncio.Task[Any]) -> None:
    """Close what a task brings (a Runner, a session, a zygote), or end the task first where it is not done."""
    if not started.done():
        started.cancel()
    # Not "await started": a cancellation of our own must not be taken for its.
    await asyncio.wait([started])
    if started.cancelled() or isinstance(started.exception(), HostError | TaskError | OSError):
        return
    await started.result().close()


def figure(answer: dict[str, Any], name: str) -> float:
    """Return a number that an answer holds; it may be NaN.

    Raises:
        ProtocolError: there is none of that name.
    """
    value = answer.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
        raise ProtocolError(f"an answer holds no number {name}")
    return float(value)


def check_answer(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer if it has the form that handlers give, else None."""
    if answer.get("ok") is True:
        return answer
    error = answer.get("error")
    if answer.get("ok") is not False or not isinstance(error, dict):
        return None
    line = error.get("line")
    return {
        "ok": False,
        "error": {
            "kind": str(error.get("kind", "exception"))[:60],
            "message": str(error.get("message", ""))[:4000],
            "file": str(error.get("file", ""))[:400],
            "line": line if isinstance(line, int) else None,
            "help": str(error.get("help", ""))[:1000],
        },
    }
