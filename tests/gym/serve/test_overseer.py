"""What the overseer mends: dead workers, forgotten jobs, lost messages, deadlines, starving."""

from __future__ import annotations

import time

import pytest

from drk.gym.serve import overseer as module
from drk.gym.serve import scripts
from drk.gym.serve.broker import jobs_with_messages, make_celery, message_count, queue_name, send_jobs
from drk.gym.serve.jobs import Job, clock
from drk.gym.serve.overseer import Overseer
from drk.gym.serve.store import Admission

ROOMY = Admission(1000, 1000, 1000)
QUEUE = queue_name("interpret")
FACTS = {"class": "interpret", "slots": "1", "device": "interpret"}


def job(name: str, *, priority: int = 6, deadline_s: float = 600) -> Job:
    return Job(name, "evaluation", "task", "", QUEUE, priority, clock() + deadline_s, 30.0)


@pytest.fixture
def overseer(store, valkey_url):
    app = make_celery(valkey_url, 30)
    yield Overseer(store, app, 60)
    app.close()


async def test_a_dead_workers_job_moves_on_and_fails_at_the_third_death(store, ledger, overseer) -> None:
    await store.submit([job("a")], "me", ROOMY, 60)
    for _ in range(2):
        ledger.beat(FACTS, ["a"])
        assert ledger.claim("a")[0] == "run"
        await overseer.tick()
        assert await store.depth() == (0, 1), "a live worker keeps its job"
        ledger.leave()
        await overseer.tick()
        assert await store.depth() == (1, 0)
        assert await jobs_with_messages(store.redis, [QUEUE]) == {"a"}
    assert ledger.claim("a")[0] == "run"
    await overseer.tick()
    (result,) = await store.results(["a"])
    assert result["state"] == "failed"
    assert result["error"]["code"] == "killed-worker"
    assert result["error"]["infrastructure"]
    assert await store.depth() == (0, 0)


async def test_a_job_that_a_live_worker_forgot_moves_on(store, ledger, overseer, monkeypatch) -> None:
    await store.submit([job("a")], "me", ROOMY, 60)
    assert ledger.claim("a")[0] == "run"
    ledger.beat(FACTS, [])
    await overseer.tick()
    assert await store.depth() == (0, 1), "a heartbeat from before the claim proves nothing"
    monkeypatch.setattr(module, "UNHELD_AFTER_S", 0.0)
    ledger.beat(FACTS, [])
    await overseer.tick()
    assert await store.depth() == (1, 0)


async def test_after_an_outage_workers_get_time_to_beat(store, ledger, overseer) -> None:
    await store.submit([job("a")], "me", ROOMY, 60)
    assert ledger.claim("a")[0] == "run"
    overseer._patience_until = time.monotonic() + 60
    await overseer.tick()
    assert await store.depth() == (0, 1)


async def test_a_lost_message_is_sent_again(store, overseer, valkey_url, monkeypatch) -> None:
    await store.submit([job("kept"), job("lost")], "me", ROOMY, 60)
    app = make_celery(valkey_url, 30)
    send_jobs(app, [("kept", QUEUE, 6)])
    app.close()
    await store.redis.sadd(scripts.CLASSES, "interpret")
    assert await overseer.repair() == 0, "a fresh job's message may be on its way"
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)
    assert await overseer.repair() == 1
    assert await jobs_with_messages(store.redis, [QUEUE]) == {"kept", "lost"}
    assert await overseer.repair() == 0


async def test_a_message_stuck_with_a_worker_is_sent_again_now_and_then(
    store, overseer, valkey_url, monkeypatch
) -> None:
    monkeypatch.setattr(module, "LOST_AFTER_S", 0.0)
    await store.redis.sadd(scripts.CLASSES, "interpret")
    await store.submit([job("a")], "me", ROOMY, 60)
    app = make_celery(valkey_url, 30)
    send_jobs(app, [("a", QUEUE, 6)])
    with app.connection_for_read() as connection, connection.SimpleQueue(QUEUE) as queue:
        message = queue.get(timeout=5)
        assert await overseer.repair() == 0, "held for a moment only"
        monkeypatch.setattr(module, "STUCK_AFTER_S", -1.0)
        assert await overseer.repair() == 1
        assert await overseer.repair() == 0, "not again so soon"
        message.ack()
    app.close()


async def test_a_waiting_job_expires(store, overseer) -> None:
    await store.submit([job("a", deadline_s=-1), job("b")], "me", ROOMY, 60)
    await overseer.tick()
    results = await store.results(["a", "b"])
    assert results[0]["state"] == "expired"
    assert results[1] is None


async def test_a_deadline_is_kept_behind_a_long_queue_and_after_a_death(store, ledger, overseer) -> None:
    await store.submit([job(f"n{n}") for n in range(300)], "me", ROOMY, 60)
    await store.submit([job("late", deadline_s=-1), job("started", deadline_s=20)], "me", ROOMY, 60)
    assert ledger.claim("started")[0] == "run"
    await overseer.tick()
    assert (await store.results(["late"]))[0]["state"] == "expired"
    deadline = await store.redis.zscore(scripts.DEADLINES, "started")
    assert deadline > clock() + 25, "its worker was dead: it waits again, and gets time for it"


async def test_the_longest_waiting_are_promoted_once(store, overseer, monkeypatch) -> None:
    monkeypatch.setattr(module, "PROMOTE_AFTER_S", -1.0)
    await store.submit([job("first", priority=9)], "me", ROOMY, 60)
    await store.submit([job("second", priority=9)], "me", ROOMY, 60)
    for expected in ({"first"}, {"first", "second"}, {"first", "second"}):
        await overseer._promote(1)
        assert await jobs_with_messages(store.redis, [QUEUE]) == expected
    assert await message_count(store.redis, [QUEUE]) == 2


async def test_one_overseer_at_a_time(store, overseer, valkey_url) -> None:
    other = Overseer(store, None, 60)
    assert await overseer._holds_lease()
    assert not await other._holds_lease()
    assert await overseer._holds_lease()
    await store.redis.delete(scripts.OVERSEER)
    assert await other._holds_lease()
