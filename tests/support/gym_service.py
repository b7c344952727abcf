"""A real gym service for tests: ``drk gym up`` in a process group of its own, on a free port, with its own data."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

DRK = (sys.executable, "-c", "import sys; sys.argv[0] = 'drk'; from drk.assistant.cli import main; main()")
REFERENCE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
RIGHT = REFERENCE.replace("Model", "ModelNew")
WRONG = RIGHT.replace("torch.relu(x)", "x")
SLEEPER = RIGHT.replace("torch.relu(x)", "(__import__('time').sleep(50), torch.relu(x))[1]")
TASK: dict[str, Any] = {
    "name": "relu",
    "files": {"model.py": REFERENCE},
    "entry": "model.py",
    "target": "Model",
    "inputs": {"kind": "call", "args": [{"kind": "tensor", "shape": [8, 16]}]},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def processes_of(marker: str) -> list[int]:
    """Return the pids of processes whose command line holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if marker in words:
                found.append(int(entry.name))
    return found


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    except OSError:
        return found
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class GymService:
    """The service; use it as a context manager. ``options`` go to ``drk gym up``."""

    def __init__(self, *options: str, device: str = "interpret", sandbox: str = "standard", ready: bool = True) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="drk-gs-"))
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = self.folder / "log"
        self._wait_ready = ready
        self._command = [*DRK, "gym", "up", "--device", device, "--port", str(self.port), "--sandbox", sandbox]
        self._command += ["--data-dir", str(self.folder / "data"), "--no-offline-compile", *options]
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> GymService:
        environment = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        if self._wait_ready:
            self.wait_ready()
        return self

    def wait_ready(self, workers: int = 1, limit_s: float = 120.0) -> None:
        """Wait until the API answers that ``workers`` workers are there."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text()
            try:
                answer = httpx.get(self.url + "/health", timeout=5).json()
            except httpx.HTTPError:
                answer = {}
            if answer.get("ready") and answer["workers"] >= workers:
                return
            time.sleep(0.1)
        raise AssertionError("not ready: " + self.log.read_text()[-2000:])

    def wait_answering(self, limit_s: float = 120.0) -> None:
        """Wait until the API answers, with or without workers."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            try:
                httpx.get(self.url + "/health", timeout=5)
                return
            except httpx.HTTPError:
                time.sleep(0.1)
        raise AssertionError("no answer: " + self.log.read_text()[-2000:])

    def pids(self, word: str) -> list[int]:
        """Return the pids of the service's children whose command line holds ``word``."""
        assert self.process is not None
        return [pid for pid in children(self.process.pid) if word in command_of(pid)]

    def workers(self) -> list[int]:
        return self.pids("drk.gym.serve.worker")

    def api(self) -> list[int]:
        return self.pids("drk.gym.serve.server")

    def valkey(self) -> list[int]:
        return self.pids("valkey")

    def zygotes(self) -> list[int]:
        return [pid for worker in self.workers() for pid in children(worker) if "drk.gym.zygote" in command_of(pid)]

    def redis_url(self) -> str:
        """Return the address of the embedded Valkey without its password, which nobody outside knows."""
        return f"unix://{self.folder / 'data' / 'valkey.sock'}"

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
