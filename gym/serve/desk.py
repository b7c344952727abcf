"""The service's front desk: checks what came in, makes jobs of it, hands them to store and broker, waits for results.

Routes (native and KernelGYM's) are thin layers over it. Blocking work (reading large tasks, sending messages) is done
in threads, so that thousands of waiting requests share one event loop; small tasks are read at once, since changing
threads would take longer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ParamSpec, TypeVar

from celery import Celery
from kombu.exceptions import OperationalError

from drk.gym.errors import BundleError
from drk.gym.schema import Candidate, Task
from drk.gym.serve import scripts
from drk.gym.serve.bodies import Options
from drk.gym.serve.broker import queue_name, send_jobs
from drk.gym.serve.feed import Feed
from drk.gym.serve.jobs import TERMINAL, Job, JobKind, cancelled, clock, make_id
from drk.gym.serve.metrics import increments_of
from drk.gym.serve.records import Audit
from drk.gym.serve.refusals import Refusal
from drk.gym.serve.settings import PRIORITIES, ServeSettings
from drk.gym.serve.store import Admission, Store
from drk.gym.serve.tokens import Principal
from drk.gym.wire import (
    candidate_from_json,
    candidate_id,
    candidate_to_json,
    check_task,
    task_from_json,
    task_id,
    task_to_json,
)

LOG = logging.getLogger("drk.gym.desk")
SMALL_BYTES = 64 * 1024
"""What may be read on the event loop: a millisecond or two."""
Given = ParamSpec("Given")
Value = TypeVar("Value")
REFUSED = {
    "draining": ("draining", "the server is draining and takes no new jobs"),
    "full": ("queue_full", "the queue is full"),
    "quota": ("quota_exceeded", "this token has too many open jobs"),
    "rate": ("rate_limited", "this token has submitted too many jobs in this minute"),
}


def installed_versions() -> str:
    """Return the versions that a kept result depends on."""
    found = []
    for name in ("drk", "torch", "triton"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"{name} none")
    return ", ".join(found)


async def aside(size_bytes: int, work: Callable[Given, Value], *args: Given.args, **named: Given.kwargs) -> Value:
    """Do ``work`` on ``size_bytes`` of text: here if they are few, else in a thread."""
    if size_bytes <= SMALL_BYTES:
        return work(*args, **named)
    return await asyncio.to_thread(work, *args, **named)


@dataclass(frozen=True)
class Item:
    """One thing to submit: a task that was read, and a candidate or null."""

    kind: JobKind
    task: Task
    candidate: Candidate | None


class Desk:
    """Submits, waits, cancels."""

    def __init__(self, settings: ServeSettings, store: Store, app: Celery, feed: Feed, audit: Audit) -> None:
        self.settings = settings
        self.store = store
        self.feed = feed
        self.audit = audit
        self._app = app
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="sender")
        self._versions = installed_versions()

    def close(self) -> None:
        """End the sending thread."""
        self._sender.shutdown(wait=True, cancel_futures=True)

    # --- reading -----------------------------------------------------------------------------------------

    def read_task(self, data: Any) -> Task:
        """Check a task.

        Raises:
            Refusal: it is malformed or too large.
        """
        try:
            task = task_from_json(data)
        except BundleError as error:
            raise Refusal("invalid_request", error.message, help=error.help) from error
        return self._with_tolerance(task)

    def read_task_value(self, task: Task) -> Task:
        """Check a task that was made here from a foreign form.

        Raises:
            Refusal: it is too large.
        """
        try:
            check_task(task)
        except BundleError as error:
            raise Refusal("invalid_request", error.message, help=error.help) from error
        return self._with_tolerance(task)

    def _with_tolerance(self, task: Task) -> Task:
        return replace(task, tolerance="paper") if self.settings.tolerance == "paper" else task

    def read_candidate(self, data: Any) -> Candidate:
        """Check a candidate.

        Raises:
            Refusal: it is malformed or too large.
        """
        try:
            return candidate_from_json(data)
        except BundleError as error:
            raise Refusal("invalid_request", error.message, help=error.help) from error

    # --- submitting --------------------------------------------------------------------------------------

    async def device_class(self, wanted: str | None) -> str:
        """Return the class to send a job to: the one asked for, else the server's."""
        if wanted is None or wanted == "any":
            return self.settings.device_class
        if wanted not in await self.store.classes():
            raise Refusal("invalid_request", f"no worker of class {wanted!r} was ever here")
        return wanted

    async def submit(
        self, principal: Principal, items: Sequence[Item], options: Options, *, batch: str = "", nonce: str = ""
    ) -> list[str]:
        """Accept jobs, all or none, and return their ids; those known already are not started again.

        Raises:
            Refusal: a limit or quota is exceeded, or the server is draining.
        """
        jobs, started = await self._accept(principal, items, options, batch, nonce)
        self._send(started)
        return [job.id for job in jobs]

    async def judge(
        self, principal: Principal, item: Item, options: Options, seconds: float, *, nonce: str = ""
    ) -> tuple[str, str | None]:
        """Accept one job and wait for its result; return its id and the result's JSON, as :meth:`wait` does.

        Raises:
            Refusal: a limit or quota is exceeded, or the server is draining.
        """
        (job,), started = await self._accept(principal, [item], options, "", nonce)
        if not started:
            return job.id, await self.wait(job.id, seconds)
        with self.feed.watching(job.id) as event:
            self._send(started)
            return job.id, await self._await(job.id, event, seconds)

    async def _accept(
        self, principal: Principal, items: Sequence[Item], options: Options, batch: str, nonce: str
    ) -> tuple[list[Job], list[Job]]:
        """Make jobs of items and note them; return them, and those that are yet to be sent to a worker."""
        device_class = await self.device_class(options.device_class)
        nonce = nonce or options.idempotency_key or secrets.token_hex(16)
        size_bytes = sum(map(_size_bytes, items))
        prepared = await aside(size_bytes, self._prepare, principal, items, options, device_class, batch, nonce)
        jobs = [job for job, _ in prepared]
        texts = {job.task_id: text for job, text in prepared}
        admission = Admission(self.settings.queue_limit, principal.open_limit, principal.per_minute)
        meta = {"id": batch, "total": len(jobs)} if batch else None
        ttl_s = self.settings.result_ttl_s
        verb, new, kept = await self.store.submit(jobs, principal.name, admission, ttl_s, meta, tasks=texts)
        if verb in REFUSED:
            raise Refusal(*REFUSED[verb])
        answered = await self._answer_from_cache([job for job in jobs if job.id in set(kept)])
        waiting = set(new) - answered
        return jobs, [job for job in jobs if job.id in waiting]

    def _prepare(
        self,
        principal: Principal,
        items: Sequence[Item],
        options: Options,
        device_class: str,
        batch: str,
        nonce: str,
    ) -> list[tuple[Job, str]]:
        run_s = min(options.run_deadline_s or self.settings.run_s, self.settings.max_run_s)
        texts: dict[int, tuple[str, str]] = {}
        found = []
        for index, item in enumerate(items):
            if id(item.task) not in texts:
                texts[id(item.task)] = (task_id(item.task), json.dumps(task_to_json(item.task)))
            name, text = texts[id(item.task)]
            source = json.dumps(candidate_to_json(item.candidate)) if item.candidate else ""
            content = candidate_id(item.candidate) if item.candidate else ""
            parts = (name, content, item.kind, device_class, str(options.timing))
            job = Job(
                id=make_id(principal.name, nonce, batch, str(index), *parts),
                kind=item.kind,
                task_id=name,
                candidate=source,
                queue=queue_name(device_class),
                priority=PRIORITIES[options.priority],
                queue_deadline=clock() + (options.queue_deadline_s or self.settings.queue_s),
                run_s=run_s,
                batch=batch,
                index=index,
                timing=options.timing,
                cache=self._cache(item, name, content, device_class, options) if options.cache else "",
            )
            found.append((job, text))
            self._note(principal, job, content, item)
        return found

    def _cache(self, item: Item, name: str, content: str, device_class: str, options: Options) -> str:
        if item.kind != "evaluation":
            return ""
        parts = (name, content, device_class, str(options.timing), self.settings.sandbox, self._versions)
        return make_id("cache", "", *parts)

    def _note(self, principal: Principal, job: Job, content: str, item: Item) -> None:
        source = item.candidate.source if item.candidate else ""
        facts = {"kind": job.kind, "task": job.task_id, "candidate": content, "size_bytes": len(job.candidate)}
        self.audit.write("submit", principal.name, source=source, job=job.id, batch=job.batch, **facts)

    async def _answer_from_cache(self, jobs: Sequence[Job]) -> set[str]:
        """Finish those jobs whose result is kept; return their ids."""
        texts = await self.store.redis.mget([scripts.cache_key(job.cache) for job in jobs]) if jobs else []
        answered = set()
        for job, text in zip(jobs, texts, strict=True):
            if text is not None:
                now = clock()
                fresh = {"job_id": job.id, "cached": True, "queue_s": 0.0, "submitted_at": now, "finished_at": now}
                result = json.dumps({**json.loads(text), **fresh})
                counted = {"cache_hits": 1, "jobs|done": 1}
                await self.store.finish_raw(job.id, "done", result, self.settings.result_ttl_s, counted)
                answered.add(job.id)
        return answered

    def _send(self, jobs: Sequence[Job]) -> None:
        """Hand jobs to the broker, from a thread. What is lost on the way is sent again by the overseer."""
        if not jobs:
            return
        messages = [(job.id, job.queue, job.priority) for job in jobs]

        def send() -> None:
            try:
                send_jobs(self._app, messages)
            except OperationalError as error:
                LOG.warning("not sent; the overseer will", extra={"jobs": len(messages), "cause": str(error)})

        self._sender.submit(send)

    # --- afterwards --------------------------------------------------------------------------------------

    async def visible(self, principal: Principal, job_id: str) -> dict[str, str]:
        """Return the fields of a job that ``principal`` may see.

        Raises:
            Refusal: there is none; somebody else's job is not told from one that does not exist.
        """
        fields = await self.store.job(job_id)
        if not fields or (fields["owner"] != principal.name and not principal.may("read")):
            raise Refusal("not_found", f"there is no job {job_id!r}")
        return fields

    async def wait(self, job_id: str, seconds: float) -> str | None:
        """Return a job's result as JSON, waiting for it at most ``seconds``; null when it is not there then."""
        with self.feed.watching(job_id) as event:
            text = await self.store.result_text(job_id)
            return text if text is not None else await self._await(job_id, event, seconds)

    async def _await(self, job_id: str, event: asyncio.Event, seconds: float) -> str | None:
        """Return a result once its event is set; null when that takes longer than ``seconds``."""
        if seconds <= 0 or self.feed.closing:
            return None
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return None
        return await self.store.result_text(job_id)

    async def cancel(self, principal: Principal, job_id: str) -> str:
        """Cancel a job; return the state that it was in.

        Raises:
            Refusal: there is no such job, or it is somebody else's.
        """
        fields = await self.visible(principal, job_id)
        if fields["owner"] != principal.name and not principal.may("admin"):
            raise Refusal("forbidden", "only its owner or an admin may cancel a job")
        state = await self.store.cancel(job_id)
        if state == "waiting":
            outcome = cancelled()
            await self.store.finish(job_id, outcome, self.settings.result_ttl_s, increments_of(outcome, 0.0, ""))
        if state not in TERMINAL:
            self.audit.write("cancel", principal.name, job=job_id)
        return state


def _size_bytes(item: Item) -> int:
    source = len(item.candidate.source) if item.candidate else 0
    return source + sum(map(len, item.task.files.values())) + len(item.task.tensors or b"")
