"""Tells waiting requests that their job is finished: one reader of one stream for thousands of waiters.

A waiter is also looked up now and then, so that a stream that was trimmed or lost with Redis only delays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

from redis.exceptions import RedisError

from drk.gym.serve import scripts

LOG = logging.getLogger("drk.gym.feed")
BLOCK_MS = 2000
SWEEP_S = 5.0
PAUSE_S = 0.5
CANCEL_AGAIN_S = 0.2


async def end_tasks(tasks: Collection[asyncio.Task[None]]) -> None:
    """Cancel ``tasks`` until they have ended: a Redis client that is just connecting swallows a cancellation."""
    pending: Collection[asyncio.Task[None]] = tasks
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


class Feed:
    """The futures of jobs that somebody waits for. Use it as an async context manager."""

    def __init__(self, redis: Any, streams: Any) -> None:
        self._redis = redis
        self._streams = streams
        self._waiting: dict[str, set[asyncio.Event]] = defaultdict(set)
        self._tasks: list[asyncio.Task[None]] = []
        self.closing = False
        """Whether the server is about to end: nobody should wait any more."""

    async def __aenter__(self) -> Feed:
        """Begin to read."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._sweep())]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop reading."""
        await end_tasks(self._tasks)

    @contextlib.contextmanager
    def watching(self, job_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when the job is finished."""
        event = asyncio.Event()
        self._waiting[job_id].add(event)
        try:
            yield event
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]

    def close(self) -> None:
        """Wake everybody who waits: the server ends."""
        self.closing = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    def _tell(self, job_id: str) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()

    async def _read(self) -> None:
        last = "$"
        while True:
            try:
                answer = await self._streams.xread({scripts.DONE: last}, block=BLOCK_MS, count=1000)
                for _, entries in answer or []:
                    for last, fields in entries:  # noqa: B007 - where to go on from
                        self._tell(fields["job"])
            except RedisError as error:
                LOG.warning("the feed is interrupted", extra={"cause": str(error)})
                await asyncio.sleep(PAUSE_S)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            names = list(self._waiting)
            with contextlib.suppress(RedisError):
                for start in range(0, len(names), 500):
                    await self._look_up(names[start : start + 500])

    async def _look_up(self, names: list[str]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            pipeline.exists(scripts.result_key(name))
        for name, found in zip(names, await pipeline.execute(), strict=True):
            if found:
                self._tell(name)
