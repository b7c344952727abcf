"""The Judge's side of a zygote: start it, ask for forks, learn of exits, end it.

The zygote lives no longer than the command: closing its control socket (also by our death) makes it kill its Runners
and leave.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, Any

from drk.gym.errors import ProtocolError, SandboxUnavailable, ZygoteError
from drk.gym.protocol import AsyncChannel
from drk.gym.sandbox import ProcessTable, scrub

START_S = 90.0
FORK_S = 20.0
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def zygote_environment(mode: str) -> dict[str, str]:
    """Return the environment of a zygote: ours, one thread, no GPU in sight, the interpreter where asked for."""
    environment = scrub(os.environ)
    environment.update(dict.fromkeys(_THREADS, "1"))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment.pop("TRITON_INTERPRET", None)
    if mode == "interpret":
        environment["TRITON_INTERPRET"] = "1"
    return environment


@dataclass
class LaunchedZygote:
    """A zygote's process that nobody has greeted yet: it can import torch while its parent still does."""

    mode: str
    level: str
    process: subprocess.Popen[bytes]
    socket: socket.socket
    words: IO[bytes]

    def close(self) -> None:
        """End it, unless a client has taken it over."""
        if self.socket.fileno() >= 0:
            self.socket.close()
            self.words.close()
            self.process.kill()
            self.process.wait()


def launch(mode: str, level: str) -> LaunchedZygote:
    """Start a zygote's process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the zygote; a pipe that nobody reads would fill
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "drk.gym.zygote", mode, level, str(theirs.fileno())],
            env=zygote_environment(mode),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=words,
            start_new_session=True,
        )
    return LaunchedZygote(mode, level, process, ours, words)


def zygote_modes(device: str, *, offline_compile: bool) -> list[str]:
    """Return the modes of the zygotes that a gym on ``device`` (``interpret`` or ``cuda:N``) needs."""
    if device != "interpret":
        return ["gpu"]
    return ["interpret", "compile"] if offline_compile else ["interpret"]


class ZygoteClient:
    """One running zygote. Make it with :meth:`start`."""

    def __init__(self, mode: str, process: subprocess.Popen[bytes], channel: AsyncChannel, words: IO[bytes]) -> None:
        self.mode = mode
        self.process = process
        self.processes = ProcessTable()
        self._channel = channel
        self._words = words
        self._next_id = 0
        self._forked: dict[int, asyncio.Future[int]] = {}
        self._exited: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, mode: str, level: str, launched: LaunchedZygote | None = None) -> ZygoteClient:
        """Start a zygote, or take over one that was launched before, and wait until it is warm.

        Raises:
            SandboxUnavailable: this machine cannot give the sandbox level that was asked for.
            ZygoteError: it did not come up; the message holds the end of what it printed.
        """
        born = launched or launch(mode, level)
        client = cls(mode, born.process, AsyncChannel(socket.socket(fileno=born.socket.detach())), born.words)
        try:
            await client._greet()
        except BaseException:
            await client.close()
            raise
        client._reader = asyncio.create_task(client._read())
        return client

    async def _greet(self) -> None:
        try:
            async with asyncio.timeout(START_S):
                hello = await self._channel.receive()
        except (EOFError, TimeoutError, ConnectionError) as error:
            raise ZygoteError(f"the {self.mode} zygote did not start: {self._last_words()}") from error
        if hello.get("ready") is not True:
            raise SandboxUnavailable(str(hello.get("error")), help=str(hello.get("help")))
        if hello.get("threads") != 1:
            raise ZygoteError(f"the {self.mode} zygote holds {hello.get('threads')} threads; forking would be unsafe")

    def _last_words(self) -> str:
        self.process.kill()
        self.process.wait()
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.returncode}"

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await self._channel.receive())
        except (EOFError, ConnectionError, ProtocolError):
            error = ZygoteError(f"the {self.mode} zygote died")
            for future in (*self._forked.values(), *self._exited.values()):
                if not future.done():
                    future.set_exception(error)
                    future.exception()

    def _dispatch(self, message: dict[str, Any]) -> None:
        if "forked" in message:
            future = self._forked.pop(message["forked"], None)
            if future is not None and not future.done():
                if "pid" in message:
                    future.set_result(message["pid"])
                else:
                    future.set_exception(ZygoteError(str(message.get("error"))))
        elif "exited" in message:
            exited = self._exited.pop(message["exited"], None)
            if exited is not None and not exited.done():
                exited.set_result(message["code"])

    @property
    def alive(self) -> bool:
        """Whether the zygote can be asked for another fork."""
        return self.process.poll() is None and self._reader is not None and not self._reader.done()

    async def fork(self, request: dict[str, Any], fds: tuple[int, int, int]) -> tuple[int, asyncio.Future[int]]:
        """Fork a Runner; return its pid and a future of its exit code (negative: the signal that ended it).

        Raises:
            ZygoteError: the zygote is gone or refused.
        """
        loop = asyncio.get_running_loop()
        self._next_id += 1
        identifier = self._next_id
        forked: asyncio.Future[int] = loop.create_future()
        exited: asyncio.Future[int] = loop.create_future()
        self._forked[identifier], self._exited[identifier] = forked, exited
        try:
            await self._channel.send({**request, "id": identifier}, fds)
            async with asyncio.timeout(FORK_S):
                pid = await forked
        except (TimeoutError, ConnectionError, OSError) as error:
            self._exited.pop(identifier, None)
            raise ZygoteError(f"the {self.mode} zygote does not answer") from error
        return pid, exited

    async def close(self) -> None:
        """End the zygote and everything that it forked."""
        self._channel.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])
        try:
            await asyncio.to_thread(self.process.wait, 5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self._words.close()
