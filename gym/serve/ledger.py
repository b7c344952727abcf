"""The worker's view of Redis: claim a job, write its result, beat the heart; blocking, safe for threads.

Each call goes on until Redis has answered: a result that could not be written must not be acknowledged, so a restart
of Redis only delays. A claim that is repeated because its answer was lost is recognised by its own random name.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from redis import Redis
from redis.exceptions import BusyLoadingError, ConnectionError, ReadOnlyError, TimeoutError  # noqa: A004 - Redis's own

from drk.gym.serve import scripts
from drk.gym.serve.jobs import Outcome, clock, result_text
from drk.gym.serve.settings import HEARTBEAT_TTL_S, MAX_DEATHS

TRANSIENT = (BusyLoadingError, ConnectionError, ReadOnlyError, TimeoutError)
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
KEPT_TASKS = 64
KEPT_TASK_BYTES = 2**20

Answer = TypeVar("Answer")


class Ledger:
    """One worker's entries. ``stop`` ends the retries of a process that is about to leave."""

    def __init__(self, url: str, worker_id: str) -> None:
        self.redis: Any = Redis.from_url(
            url, decode_responses=True, socket_connect_timeout=3, socket_timeout=15, health_check_interval=15
        )
        self.worker_id = worker_id
        self.stop = threading.Event()
        self._tasks: OrderedDict[str, str] = OrderedDict()
        self._guard = threading.Lock()
        self._claim = self.redis.register_script(scripts.CLAIM)
        self._finish = self.redis.register_script(scripts.FINISH)

    def _insist(self, action: Callable[[], Answer]) -> Answer:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return action()
            except TRANSIENT:
                if self.stop.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def claim(self, job_id: str) -> tuple[str, dict[str, str]]:
        """Try to become the one who runs this job; return a verb (:data:`.scripts.CLAIM`) and the job's fields."""
        claim = secrets.token_hex(8)
        answer = self._insist(lambda: self._claim(args=[job_id, self.worker_id, claim, clock(), MAX_DEATHS]))
        flat = list(answer[1:])
        return str(answer[0]), dict(zip(flat[::2], flat[1::2], strict=True))

    def finish(
        self, fields: Mapping[str, str], outcome: Outcome, ttl_s: int, cache_ttl_s: int, increments: Mapping[str, float]
    ) -> bool:
        """Write the result; say whether it was the first."""
        now = clock()
        result = result_text(outcome.to_json(fields, self.worker_id, now))
        keep = outcome.verdict is not None and outcome.verdict["status"] != "error" and fields.get("cache")
        args: list[Any] = [
            fields["id"],
            outcome.state,
            result,
            ttl_s,
            now,
            json.dumps(increments),
            scripts.cache_key(fields["cache"]) if keep else "",
            cache_ttl_s,
        ]
        return bool(self._insist(lambda: self._finish(args=args)))

    def task(self, task_id: str) -> str | None:
        """Return a task's JSON, or null when it is gone. The last few are kept here: an id stands for its content."""
        with self._guard:
            if task_id in self._tasks:
                self._tasks.move_to_end(task_id)
                return self._tasks[task_id]
        text: str | None = self._insist(lambda: self.redis.get(scripts.task_key(task_id)))
        if text is not None and len(text) <= KEPT_TASK_BYTES:
            with self._guard:
                self._tasks[task_id] = text
                while len(self._tasks) > KEPT_TASKS:
                    self._tasks.popitem(last=False)
        return text

    def beat(self, facts: Mapping[str, str], jobs: Iterable[str]) -> set[str]:
        """Say that this worker lives and holds ``jobs``; return those of them that are to be cancelled.

        Raises:
            redis.exceptions.RedisError: Redis does not answer (the next beat may succeed).
        """
        held = list(jobs)
        key = scripts.worker_key(self.worker_id)
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(key, mapping={**facts, "jobs": json.dumps(held), "beat_at": repr(clock())})
        pipeline.expire(key, HEARTBEAT_TTL_S)
        pipeline.sadd(scripts.WORKERS, self.worker_id)
        pipeline.sadd(scripts.CLASSES, facts["class"])
        for job_id in held:
            pipeline.hget(scripts.job_key(job_id), "cancel")
        answers: list[Any] = pipeline.execute()
        return {job_id for job_id, flag in zip(held, answers[4:], strict=True) if flag == "1"}

    def cancelled(self, jobs: Iterable[str]) -> set[str]:
        """Return those of ``jobs`` that are to be cancelled.

        Raises:
            redis.exceptions.RedisError: Redis does not answer.
        """
        held = list(jobs)
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in held:
            pipeline.hget(scripts.job_key(job_id), "cancel")
        return {job_id for job_id, flag in zip(held, pipeline.execute(), strict=True) if flag == "1"}

    def leave(self) -> None:
        """Say that this worker is gone."""
        self.redis.delete(scripts.worker_key(self.worker_id))
