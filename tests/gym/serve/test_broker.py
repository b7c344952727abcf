"""Celery's side: options that were shown to be necessary, order by priority, and what the queue holds."""

from __future__ import annotations

import json

from drk.gym.serve.broker import jobs_with_messages, make_celery, message_count, queue_name, send_jobs

QUEUE = queue_name("interpret")


def test_options_are_those_that_kill_trials_need() -> None:
    conf = make_celery("redis://:secret@localhost:6379/0", 180.0).conf
    assert conf.task_acks_late
    assert conf.task_reject_on_worker_lost
    assert conf.result_backend_always_retry
    assert conf.worker_prefetch_multiplier == 1
    assert conf.broker_connection_max_retries is None
    options = conf.broker_transport_options
    assert options["visibility_timeout"] == 300
    assert (options["unacked_restore_interval"], options["unacked_restore_throttle"]) == (5, 1)
    assert options["priority_steps"] == [0, 3, 6, 9]
    assert options["queue_order_strategy"] == "priority"
    assert options["socket_keepalive"]
    assert options["socket_timeout"]


async def test_messages_are_counted_and_named(store, valkey_url) -> None:
    app = make_celery(valkey_url, 30)
    send_jobs(app, [("low", QUEUE, 9), ("urgent", QUEUE, 0), ("normal", QUEUE, 6)])
    assert await message_count(store.redis, [QUEUE]) == 3
    assert await jobs_with_messages(store.redis, [QUEUE]) == {"low", "urgent", "normal"}
    with app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
        order = []
        for _ in range(3):
            message = queue.get(timeout=5)
            order.append(json.loads(message.body)[0][0])
            message.ack()
    assert order == ["urgent", "normal", "low"]
    assert await message_count(store.redis, [QUEUE]) == 0
    app.close()


async def test_a_message_that_a_worker_holds_is_counted(store, valkey_url) -> None:
    app = make_celery(valkey_url, 30)
    send_jobs(app, [("held", QUEUE, 6)])
    with app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
        message = queue.get(timeout=5)
        assert await message_count(store.redis, [QUEUE]) == 1
        assert await jobs_with_messages(store.redis, [QUEUE]) == {"held"}
        message.ack()
    app.close()
