"""A gym behind HTTP (``drk gym up``): the same methods as :class:`drk.gym.Gym`, and batches for trainers.

::

    async with RemoteGym("https://gym.example:8765", token) as gym:
        verdict = await gym.evaluate(task, candidate)
        async for judged in gym.evaluate_many(pairs):   # thousands; results as they come
            ...

Every submission carries a random idempotency key, so whatever breaks on the way is simply asked again: connections,
restarts of the server, 429 and 503 (Retry-After is kept). What is no statement about a kernel (a host that failed, a
dead worker, a queue deadline) is never passed off as a verdict: ``evaluate`` raises HostError, ``evaluate_many`` tries
again and then gives a fault. Blocking forms: :func:`evaluate`, or ``asyncio.run``.

Left out: more than one server (put a balancer before them), and resuming a batch in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from drk.gym.errors import BundleError, HostError, TaskError
from drk.gym.gym_connection import FIRST_PAUSE_S, PASSING, GymConnection, raise_refusal
from drk.gym.inspection import Inspection
from drk.gym.kernels import ReferenceProfile, reference_profile
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.settings import LEAST_SESSIONS, GymSettings
from drk.gym.wire import candidate_to_json, task_id, task_to_json, verdict_from_json

LONG_POLL_S = 25.0
PATIENCE_S = 300.0
"""How long a server may be away, or refuse for now, before a call gives up."""
SMALL_TASK_BYTES = 64 * 1024
ABANDON_S = 5.0
"""How long telling the server that nobody waits for a job any more may take."""


@dataclass(frozen=True)
class Fault:
    """Why there is no verdict. ``infrastructure``: nobody's kernel is to blame, and no reward follows."""

    code: str
    message: str
    infrastructure: bool


@dataclass(frozen=True)
class Judged:
    """One result of :meth:`RemoteGym.evaluate_many`; ``index`` is the pair's place. One of the two is there."""

    index: int
    verdict: Verdict | None = None
    fault: Fault | None = None

    @property
    def infrastructure(self) -> bool:
        """Whether this says nothing about the kernel."""
        return self.verdict.status == "error" if self.verdict else bool(self.fault and self.fault.infrastructure)


class RemoteGym:
    """A gym server. Use it as an async context manager.

    ``settings`` matter as far as a server lets its callers choose: the device (``interpret`` or a GPU) and whether to
    time. ``priority`` is urgent, high, normal or low; ``run_s`` and ``queue_s`` are deadlines, else the server's.
    ``at_once`` is how many evaluations its workers take together, once it has been asked. A call that is cancelled has
    its job cancelled as well.
    """

    judges_honesty = True

    def __init__(
        self,
        url: str,
        token: str = "",
        settings: GymSettings | None = None,
        *,
        priority: str = "normal",
        run_s: float | None = None,
        queue_s: float | None = None,
        patience_s: float = PATIENCE_S,
        connections: int = 100,
    ) -> None:
        self.settings = settings or GymSettings()
        self.device = "remote"
        self.device_facts: dict[str, Any] = {}
        self.at_once = 1
        self._options = {"priority": priority, "run_deadline_s": run_s, "queue_deadline_s": queue_s}
        self._connection = GymConnection(url, token, patience_s=patience_s, connections=connections)

    async def __aenter__(self) -> Self:
        """Ask the server who it is.

        Raises:
            HostError: it does not answer, or wants another token.
        """
        try:
            status = await self.status()
        except BaseException:
            await self._connection.close()
            raise
        wanted = self._device_class()
        workers = status.get("worker_list") or [{}]
        fitting = [row for row in workers if wanted in (None, row.get("class"))] or workers
        self.device_facts = dict(fitting[0].get("facts") or {"device": "remote", "gpu": None})
        self.at_once = max(sum(int(row.get("slots") or 0) for row in fitting), 1)
        self.device = str(self.device_facts.get("device", "remote"))
        return self

    @property
    def sessions_at_once(self) -> int:
        """How many references are kept there, if all of its slots are one worker's."""
        return max(LEAST_SESSIONS, self.at_once)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self._connection.close()

    def _device_class(self) -> str | None:
        return "interpret" if self.settings.device == "interpret" else None

    # --- HTTP --------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        """Return ``/v1/status``."""
        found: dict[str, Any] = (await self._connection.request("GET", "/v1/status")).json()
        return found

    async def drain(self, *, on: bool = True) -> dict[str, Any]:
        """Have the server refuse new jobs, or take them again (needs the scope ``admin``)."""
        found: dict[str, Any] = (await self._connection.request("POST", "/v1/drain", json={"on": on})).json()
        return found

    async def _result(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Submit one job and wait for its result."""
        body = {**body, "idempotency_key": secrets.token_hex(16), "wait_s": LONG_POLL_S}
        text = json.dumps(body) if _is_small(body["task"]) else await asyncio.to_thread(json.dumps, body)
        try:
            while True:
                # The same key gives the same job: should the server have forgotten it, it is simply submitted again.
                response = await self._submit(path, text)
                where = response.headers.get("Location", "")
                while response.status_code == 202:
                    how: dict[str, Any] = {"params": {"wait_s": LONG_POLL_S}, "allow": (404,)}
                    response = await self._connection.request("GET", where, **how)
                if response.status_code != 404:
                    found: dict[str, Any] = response.json()
                    return found
        except asyncio.CancelledError:
            await asyncio.shield(self._take_back(path, body))
            raise

    async def _submit(self, path: str, text: str) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        return await self._connection.request("POST", path, content=text, headers=headers)

    async def _take_back(self, path: str, body: dict[str, Any]) -> None:
        """Cancel a job that nobody waits for any more; its key tells which it is, also where it was never answered."""
        with contextlib.suppress(HostError, BundleError, httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(ABANDON_S):
                response = await self._submit(path, json.dumps({**body, "wait_s": 0.0}))
                if response.status_code == 202:
                    await self._connection.http.delete(response.headers.get("Location", ""))

    def _body(self, task: Task, **more: Any) -> dict[str, Any]:
        given = {key: value for key, value in self._options.items() if value is not None}
        return {
            "task": task_to_json(task),
            "device_class": self._device_class(),
            "timing": self.settings.timing.enabled,
            **given,
            **more,
        }

    # --- what a Gym does ---------------------------------------------------------------------------------

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate. See :meth:`drk.gym.Gym.evaluate`.

        Raises:
            TaskError: the reference itself cannot be judged.
            HostError: no verdict was to be had.
        """
        body = self._body(task, candidate=candidate_to_json(candidate))
        result = await self._result("/v1/evaluations", body)
        _raise_fault(result)
        return verdict_from_json(result["verdict"])

    async def inspect(self, task: Task) -> Inspection:
        """Look at a task's reference. See :meth:`drk.gym.Gym.inspect`."""
        return Inspection(**await self._report(task, "inspection"))

    async def capture(self, task: Task) -> dict[str, Any]:
        """Return the reference's graph. See :meth:`drk.gym.Gym.capture`."""
        return await self._report(task, "capture")

    async def parts(self, task: Task) -> list[dict[str, Any]]:
        """Return how the reference's parts are called. See :meth:`drk.gym.Gym.parts`."""
        report = await self._report(task, "parts")
        return [dict(row) for row in report["parts"]]

    async def kernels(self, task: Task) -> ReferenceProfile:
        """Return the reference's measured kernels. See :meth:`drk.gym.Gym.kernels`."""
        return reference_profile(await self._report(task, "kernels"))

    async def profile(self, task: Task) -> dict[str, Any]:
        """Return shapes, graph and estimated cost of the reference."""
        return await self._report(task, "profile")

    async def _report(self, task: Task, what: str) -> dict[str, Any]:
        body = {key: value for key, value in self._body(task, what=what).items() if key != "timing"}
        result = await self._result("/v1/profiles", body)
        _raise_fault(result)
        report: dict[str, Any] = result["report"]
        return report

    # --- batches -----------------------------------------------------------------------------------------

    async def evaluate_many(
        self,
        pairs: Iterable[tuple[Task, Candidate]],
        *,
        in_flight: int = 512,
        batch_size: int = 64,
        fault_retries: int = 2,
    ) -> AsyncIterator[Judged]:
        """Judge many candidates, at most ``in_flight`` at once, and give results as they come.

        Infrastructure faults are tried again ``fault_retries`` times. Leaving the loop early cancels what is open.
        """
        waiting = list(enumerate(pairs))
        todo = [waiting[start : start + batch_size] for start in range(0, len(waiting), batch_size)]
        results: asyncio.Queue[Judged] = asyncio.Queue()
        slots = asyncio.Semaphore(max(in_flight // batch_size, 1))

        async def run(rows: Sequence[tuple[int, tuple[Task, Candidate]]]) -> None:
            async with slots:
                left = list(rows)
                for attempt in range(fault_retries + 1):
                    left = await self._run_batch(left, results, last=attempt == fault_retries)
                    if not left:
                        return

        runs = [asyncio.create_task(run(rows)) for rows in todo]
        try:
            for _ in waiting:
                yield await _next(results, runs)
        finally:
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    async def _run_batch(
        self, rows: Sequence[tuple[int, tuple[Task, Candidate]]], results: asyncio.Queue[Judged], *, last: bool
    ) -> list[tuple[int, tuple[Task, Candidate]]]:
        """Run one batch; put what is final into ``results`` and return what is to be tried again."""
        names: dict[int, str] = {}
        tasks: dict[str, dict[str, Any]] = {}
        for _, (task, _) in rows:
            if id(task) not in names:
                names[id(task)] = task_id(task)
                tasks[names[id(task)]] = task_to_json(task)
        body = self._body(rows[0][1][0], idempotency_key=secrets.token_hex(16), tasks=tasks)
        del body["task"]
        body["items"] = [{"task": names[id(task)], "candidate": candidate_to_json(c)} for _, (task, c) in rows]
        batch = (await self._connection.request("POST", "/v1/batches", json=body)).json()["batch_id"]
        again = []
        try:
            async for index, result in self._results_of(batch):
                judged = _judged(rows[index][0], result)
                if judged.infrastructure and not last:
                    again.append(rows[index])
                else:
                    results.put_nowait(judged)
        except asyncio.CancelledError:
            await asyncio.shield(self._abandon(batch))
            raise
        return again

    async def _abandon(self, batch: str) -> None:
        try:
            await self._connection.http.delete(f"/v1/batches/{batch}", timeout=5.0)
        except httpx.HTTPError:
            return  # its results expire by themselves

    async def _results_of(self, batch: str) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Follow a batch's events to the end, over broken connections."""
        last, failed_since = "", None
        seen: set[int] = set()
        while True:
            try:
                async for name, identifier, data in self._events(batch, last):
                    failed_since = None
                    if name == "open":
                        continue
                    if name == "end":
                        return
                    last = identifier
                    if data["index"] not in seen:
                        seen.add(data["index"])
                        yield data["index"], data["result"]
            except httpx.TransportError as error:
                failed_since = failed_since or time.monotonic()
                if time.monotonic() - failed_since > self._connection.patience_s:
                    raise HostError(
                        f"the gym at {self._connection.url} does not answer: {error or type(error).__name__}"
                    ) from error
            await asyncio.sleep(FIRST_PAUSE_S)

    async def _events(self, batch: str, last: str) -> AsyncIterator[tuple[str, str, dict[str, Any]]]:
        headers = {"Last-Event-ID": last} if last else {}
        async with self._connection.http.stream("GET", f"/v1/batches/{batch}/events", headers=headers) as response:
            if response.status_code in PASSING:
                raise httpx.ReadError(f"HTTP {response.status_code}")
            if response.status_code != 200:
                await response.aread()
                raise_refusal(response)
            yield "open", last, {}
            name = identifier = ""
            async for line in response.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "id":
                    identifier = value
                elif field == "data":
                    yield name, identifier, json.loads(value)


def _is_small(task: dict[str, Any]) -> bool:
    """Whether a task is written sooner than another thread could be asked to."""
    return sum(map(len, task["files"].values())) <= SMALL_TASK_BYTES and not task.get("tensors")


async def _next(results: asyncio.Queue[Judged], runs: Sequence[asyncio.Task[None]]) -> Judged:
    """Return the next result; raise what ended a batch instead, if that comes first."""
    getter = asyncio.ensure_future(results.get())
    await asyncio.wait([getter, *(task for task in runs if not task.done())], return_when=asyncio.FIRST_COMPLETED)
    while not getter.done():
        for task in runs:
            if task.done() and (task.cancelled() or task.exception() is not None):
                getter.cancel()
                task.result()
        await asyncio.wait([getter, *(task for task in runs if not task.done())], return_when=asyncio.FIRST_COMPLETED)
    return getter.result()


def _raise_fault(result: dict[str, Any]) -> None:
    error = result.get("error")
    if result["state"] == "done":
        return
    message = error["message"] if error else f"the job ended {result['state']}"
    help_text = (error or {}).get("help") or ""
    if error and not error["infrastructure"] and result["state"] == "failed":
        if error["code"] == "bundle":
            raise BundleError(message, help=help_text)
        raise TaskError(
            message, kind=error["code"], file=error.get("file") or "", line=error.get("line"), help=help_text
        )
    raise HostError(message, help=help_text)


def _judged(index: int, result: dict[str, Any]) -> Judged:
    if result["state"] == "done":
        return Judged(index, verdict=verdict_from_json(result["verdict"]))
    error = result.get("error") or {}
    fault = Fault(str(error.get("code", "")), str(error.get("message", "")), bool(error.get("infrastructure")))
    return Judged(index, fault=fault)


async def evaluate_remote(url: str, token: str, task: Task, candidate: Candidate) -> Verdict:
    """Judge one candidate on a server. Raises like :meth:`RemoteGym.evaluate`."""
    async with RemoteGym(url, token) as gym:
        return await gym.evaluate(task, candidate)


def evaluate(url: str, token: str, task: Task, candidate: Candidate) -> Verdict:
    """Judge one candidate on a server; the blocking form of :func:`evaluate_remote`."""
    return asyncio.run(evaluate_remote(url, token, task, candidate))
