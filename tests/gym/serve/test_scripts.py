"""Jobs in Redis: accepted once, run by one, finished once, given up after three deaths."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from drk.gym.serve import scripts
from drk.gym.serve.jobs import Job, Outcome, clock, expired
from drk.gym.serve.store import Admission, Submission

ROOMY = Admission(1000, 1000, 1000)
FACTS = {"class": "interpret", "slots": "1", "device": "interpret"}


def job(name: str = "a", **changes: object) -> Job:
    plain = Job(name, "evaluation", "task", '{"source": "x"}', "gpu.interpret", 6, clock() + 60, 30.0)
    return replace(plain, **changes)


DONE = Outcome("done", verdict={"status": "accepted"})


async def test_the_same_job_is_accepted_once(store) -> None:
    assert await store.submit([job()], "me", ROOMY, 60) == Submission("queued", ("a",))
    assert await store.submit([job()], "me", ROOMY, 60) == Submission("exists")
    assert await store.submit([job(), job("b")], "me", ROOMY, 60) == Submission("queued", ("b",))
    assert await store.depth() == (2, 0)
    assert await store.redis.hget(scripts.OPEN, "me") == "2"


@pytest.mark.parametrize(
    ("admission", "verb"),
    [(Admission(1, 9, 9), "full"), (Admission(9, 1, 9), "quota"), (Admission(9, 9, 1), "rate")],
)
async def test_limits_admit_all_or_none(store, admission, verb) -> None:
    assert (await store.submit([job("a"), job("b")], "me", admission, 60))[0] == verb
    assert await store.depth() == (0, 0)
    assert (await store.submit([job("a")], "me", admission, 60))[0] == "queued"


async def test_a_draining_server_takes_nothing_new(store) -> None:
    await store.submit([job("a")], "me", ROOMY, 60)
    await store.redis.set(scripts.DRAINING, "1")
    assert (await store.submit([job("b")], "me", ROOMY, 60))[0] == "draining"
    assert (await store.submit([job("a")], "me", ROOMY, 60))[0] == "exists"


async def test_one_worker_runs_a_job(store, ledger) -> None:
    await store.submit([job()], "me", ROOMY, 60)
    ledger.beat(FACTS, ["a"])
    verb, fields = ledger.claim("a")
    assert (verb, fields["worker"], fields["owner"], fields["attempts"]) == ("run", "worker-1", "me", "1")
    assert ledger.claim("a")[0] == "busy"
    assert await store.depth() == (0, 1)
    assert ledger.finish(fields, DONE, 60, 60, {"jobs|done": 1})
    assert ledger.claim("a")[0] == "done"
    assert ledger.claim("never")[0] == "gone"
    assert await store.depth() == (0, 0)


async def test_a_claim_whose_answer_was_lost_is_known_again(store, ledger) -> None:
    await store.submit([job()], "me", ROOMY, 60)
    ledger.beat(FACTS, ["a"])
    claim = store.redis.register_script(scripts.CLAIM)
    args = ["a", "worker-1", "the-same-claim", clock(), 3]
    assert (await claim(args=args))[0] == "run"
    assert (await claim(args=args))[0] == "run"


async def test_a_second_result_changes_nothing(store, ledger) -> None:
    await store.submit([job(batch="b1")], "me", ROOMY, 60, {"id": "b1", "total": 1})
    _, fields = ledger.claim("a")
    assert ledger.finish(fields, DONE, 60, 60, {"jobs|done": 1})
    assert not ledger.finish(fields, expired(), 60, 60, {"jobs|expired": 1})
    (result,) = await store.results(["a"])
    assert (result["state"], result["verdict"]) == ("done", {"status": "accepted"})
    assert len(await store.redis.xrange(scripts.batch_key("b1"))) == 1
    assert (await store.batch("b1"))["finished"] == "1"
    assert await store.redis.hget(scripts.OPEN, "me") == "0"
    assert await store.redis.hget(scripts.METRICS, "jobs|done") == "1"
    assert await store.redis.hget(scripts.METRICS, "jobs|expired") is None


async def test_a_third_death_ends_a_job(store, ledger) -> None:
    await store.submit([job()], "me", ROOMY, 60)
    assert ledger.claim("a")[0] == "run"  # and the worker, which has no heartbeat, dies
    assert await store.requeue("a", "somebody-else") == [""]
    assert await store.requeue("a", "worker-1") == ["requeued", "gpu.interpret", "6"]
    assert await store.depth() == (1, 0)
    assert ledger.claim("a")[0] == "run"
    assert ledger.claim("a")[0] == "run"  # taken from the dead without the overseer: the second death
    assert await store.requeue("a", "worker-1") == ["poison"]


async def test_a_job_beyond_its_deadline_is_not_run(store, ledger) -> None:
    await store.submit([job(queue_deadline=clock() - 1)], "me", ROOMY, 60)
    verb, fields = ledger.claim("a")
    assert verb == "expired"
    assert ledger.finish(fields, expired(), 60, 60, {})
    assert (await store.results(["a"]))[0]["error"]["code"] == "queue-deadline"


async def test_cancelling(store, ledger) -> None:
    await store.submit([job("a"), job("b")], "me", ROOMY, 60)
    assert await store.cancel("a") == "waiting"
    assert ledger.claim("a")[0] == "cancelled"
    assert ledger.claim("b")[0] == "run"
    assert ledger.cancelled(["b"]) == set()
    assert await store.cancel("b") == "running"
    assert ledger.beat(FACTS, ["b"]) == {"b"}
    assert ledger.cancelled(["b", "x"]) == {"b"}
    assert await store.cancel("never") == ""


async def test_good_results_are_kept_by_content_and_errors_are_not(store, ledger) -> None:
    await store.submit([job("a", cache="k1"), job("b", cache="k2")], "me", ROOMY, 60)
    ledger.finish(ledger.claim("a")[1], DONE, 60, 60, {})
    ledger.finish(ledger.claim("b")[1], Outcome("done", verdict={"status": "error"}), 60, 60, {})
    assert (await store.cached("k1"))["verdict"] == {"status": "accepted"}
    assert await store.cached("k2") is None


async def test_a_job_is_kept_until_its_deadline_and_its_result_after_it(store, ledger) -> None:
    patient = job(queue_deadline=clock() + 3 * 86400, task_id="t")
    assert (await store.submit([patient], "me", ROOMY, 60, tasks={"t": "{}"})).verb == "queued"
    for key in (scripts.job_key("a"), scripts.task_key("t")):
        assert await store.redis.ttl(key) > 3 * 86400, key
    await store.submit([job("b", task_id="t")], "me", ROOMY, 60, tasks={"t": "{}"})
    assert await store.redis.ttl(scripts.task_key("t")) > 3 * 86400, "another job does not shorten it"
    ledger.finish(ledger.claim("a")[1], DONE, 60, 60, {})
    assert await store.redis.ttl(scripts.job_key("a")) <= 60


async def test_results_are_json_for_every_parser(store, ledger) -> None:
    await store.submit([job()], "me", ROOMY, 60)
    cells = [{"rms": float("inf"), "max": float("nan"), "name": "draw 0"}]
    ledger.finish(ledger.claim("a")[1], replace(DONE, verdict={"status": "rejected", "cells": cells}), 60, 60, {})
    text = await store.result_text("a")
    assert "Infinity" not in text
    assert "NaN" not in text
    assert json.loads(text)["verdict"]["cells"] == [{"rms": None, "max": None, "name": "draw 0"}]


async def test_everything_expires(store, ledger) -> None:
    await store.put_task("t", "{}", 60)
    await store.submit([job(batch="b1")], "me", ROOMY, 60, {"id": "b1", "total": 1})
    ledger.finish(ledger.claim("a")[1], DONE, 60, 60, {})
    shared = {scripts.DONE, scripts.METRICS, scripts.OPEN, scripts.WORKERS, scripts.CLASSES}
    for key in await store.redis.keys("*"):
        assert key in shared or await store.redis.ttl(key) > 0, key
    assert json.loads(await store.redis.get(scripts.result_key("a")))["job_id"] == "a"
