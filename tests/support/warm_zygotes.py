"""Zygotes of gyms in the test's own process: forks of one that has imported torch and Triton already.

A gym starts up to two zygotes, of which each imports torch for four seconds; most tests open a gym to see what it
judges. :func:`launch` stands for :func:`drk.gym.zygote_client.launch` there: what it forks calls the zygote's own
``main`` with the same arguments, in an environment and with imports that are the zygote's. Real starts are what the
tests of commands, of the service and of the engine's ``launched`` see.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any

from drk.gym.zygote_client import LaunchedZygote, zygote_environment


class ForkedProcess:
    """A process that is no child of ours, as far as :class:`subprocess.Popen` is used of a zygote."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:
            self.returncode = -1

    def poll(self) -> int | None:
        return self.returncode if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._handle], [], [], timeout)[0]:
            os.close(self._handle)
            self.returncode = -1  # its parent knows what it was
        return self.returncode is not None


@dataclass
class WarmZygotes:
    """Processes, one for each mode and begun when first asked for, of which zygotes are forked."""

    servers: dict[str, tuple[Any, socket.socket]] = field(default_factory=dict)

    def launch(self, mode: str, level: str) -> LaunchedZygote:
        """Fork a zygote, as :func:`drk.gym.zygote_client.launch` starts one."""
        if mode not in self.servers:
            self.servers[mode] = _start(mode)
        _, control = self.servers[mode]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the zygote
        with theirs:
            socket.send_fds(control, [level.encode()], [theirs.fileno(), words.fileno()])
        process: Any = ForkedProcess(int(control.recv(64)))
        return LaunchedZygote(mode, level, process, ours, words)

    def close(self) -> None:
        for process, control in self.servers.values():
            control.close()
            process.wait(timeout=60)


def _start(mode: str) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, mode, str(theirs.fileno())]
        environment = zygote_environment(mode)
        process = subprocess.Popen(
            command, env=environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
    return process, ours


def _serve(mode: str, control: socket.socket) -> None:
    from drk.gym import zygote

    zygote.preload(mode)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are reaped by the kernel
    while True:
        level, fds, _, _ = socket.recv_fds(control, 64, 2)
        if not level:
            return
        pid = os.fork()
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.setsid()
                os.dup2(fds[1], 2)
                os.close(fds[1])
                sys.argv = ["zygote", mode, level.decode(), str(fds[0])]
                zygote.main()
            finally:
                os._exit(0)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
