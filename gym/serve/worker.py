"""A worker process: one device, one Gym, a few evaluations at once. ``python -m drk.gym.serve.worker``.

Celery's consumer runs in the main thread and hands job ids to ``slots`` threads; each waits for a coroutine on the
Gym's own event loop (a third thread), so that limits, cancelling and cleaning up are the Gym's. A heartbeat thread
says which jobs are held, and learns which are cancelled. Results are written before a message is acknowledged.

SIGTERM finishes what runs and leaves; a second one, or SIGKILL, is survived by the jobs: others take them over.
Credentials are in memory only: not in the environment, not on the command line, and the process cannot be inspected.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from celery.exceptions import SecurityWarning
from redis.exceptions import RedisError

from drk.gym.engine import Gym
from drk.gym.errors import HostError
from drk.gym.sandbox import protect_process
from drk.gym.sandbox.syscalls import PR_SET_PDEATHSIG, prctl
from drk.gym.serve.broker import TASK_NAME, make_celery, queue_name
from drk.gym.serve.jobs import Fault, Outcome, cancelled, clock, expired, poison
from drk.gym.serve.judging import Bench
from drk.gym.serve.ledger import Ledger
from drk.gym.serve.metrics import increments_of
from drk.gym.serve.records import configure_logging
from drk.gym.serve.settings import HEARTBEAT_S, MAX_DEATHS, SWITCH_S, WorkerSettings, take_from_environment
from drk.gym.settings import GymSettings, Limits, Timing

LOG = logging.getLogger("drk.gym.worker")
CANCEL_POLL_S = 0.25
CANCEL_AGAIN_S = 10.0

Value = TypeVar("Value")


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="gym", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, Value]) -> concurrent.futures.Future[Value]:
        """Start ``coroutine`` there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class Held:
    """A job held here: its task on the Gym's loop once it runs, and when that was last cancelled (monotonic)."""

    task: asyncio.Task[Any] | None = None
    cancelled_at: float = -CANCEL_AGAIN_S


class Worker:
    """What the threads share: the jobs held here, and where their results go."""

    def __init__(self, settings: WorkerSettings, ledger: Ledger, loop: Loop, gym: Gym) -> None:
        self.settings = settings
        self.ledger = ledger
        self._loop = loop
        self._bench = Bench(gym, settings.host_error_retries)
        self._held: dict[str, Held] = {}
        self._guard = threading.Lock()
        self.facts = {
            "class": settings.device_class,
            "device": settings.device,
            "gpu": str(gym.device_facts.get("gpu") or ""),
            "facts": json.dumps(gym.device_facts),
            "sandbox": settings.sandbox,
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "slots": str(settings.slots),
            "started_at": repr(clock()),
        }

    def handle(self, job_id: str) -> None:
        """Run one job, if it is ours to run, and write its result."""
        with self._guard:
            if job_id in self._held:
                return  # a second message for what another thread is running
            self._held[job_id] = Held()
        try:
            verb, fields = self.ledger.claim(job_id)
            LOG.info("claimed", extra={"job": job_id, "verb": verb})
            outcome = self._outcome(verb, fields)
            if outcome is not None:
                self._finish(fields, outcome)
        finally:
            with self._guard:
                self._held.pop(job_id, None)

    def _outcome(self, verb: str, fields: Mapping[str, str]) -> Outcome | None:
        if verb == "run":
            return self._run(fields)
        endings = {"expired": expired(), "cancelled": cancelled(), "poison": poison(MAX_DEATHS)}
        return endings.get(verb)

    def _run(self, fields: Mapping[str, str]) -> Outcome:
        task_text = self.ledger.task(fields["task_id"])
        if task_text is None:
            return Outcome("failed", fault=Fault("task-gone", "the task is no longer kept", infrastructure=True))
        future = self._loop.submit(self._judge(fields, task_text))
        concurrent.futures.wait([future])
        if future.cancelled():
            return cancelled()
        error = future.exception()
        if error is not None:
            LOG.error("a fault of drk's own", extra={"job": fields["id"]}, exc_info=error)
            message = f"{type(error).__name__}: {error}"
            return Outcome("failed", fault=Fault("internal", message, infrastructure=True))
        return future.result()

    async def _judge(self, fields: Mapping[str, str], task_text: str) -> Outcome:
        with self._guard:
            self._held[fields["id"]].task = asyncio.current_task()
        return await self._bench.run(fields, task_text)

    def _finish(self, fields: Mapping[str, str], outcome: Outcome) -> None:
        settings = self.settings
        queued_s = max(float(fields.get("started_at") or clock()) - float(fields["submitted_at"]), 0.0)
        counted = increments_of(outcome, queued_s, settings.device_class)
        first = self.ledger.finish(fields, outcome, settings.result_ttl_s, settings.cache_ttl_s, counted)
        LOG.info("finished", extra={"job": fields["id"], "state": outcome.state, "first": first})

    def beat_forever(self) -> None:
        """Beat the heart until the ledger stops, and cancel what owners took back."""
        due = 0.0
        while not self.ledger.stop.wait(CANCEL_POLL_S):
            with self._guard:
                held = list(self._held)
            try:
                if time.monotonic() >= due:
                    doomed = self.ledger.beat(self.facts, held)
                    due = time.monotonic() + HEARTBEAT_S
                else:
                    doomed = self.ledger.cancelled(held) if held else set()
            except RedisError as error:
                LOG.warning("no heartbeat", extra={"cause": str(error)})
                continue
            for job_id in doomed:
                self._cancel(job_id)

    def _cancel(self, job_id: str) -> None:
        """Cancel a job's task; again after a while, in case a library has swallowed the first."""
        with self._guard:
            held = self._held.get(job_id)
        if held is None or held.task is None or time.monotonic() < held.cancelled_at + CANCEL_AGAIN_S:
            return
        held.cancelled_at = time.monotonic()
        self._loop.loop.call_soon_threadsafe(held.task.cancel)


def gym_settings(settings: WorkerSettings) -> GymSettings:
    """Return the Gym's settings on this worker."""
    return GymSettings(
        device=settings.device,
        target=settings.target,
        sandbox=settings.sandbox,
        seeds=settings.seeds,
        parallel=settings.slots,
        offline_compile=settings.offline_compile,
        limits=Limits(**settings.limits),
        timing=Timing(**settings.timing),
    )


def threads_of(settings: WorkerSettings) -> int:
    """Return how many jobs are taken at once: on a GPU more than slots, since who waits to be timed leaves its slot."""
    return settings.slots if settings.device == "interpret" else settings.slots + settings.slots // 2


async def warm_up(gym: Gym) -> None:
    """Start the Gym and one Runner, so that a worker that says that it lives can work.

    Raises:
        HostError: the device, or the sandbox level that was asked for, is not to be had here.
    """
    await gym.__aenter__()
    runner = await gym.start_runner("candidate", {"candidate.py": b""})
    await runner.close()


def serve(settings: WorkerSettings) -> None:
    """Work until told to stop."""
    worker_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    ledger = Ledger(settings.redis_url, worker_id)
    loop = Loop()
    gym = Gym(gym_settings(settings))
    loop.submit(warm_up(gym)).result()
    worker = Worker(settings, ledger, loop, gym)
    heart = threading.Thread(target=worker.beat_forever, name="heart", daemon=True)
    heart.start()
    try:
        consume(settings, worker, worker_id)
    finally:
        ledger.stop.set()
        heart.join()
        loop.submit(gym.__aexit__(None, None, None)).result()
        loop.close()
        ledger.leave()


def consume(settings: WorkerSettings, worker: Worker, worker_id: str) -> None:
    """Run Celery's consumer in this thread."""
    app = make_celery(settings.redis_url, settings.run_s)

    def judge(job_id: str) -> None:
        worker.handle(job_id)

    app.task(judge, name=TASK_NAME, ignore_result=True)
    classes = [settings.device_class] if settings.device_class == "interpret" else ["any", settings.device_class]
    consumer = app.Worker(
        hostname=worker_id,
        pool="threads",
        concurrency=threads_of(settings),
        queues=[queue_name(name) for name in classes],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel="WARNING",
        quiet=True,
    )
    consumer.start()


def main() -> None:
    """Entry point of the process."""
    settings = take_from_environment(WorkerSettings)
    protect_process()
    if settings.parent:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings.parent:
            return
    configure_logging("worker")
    sys.setswitchinterval(SWITCH_S)
    # Only JSON is accepted, so Celery's warning about pickle and uid 0 has no ground.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    try:
        serve(settings)
    except HostError as error:
        LOG.error("cannot work here", extra={"cause": error.message, "help": error.help})  # noqa: TRY400 - no fault
        sys.exit(2)


if __name__ == "__main__":
    main()
