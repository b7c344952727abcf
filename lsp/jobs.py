"""Long jobs: one child process each, in a process group of its own, whose events arrive as JSON lines.

A job is a ``drk`` command line, the same that people type; this process never runs user code. One job is under way for
each key (file and target); a repeated click joins it. Cancelling sends one terminate signal, on which ``drk optimize``
keeps the best so far and ends; after :data:`GRACE_S` the whole group is killed, and in any case once its leader ended.

The same signal is sent when this process dies, however it dies (:mod:`drk.lsp.job_launcher`): a killed server leaves no
hidden work behind, and a run's folder holds what was found. So an orderly exit needs to send nothing.

Left out: queueing (jobs of different targets run side by side; the gym takes turns on a GPU by its own lock).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from drk.assistant.events import Event

GRACE_S = 20.0
POLL_S = 0.1
DRAIN_S = 5.0
MAX_LINE_BYTES = 64 * 2**20
KEPT_OUTPUT = 16_384
OWN_COMMAND = (sys.executable, "-P", "-c", "from drk.assistant.cli import main; main()")
"""The ``drk`` of this environment. ``-P``: a file of the user's folder must not stand for a module of Python's."""

_LAUNCHER = str(Path(__file__).with_name("job_launcher.py"))

EndState = Literal["done", "refused", "cancelled", "killed"]


@dataclass(frozen=True)
class JobSpec:
    """What to run. ``arguments`` follow the ``drk`` command; ``environment`` is added to this process's own."""

    kind: Literal["optimize", "profile", "report"]
    file: Path
    target: str
    arguments: Sequence[str]
    cwd: Path
    command: Sequence[str] = OWN_COMMAND
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str]:
        """What one job at a time is kept for."""
        return (self.kind, str(self.file), self.target)

    @property
    def label(self) -> str:
        """File and target, for people."""
        return f"{self.file.name}:{self.target}" if self.target and self.kind == "optimize" else self.file.name


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. ``result`` is the last event's result, ``error`` the command's own error (message, help)."""

    state: EndState
    exit_code: int
    result: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    run: str = ""
    output: str = ""


class Job:
    """One job under way."""

    def __init__(self, number: int, spec: JobSpec) -> None:
        self.id = f"job-{number}"
        self.spec = spec
        self.run = ""
        self.cancelled = False
        self.message = "starting"
        self.token = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._swept = False
        self._text: list[str] = []
        self._result: Mapping[str, Any] | None = None

    async def work(self, on_event: Callable[[Event], None]) -> JobEnd:
        """Run the command to its end.

        Raises:
            OSError: no process can be started.
        """
        spec = self.spec
        words = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), *spec.command, *spec.arguments]
        self.process = subprocess.Popen(
            words,
            cwd=spec.cwd,
            env={**os.environ, **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        readers = [
            asyncio.ensure_future(self._read_events(self.process.stdout, on_event)),
            asyncio.ensure_future(_read_tail(self.process.stderr)),
        ]
        if self.cancelled:
            self._signal(signal.SIGTERM)
        while self.process.poll() is None:
            await asyncio.sleep(POLL_S)
        self._sweep()
        self._swept = True
        done, late = await asyncio.wait(readers, timeout=DRAIN_S)
        for one in late:
            one.cancel()
        output = readers[1].result() if readers[1] in done else ""
        return self._end(self.process.returncode, str(output))

    def cancel(self) -> None:
        """Ask the command to stop and to keep its best; kill its group when it does not within the grace time."""
        if self.cancelled:
            return
        self.cancelled = True
        self._signal(signal.SIGTERM)
        asyncio.get_running_loop().call_later(GRACE_S, self._sweep)

    def _signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def _sweep(self) -> None:
        """Kill what is left of the group; not again later, when its number may be another's."""
        if self.process is not None and not self._swept:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _read_events(self, pipe: IO[bytes], on_event: Callable[[Event], None]) -> None:
        reader = await _reader(pipe)
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than any event: skipped, the run folder has it
                continue
            if not line:
                return
            event = _parse_event(line)
            if event is None:
                self._text = [*self._text, line.decode("utf-8", "replace")][-400:]
            elif event["event"] == "result":
                self._result = event.get("result")
            else:
                if event["event"] == "started":
                    self.run = Path(str(event.get("run_dir", ""))).name
                on_event(event)

    def _end(self, code: int, output: str) -> JobEnd:
        if self.cancelled or code == 130:
            state: EndState = "cancelled"
        elif code < 0 or code in (128 + signal.SIGKILL, 128 + signal.SIGTERM):
            state = "killed"
        else:
            state = "done" if code == 0 or (code == 1 and self._result is not None) else "refused"
        return JobEnd(state, code, self._result, _parse_error("".join(self._text)), self.run, output)


class JobTable:
    """The jobs under way, one for each key."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str, str], Job] = {}
        self._count = 0

    def add(self, spec: JobSpec) -> tuple[Job, bool]:
        """Return the job of that key and whether it is new."""
        known = self._jobs.get(spec.key)
        if known is not None:
            return known, False
        self._count += 1
        job = Job(self._count, spec)
        self._jobs[spec.key] = job
        return job, True

    def remove(self, job: Job) -> None:
        """Forget a job that ended."""
        self._jobs.pop(job.spec.key, None)

    def all(self) -> list[Job]:
        """Return the jobs under way, oldest first."""
        return list(self._jobs.values())

    def find(self, word: str) -> Job | None:
        """Return the job with that id or progress token, or None."""
        return next((job for job in self._jobs.values() if word in (job.id, job.token)), None)

    def of_file(self, file: Path) -> list[Job]:
        """Return the jobs that work on a file."""
        return [job for job in self._jobs.values() if job.spec.file == file]


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


async def _read_tail(pipe: IO[bytes]) -> str:
    """Read to the end and return the last of it."""
    reader = await _reader(pipe)
    kept = b""
    while data := await reader.read(65_536):
        kept = (kept + data)[-KEPT_OUTPUT:]
    return kept.decode("utf-8", "replace")


def _parse_event(line: bytes) -> Event | None:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, dict) and isinstance(data.get("event"), str) else None


def _parse_error(text: str) -> Mapping[str, Any] | None:
    """Return the error object that a command printed with ``--format json``, or None."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    error = data.get("error") if isinstance(data, dict) and data.get("status") == "error" else None
    return error if isinstance(error, dict) else None
