"""Celery on Redis, used thinly: it carries job ids to workers. State and results are ours (:mod:`.scripts`).

Options are those that kill and restart trials showed to be necessary: Celery's defaults redeliver a dead worker's
message after an hour, checked every 100 s. Queues are ``gpu.<class>`` (routing); four priority steps, 0 first.

A message may come twice or be lost (kombu pops it before it notes it as unacknowledged); both are harmless: a claim
admits one runner, and the overseer sends again what is waiting without a message.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from celery import Celery

from drk.gym.serve.settings import PRIORITIES

TASK_NAME = "drk.judge"
KEY_PREFIX = "drk:celery:"
SEPARATOR = "\x06\x16"
UNACKED = KEY_PREFIX + "unacked"
UNACKED_INDEX = KEY_PREFIX + "unacked_index"
QUEUE_SLACK_S = 120.0


def queue_name(device_class: str) -> str:
    """Return the queue of a GPU class (``h200``, ``interpret``, or ``any`` GPU)."""
    return f"gpu.{device_class}"


def make_celery(redis_url: str, run_s: float) -> Celery:
    """Return the Celery application. ``run_s`` is the hard limit of one job.

    A Redis URL is ``redis://:password@host:port/0``, ``rediss://...`` or ``unix:///path?password=...``.
    """
    url = redis_url.replace("unix://", "redis+socket://", 1)
    app = Celery("drk", broker=url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        result_backend_always_retry=True,
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        worker_hijack_root_logger=False,
        worker_enable_remote_control=False,
        task_create_missing_queues=True,
        broker_transport_options={
            "visibility_timeout": run_s + QUEUE_SLACK_S,
            "unacked_restore_interval": 5,
            "unacked_restore_throttle": 1,
            "priority_steps": list(PRIORITIES.values()),
            "queue_order_strategy": "priority",
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": not redis_url.startswith("unix://"),
            "global_keyprefix": KEY_PREFIX,
        },
    )
    return app


def send_jobs(app: Celery, jobs: Iterable[tuple[str, str, int]]) -> None:
    """Send one message for each (job id, queue, priority). Blocks; raises kombu's OperationalError without Redis."""
    with app.producer_pool.acquire(block=True) as producer:
        for job_id, queue, priority in jobs:
            app.send_task(
                TASK_NAME,
                args=(job_id,),
                queue=queue,
                priority=priority,
                producer=producer,
                ignore_result=True,
                retry=True,
                retry_policy={"max_retries": 3, "interval_start": 0.1, "interval_max": 1.0},
            )


def _lists(queues: Sequence[str]) -> list[str]:
    steps = PRIORITIES.values()
    return [KEY_PREFIX + (f"{queue}{SEPARATOR}{step}" if step else queue) for queue in queues for step in steps]


async def message_count(redis: Any, queues: Sequence[str]) -> int:
    """Return how many messages wait in ``queues`` or are held by workers."""
    pipeline = redis.pipeline(transaction=False)
    for name in _lists(queues):
        pipeline.llen(name)
    pipeline.hlen(UNACKED)
    return sum(await pipeline.execute())


async def jobs_with_messages(redis: Any, queues: Sequence[str]) -> set[str]:
    """Return the ids of all jobs that have a message somewhere. Reads every message: for repair only."""
    texts: list[str] = []
    for name in _lists(queues):
        texts += await redis.lrange(name, 0, -1)
    held = await redis.hvals(UNACKED)
    found = {_job_of(json.loads(text)) for text in texts}
    found |= {_job_of(json.loads(text)[0]) for text in held}
    return {job for job in found if job}


async def jobs_held_since(redis: Any, moment: float) -> set[str]:
    """Return the ids of jobs whose message some worker, alive or not, has held since ``moment`` or before."""
    tags = await redis.zrangebyscore(UNACKED_INDEX, "-inf", moment)
    texts = await redis.hmget(UNACKED, tags) if tags else []
    return {_job_of(json.loads(text)[0]) for text in texts if text is not None}


def _job_of(message: dict[str, Any]) -> str:
    """Return the job id in a message's headers (Celery's text form of the arguments)."""
    text = str(message.get("headers", {}).get("argsrepr", ""))
    return text.strip("(),'\" ")
