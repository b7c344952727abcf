"""Keeps jobs moving: takes them from dead workers, sends again what lost its message, expires, and prevents starving.

One API process at a time is the overseer (a lease in Redis). Every tick:

- a running job whose worker's heartbeat is gone, or whose worker does not hold it, goes back to waiting (three times,
  then it fails: poison);
- a waiting job beyond its deadline expires;
- when there are fewer messages than open jobs, those without one are sent again; so are those whose message has been
  with a worker for long (a dead one's, or one lost in a reconnect, would only come back after the visibility timeout);
- the longest waiting are sent again as urgent, a few at a time, so that a stream of urgent jobs cannot starve them.
  The superfluous message is dropped by the worker that meets it.

After Redis was away, workers get time to beat again before any is taken for dead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Mapping

from celery import Celery
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from drk.gym.serve import scripts
from drk.gym.serve.broker import jobs_held_since, jobs_with_messages, message_count, queue_name, send_jobs
from drk.gym.serve.jobs import clock, expired, poison
from drk.gym.serve.metrics import increments_of
from drk.gym.serve.settings import HEARTBEAT_TTL_S, MAX_DEATHS, PRIORITIES
from drk.gym.serve.store import Store

LOG = logging.getLogger("drk.gym.overseer")
TICK_S = 1.0
LEASE_S = 6
REPAIR_EVERY_S = 5.0
LOST_AFTER_S = 8.0
STUCK_AFTER_S = 8.0
STUCK_AGAIN_S = 30.0
PROMOTE_EVERY_S = 5.0
PROMOTE_AFTER_S = 60.0
UNHELD_AFTER_S = 2.0


class Overseer:
    """The loop. ``promoted_per_slot``: how many long-waiting jobs become urgent, per slot and round."""

    def __init__(self, store: Store, app: Celery, ttl_s: int, promoted_per_slot: int = 1) -> None:
        self._store = store
        self._app = app
        self._ttl_s = ttl_s
        self._promoted_per_slot = promoted_per_slot
        self._name = secrets.token_hex(8)
        self._patience_until = 0.0
        self._repair_at = time.monotonic() + REPAIR_EVERY_S
        self._promote_at = time.monotonic() + PROMOTE_EVERY_S

    async def run(self) -> None:
        """Oversee until cancelled."""
        while True:
            try:
                if await self._holds_lease():
                    await self.tick()
            except (RedisError, OperationalError) as error:
                LOG.warning("interrupted", extra={"cause": str(error)})
                self._patience_until = time.monotonic() + HEARTBEAT_TTL_S
            await asyncio.sleep(TICK_S)

    async def _holds_lease(self) -> bool:
        redis = self._store.redis
        if await redis.set(scripts.OVERSEER, self._name, nx=True, ex=LEASE_S):
            return True
        if await redis.get(scripts.OVERSEER) != self._name:
            return False
        await redis.expire(scripts.OVERSEER, LEASE_S)
        return True

    async def tick(self) -> None:
        """Do one round."""
        workers = await self._store.workers()
        if time.monotonic() >= self._patience_until:
            await self._rescue(workers)
        await self._expire()
        now = time.monotonic()
        if now >= self._repair_at:
            self._repair_at = now + REPAIR_EVERY_S
            await self.repair()
        if now >= self._promote_at:
            self._promote_at = now + PROMOTE_EVERY_S
            await self._promote(sum(int(beat["slots"]) for beat in workers.values()))

    async def _rescue(self, workers: Mapping[str, Mapping[str, str]]) -> None:
        redis = self._store.redis
        running = await redis.zrange(scripts.RUNNING, 0, -1)
        if not running:
            return
        pipeline = redis.pipeline(transaction=False)
        for job_id in running:
            pipeline.hmget(scripts.job_key(job_id), "worker", "started_at")
        for job_id, (worker, started_at) in zip(running, await pipeline.execute(), strict=True):
            beat = workers.get(worker or "")
            if beat is None or _dropped(job_id, float(started_at or 0), beat):
                await self._take_back(job_id, worker or "")

    async def _take_back(self, job_id: str, worker: str) -> None:
        answer = await self._store.requeue(job_id, worker)
        LOG.warning("its worker is gone", extra={"job": job_id, "worker": worker, "answer": answer[0]})
        if answer[0] == "poison":
            outcome = poison(MAX_DEATHS)
            await self._store.finish(job_id, outcome, self._ttl_s, increments_of(outcome, 0.0, ""))
        elif answer[0] == "requeued":
            await asyncio.to_thread(send_jobs, self._app, [(job_id, answer[1], PRIORITIES["urgent"])])
        elif not await self._store.owner(job_id):
            await self._store.redis.zrem(scripts.RUNNING, job_id)  # its hash has expired

    async def _waiting(self, submitted_before: float, count: int) -> list[tuple[str, dict[str, str]]]:
        redis = self._store.redis
        names = await redis.zrangebyscore(scripts.WAITING, "-inf", submitted_before, start=0, num=count)
        pipeline = redis.pipeline(transaction=False)
        for name in names:
            pipeline.hmget(scripts.job_key(name), "queue", "priority", "promoted", "sent_again_at")
        rows = await pipeline.execute() if names else []
        found = []
        for name, (queue, priority, promoted, again) in zip(names, rows, strict=True):
            if queue is None:
                await redis.zrem(scripts.WAITING, name)
            else:
                row = {"queue": queue, "priority": priority, "promoted": promoted or "", "sent_again_at": again or "0"}
                found.append((name, row))
        return found

    async def _expire(self) -> None:
        redis = self._store.redis
        for job_id in await redis.zrangebyscore(scripts.DEADLINES, "-inf", clock(), start=0, num=1000):
            outcome = expired()
            await self._store.finish(job_id, outcome, self._ttl_s, increments_of(outcome, 0.0, ""))

    async def repair(self) -> int:
        """Send again every waiting job whose message is lost, or stuck with a worker; return how many."""
        redis = self._store.redis
        queues = [queue_name(name) for name in {*await self._store.classes(), "any"}]
        waiting, running = await self._store.depth()
        if not waiting:
            return 0
        stuck = await jobs_held_since(redis, clock() - STUCK_AFTER_S)
        complete = await message_count(redis, queues) >= waiting + running
        if complete and not stuck:
            return 0
        known = set() if complete else await jobs_with_messages(redis, queues)
        again = [
            (job_id, fields["queue"], int(fields["priority"]))
            for job_id, fields in await self._waiting(clock() - LOST_AFTER_S, 5000)
            if (not complete and job_id not in known) or (job_id in stuck and _due(fields))
        ]
        if again:
            LOG.warning("sent again", extra={"jobs": len(again)})
            await asyncio.to_thread(send_jobs, self._app, again)
            for job_id, _, _ in again:
                await redis.hset(scripts.job_key(job_id), "sent_again_at", clock())
        return len(again)

    async def _promote(self, slots: int) -> None:
        count = max(slots * self._promoted_per_slot, 1)
        oldest = [
            (job_id, fields["queue"], PRIORITIES["urgent"])
            for job_id, fields in await self._waiting(clock() - PROMOTE_AFTER_S, 1000)
            if not fields["promoted"] and int(fields["priority"]) > PRIORITIES["urgent"]
        ][:count]
        if oldest:
            await asyncio.to_thread(send_jobs, self._app, oldest)
            for job_id, _, _ in oldest:
                await self._store.redis.hset(scripts.job_key(job_id), "promoted", "1")


def _due(fields: Mapping[str, str]) -> bool:
    return clock() - float(fields["sent_again_at"]) > STUCK_AGAIN_S


def _dropped(job_id: str, started_at: float, beat: Mapping[str, str]) -> bool:
    """Whether a live worker has forgotten a job: its later heartbeat does not list it."""
    return float(beat["beat_at"]) > started_at + UNHELD_AFTER_S and job_id not in json.loads(beat["jobs"])
