"""The API's view of Redis: submit, look up, finish, cancel; asynchronous, on one connection pool.

What changes state is one Lua script each (:mod:`.scripts`). Nothing is retried here beyond what the Redis client does:
the API answers 503 and its callers retry with the same idempotency key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from drk.gym.serve import scripts
from drk.gym.serve.jobs import Job, Outcome, clock, result_text
from drk.gym.serve.settings import MAX_DEATHS

CONNECTIONS = 32
"""Requests share these; thousands of them wait for a job without one."""
STREAM_CONNECTIONS = 2000


@dataclass(frozen=True)
class Admission:
    """Limits that a submission must keep: all open jobs, the owner's open jobs, the owner's jobs a minute."""

    queue_limit: int
    open_limit: int
    per_minute: int


class Submission(NamedTuple):
    """What became of a submission: ``queued`` and the ids that are new, or ``exists``, or why it was refused.

    ``kept`` are those of the new ids whose result is in the cache already.
    """

    verb: str
    new: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def connect(url: str) -> Any:
    """Return a client that retries briefly; connections are made when they are needed.

    Clients are typed as Any throughout: redis-py types every reply as the union over all protocols and options.
    """
    return Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, **_options()))


def connect_streams(url: str) -> Any:
    """Return a client for readers that block: each takes a connection for itself."""
    return Redis.from_pool(ConnectionPool.from_url(url, max_connections=STREAM_CONNECTIONS, **_options()))


def _options() -> dict[str, Any]:
    return {
        "decode_responses": True,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), 4),
        "socket_connect_timeout": 3,
        "socket_timeout": 30,
        "health_check_interval": 15,
    }


class Store:
    """Jobs and results in Redis."""

    def __init__(self, redis: Any, streams: Any = None) -> None:
        self.redis = redis
        self.streams = streams or redis
        self._submit = redis.register_script(scripts.SUBMIT)
        self._finish = redis.register_script(scripts.FINISH)
        self._requeue = redis.register_script(scripts.REQUEUE)
        self._cancel = redis.register_script(scripts.CANCEL)
        self._open_of_batch = redis.register_script(scripts.OPEN_OF_BATCH)

    async def put_task(self, task_id: str, text: str, ttl_s: int) -> None:
        """Keep a task's JSON under its id."""
        await self.redis.set(scripts.task_key(task_id), text, ex=ttl_s)

    async def submit(
        self,
        jobs: Sequence[Job],
        owner: str,
        admission: Admission,
        ttl_s: int,
        batch: Mapping[str, Any] | None = None,
        *,
        tasks: Mapping[str, str] | None = None,
    ) -> Submission:
        """Accept jobs, all or none; jobs that are known already are left as they are.

        ``tasks`` are the JSON texts of tasks by id: kept first, where they are not kept yet. The verb of a refusal is
        ``draining``, ``full``, ``quota`` or ``rate``.
        """
        texts = tasks or {}
        # Whatever a job needs is kept until it must have ended, and then as long as its result.
        open_s = max((job.queue_deadline - clock() + (MAX_DEATHS + 1) * job.run_s for job in jobs), default=0.0)
        held_s = ttl_s + max(math.ceil(open_s), 0)
        args: list[Any] = [
            json.dumps([job.fields() for job in jobs]),
            clock(),
            admission.queue_limit,
            owner,
            admission.open_limit,
            admission.per_minute,
            held_s,
            json.dumps(batch) if batch else "",
            json.dumps(list(texts)),
        ]
        while True:
            verb, *lists = await self._submit(args=args)
            if verb != "tasks":
                return Submission(str(verb), *(tuple(ids) for ids in lists))
            for name in lists[0]:
                await self.put_task(name, texts[name], held_s)

    async def finish(
        self, job_id: str, outcome: Outcome, ttl_s: int, increments: Mapping[str, float], worker: str = ""
    ) -> bool:
        """Write a job's result, unless it has one; say whether this one was written."""
        fields = await self.job(job_id)
        now = clock()
        result = outcome.to_json({**fields, "id": job_id}, worker, now)
        return await self.finish_raw(job_id, outcome.state, result_text(result), ttl_s, increments)

    async def finish_raw(
        self, job_id: str, state: str, result: str, ttl_s: int, increments: Mapping[str, float]
    ) -> bool:
        """Write a result that is text already."""
        args = [job_id, state, result, ttl_s, clock(), json.dumps(increments), "", 1]
        return bool(await self._finish(args=args))

    async def job(self, job_id: str) -> dict[str, str]:
        """Return a job's fields; empty when there is no such job."""
        found: dict[str, str] = await self.redis.hgetall(scripts.job_key(job_id))
        return found

    async def owner(self, job_id: str) -> str | None:
        """Return whose job it is, or null."""
        found: str | None = await self.redis.hget(scripts.job_key(job_id), "owner")
        return found

    async def results(self, job_ids: Sequence[str]) -> list[dict[str, Any] | None]:
        """Return results in order; null where there is none (yet)."""
        if not job_ids:
            return []
        texts = await self.redis.mget([scripts.result_key(job_id) for job_id in job_ids])
        return [json.loads(text) if text is not None else None for text in texts]

    async def result_text(self, job_id: str) -> str | None:
        """Return a job's result as it was written, or null."""
        text: str | None = await self.redis.get(scripts.result_key(job_id))
        return text

    async def cached(self, digest: str) -> dict[str, Any] | None:
        """Return the result kept for this content, or null."""
        text = await self.redis.get(scripts.cache_key(digest))
        return json.loads(text) if text is not None else None

    async def cancel(self, job_id: str) -> str:
        """Ask for a job's end; return the state that it was in."""
        return str(await self._cancel(args=[job_id]))

    async def requeue(self, job_id: str, worker: str) -> list[str]:
        """Take a job from a worker that is gone: see :data:`.scripts.REQUEUE`."""
        return list(await self._requeue(args=[job_id, worker, MAX_DEATHS, clock()]))

    async def batch(self, batch_id: str) -> dict[str, str]:
        """Return a batch's owner, total and finished; empty when there is none."""
        found: dict[str, str] = await self.redis.hgetall(scripts.batch_meta_key(batch_id))
        return found

    async def open_of_batch(self, batch_id: str) -> list[str]:
        """Return the ids of a batch's jobs that are not finished."""
        return list(await self._open_of_batch(args=[batch_id]))

    async def workers(self) -> dict[str, dict[str, str]]:
        """Return the heartbeat of every worker that is alive; names of dead ones are dropped on the way."""
        names = sorted(await self.redis.smembers(scripts.WORKERS))
        pipeline = self.redis.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(scripts.worker_key(name))
        beats = dict(zip(names, await pipeline.execute(), strict=True))
        gone = [name for name, beat in beats.items() if not beat]
        if gone:
            await self.redis.srem(scripts.WORKERS, *gone)
        return {name: beat for name, beat in beats.items() if beat}

    async def depth(self) -> tuple[int, int]:
        """Return how many jobs wait and how many run."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.zcard(scripts.WAITING)
        pipeline.zcard(scripts.RUNNING)
        waiting, running = await pipeline.execute()
        return int(waiting), int(running)

    async def classes(self) -> set[str]:
        """Return every GPU class that ever had a worker here."""
        return set(await self.redis.smembers(scripts.CLASSES))

    async def forget(self, keys: Iterable[str]) -> None:
        """Delete keys."""
        names = list(keys)
        if names:
            await self.redis.delete(*names)
