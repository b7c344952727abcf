"""The parent of a service on one machine: embedded Valkey (or not), workers, API; whatever dies is started again.

It imports neither torch nor FastAPI, and runs nothing itself. Children are bound to it: when it is killed, they go.
Ending: SIGTERM or Ctrl-C stops the API, lets workers finish what runs (up to ``grace_s``), then stops Valkey. A second
one ends what still runs at once; its jobs are kept and run again at the next start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from drk.gym.errors import HostError
from drk.gym.serve.embedded_valkey import EmbeddedValkey
from drk.gym.serve.settings import ServeSettings, WorkerSettings, to_environment

POLL_S = 0.2
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
STABLE_S = 5.0


@dataclass
class Child:
    """One process that is kept running. ``pause_s`` grows while it keeps dying."""

    name: str
    module: str
    settings: ServeSettings | WorkerSettings
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    starts: int = field(default=0)

    def start(self) -> None:
        """Start it as a child that dies with us."""
        settings = replace(self.settings, parent=os.getpid())
        command = [sys.executable, "-m", self.module]
        self.process = subprocess.Popen(
            command, env=to_environment(settings), stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.started_at = time.monotonic()
        self.starts += 1

    def died(self) -> bool:
        """Whether it ran and does not any more; sets when to start it again."""
        if self.process is None or self.process.poll() is None:
            return False
        lived_s = time.monotonic() - self.started_at
        # The pause is for what cannot run here and ends by itself at once, not for what somebody kills.
        killed = self.process.returncode < 0
        self.pause_s = FIRST_PAUSE_S if killed or lived_s > STABLE_S else min(2 * self.pause_s, LONGEST_PAUSE_S)
        self.process = None
        self.start_at = time.monotonic() + self.pause_s
        return True


class Household:
    """Valkey and children, kept running until told to stop. ``tell`` receives one line for each event."""

    def __init__(
        self, valkey: EmbeddedValkey | None, children: list[Child], tell: Callable[[str], None], grace_s: float = 60.0
    ) -> None:
        self._valkey = valkey
        self.children = children
        self._tell = tell
        self._grace_s = grace_s
        self.stop = threading.Event()
        self._hurry = threading.Event()

    def run(self) -> None:
        """Keep everything running until :attr:`stop` is set or a signal asks for the end."""
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self.stop.is_set():
                self._mend()
                self.stop.wait(POLL_S)
        finally:
            self._end()
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, *_: object) -> None:
        if self.stop.is_set():
            self._hurry.set()
        self.stop.set()

    def _mend(self) -> None:
        self._mend_valkey()
        now = time.monotonic()
        for child in self.children:
            if child.died():
                self._tell(f"{child.name} ended; starting it again in {child.pause_s:g} s")
            elif child.process is None and now >= child.start_at:
                child.start()

    def _mend_valkey(self) -> None:
        """Start Valkey where it does not run; only a first start that fails ends everything."""
        if self._valkey is None or self._valkey.alive:
            return
        if self._valkey.process is None:
            self._valkey.start()
            return
        self._tell("valkey ended; starting it again")
        try:
            self._valkey.start()
        except HostError as error:
            self._tell(f"{error.message}; trying again")

    def _end(self) -> None:
        running = [child for child in self.children if child.process is not None]
        for child in running:
            assert child.process is not None
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for child in running:
            assert child.process is not None
            while child.process.poll() is None and time.monotonic() < deadline and not self._hurry.is_set():
                self._hurry.wait(POLL_S / 4)
            if child.process.poll() is None:
                self._tell(f"{child.name} did not end in time; what it ran will be run again")
                child.process.kill()
                child.process.wait()
        if self._valkey is not None:
            self._valkey.stop()


def api_child(settings: ServeSettings) -> Child:
    """Return the API process."""
    return Child("api", "drk.gym.serve.server", settings)


def worker_child(settings: WorkerSettings, index: int) -> Child:
    """Return one worker process."""
    return Child(f"worker {index} ({settings.device})", "drk.gym.serve.worker", settings)
