"""The zygote: a warm, single-threaded parent that forks sandboxed Runners in about 10 ms (DESIGN 4.3).

It has torch and Triton imported, has never run a tensor operation (a forked child would inherit a dead OpenMP pool),
has never touched CUDA (a forked context is unusable), and holds one thread, which is checked before every fork. It
knows no secrets and judges nothing: it forks, reaps, and reports. It is a child of the command and ends when its
control socket closes, taking all Runners with it.

Run as ``python -m drk.gym.zygote MODE LEVEL FD``; ``MODE`` is ``gpu``, ``interpret`` (the launcher has set
TRITON_INTERPRET=1) or ``compile`` (stub driver), ``LEVEL`` the sandbox level that Runners get.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from drk.gym.errors import SandboxUnavailable
from drk.gym.protocol import Channel
from drk.gym.sandbox import Layers, adopt_orphans, probe, protect_process, require, strays, terminate

_WORKER_FDS = 3


class Zygote:
    """The fork server's loop."""

    def __init__(self, mode: str, control: socket.socket, layers: Layers, cache_files: dict[str, bytes]) -> None:
        self.mode = mode
        self.cache_files = cache_files
        self.layers = layers
        self.control = Channel(control)
        self.children: dict[int, int] = {}
        self.wake_read, self.wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Fork on request and report exits until the control socket closes."""
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
        try:
            ready = {"ready": True, "pid": os.getpid(), "threads": _thread_count(), "layers": self.layers.as_dict()}
            self.control.send(ready)
            while True:
                control = self.control.sock.fileno()
                readable, _, _ = select.select([control, self.wake_read], [], [])
                if self.wake_read in readable:
                    self._drain_wakeups()
                    self._reap()
                if control in readable:
                    request, fds = self.control.receive()
                    self._fork(request, fds)
        except (EOFError, BrokenPipeError, ConnectionError):
            pass
        finally:
            self._end_children()

    def _drain_wakeups(self) -> None:
        try:
            while os.read(self.wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            identifier = self.children.pop(pid, None)
            if identifier is not None:
                strays(self.children)
                self.control.send({"exited": identifier, "pid": pid, "code": os.waitstatus_to_exitcode(status)})

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        identifier = int(request["id"])
        if len(fds) != _WORKER_FDS:
            self.control.send({"forked": identifier, "error": "expected three descriptors"})
            return
        threads = _thread_count()
        if threads != 1:
            self.control.send({"forked": identifier, "error": f"the zygote has {threads} threads, a fork is unsafe"})
            return
        pid = os.fork()
        if pid == 0:
            self._become_runner(request, fds)
        for fd in fds:
            os.close(fd)
        self.children[pid] = identifier
        self.control.send({"forked": identifier, "pid": pid})

    def _become_runner(self, request: dict[str, Any], fds: list[int]) -> None:
        from drk.gym.runner.entry import run

        code = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.control.sock.close()
            os.close(self.wake_read)
            os.close(self.wake_write)
            code = run(
                self.mode, request, self.layers, self.cache_files, sock_fd=fds[0], arena_fd=fds[1], log_fd=fds[2]
            )
        except BaseException:  # noqa: BLE001 - a fault of ours; the Judge shows the end of it
            traceback.print_exc()
        finally:
            os._exit(code)

    def _end_children(self) -> None:
        for pid in list(self.children):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            terminate(pid, handle, grace_s=1.0)
            os.close(handle)


def _thread_count() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def preload(mode: str) -> dict[str, bytes]:
    """Import what Runners need, so that forks share it; run nothing. Return the files that their caches begin with."""
    import torch
    import triton

    from drk.gym.runner import entry
    from drk.gym.triton_adapter import driver_cache_files, warm_cache_key

    assert torch.__version__ and triton.__version__ and entry
    if mode != "interpret":
        warm_cache_key()
    return driver_cache_files() if mode == "gpu" else {}


def main() -> None:
    """Entry point of the zygote process."""
    mode, level, fd = sys.argv[1], sys.argv[2], int(sys.argv[3])
    control = socket.socket(fileno=fd)
    control.set_inheritable(False)
    layers = probe(gpu=mode == "gpu")
    try:
        require(level, layers)  # type: ignore[arg-type] # the Judge passes one of the three levels
    except SandboxUnavailable as error:
        Channel(control).send({"ready": False, "error": error.message, "help": error.help})
        return
    protect_process()
    adopt_orphans()
    cache_files = preload(mode)
    gc.collect()
    gc.freeze()
    Zygote(mode, control, layers, cache_files).serve()


if __name__ == "__main__":
    main()
