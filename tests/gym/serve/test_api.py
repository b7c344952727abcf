"""The API in this process, on a real Valkey: who may what, limits, errors, health. (Judging: test_up.)"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import pytest
from gym_service import RIGHT, TASK

from drk.gym.serve import scripts
from drk.gym.serve.api import create_app
from drk.gym.serve.bodies import CANDIDATE_EXAMPLE, TASK_EXAMPLE
from drk.gym.serve.jobs import Outcome
from drk.gym.serve.settings import ServeSettings
from drk.gym.serve.tokens import create

BODY = {"task": TASK, "candidate": {"source": RIGHT}}
DONE = Outcome("done", verdict={"status": "accepted"})
FACTS = {"class": "interpret", "slots": "1", "device": "interpret"}


@asynccontextmanager
async def client_of(settings: ServeSettings, token: str = ""):
    app = create_app(settings)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=headers) as client,
    ):
        yield client


@pytest.fixture
def settings(store, valkey_url, tmp_path) -> ServeSettings:
    return ServeSettings(
        redis_url=valkey_url,
        device_class="interpret",
        tokens_file=str(tmp_path / "tokens"),
        audit_file=str(tmp_path / "audit"),
        body_bytes=100_000,
        body_s=0.5,
    )


@pytest.fixture
def tokens(settings, tmp_path) -> dict[str, str]:
    made = {}
    for name, scopes in {"ann": ["evaluate"], "bob": ["evaluate"], "eye": ["read"], "boss": ["admin"]}.items():
        made[name] = create(tmp_path / "tokens", name, scopes, open_limit=3 if name == "bob" else 100)
    return {name: {"Authorization": f"Bearer {text}"} for name, text in made.items()}


async def test_nothing_without_a_valid_token(settings, tokens) -> None:
    async with client_of(settings) as client:
        for method, path in [
            ("POST", "/v1/evaluations"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/profiles"),
            ("GET", "/v1/evaluations/x"),
            ("DELETE", "/v1/evaluations/x"),
            ("GET", "/v1/batches/x/events"),
            ("GET", "/v1/status"),
            ("GET", "/metrics"),
            ("POST", "/v1/drain"),
            ("POST", "/evaluate"),
            ("GET", "/results/x"),
            ("GET", "/workers/status"),
        ]:
            for headers in ({}, {"Authorization": "Bearer nonsense"}, {"Authorization": "Basic eDp4"}):
                answer = await client.request(method, path, json=BODY, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == "unauthorized"
                assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_scopes_and_owners(settings, tokens, store) -> None:
    async with client_of(settings) as client:
        made = await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
        assert made.status_code == 202
        assert made.json()["state"] == "waiting"
        where = made.headers["Location"]
        seen = {name: (await client.get(where, headers=tokens[name])).status_code for name in tokens}
        assert seen == {"ann": 202, "bob": 404, "eye": 202, "boss": 202}
        unknown = await client.get("/v1/evaluations/never", headers=tokens["bob"])
        hidden = await client.get(where, headers=tokens["bob"])
        assert unknown.json()["error"]["message"].startswith("there is no job")
        assert hidden.json()["error"]["message"].startswith("there is no job")
        assert (await client.delete(where, headers=tokens["bob"])).status_code == 404
        assert (await client.delete(where, headers=tokens["eye"])).status_code == 403
        assert (await client.post("/v1/evaluations", json=BODY, headers=tokens["eye"])).status_code == 403
        assert (await client.post("/v1/profiles", json={"task": TASK}, headers=tokens["ann"])).status_code == 403
        assert (await client.get("/metrics", headers=tokens["ann"])).status_code == 403
        assert (await client.post("/v1/drain", json={}, headers=tokens["ann"])).status_code == 403
        assert (await client.delete(where, headers=tokens["boss"])).json()["cancelled"]
        assert (await client.get(where, headers=tokens["ann"])).json()["state"] == "cancelled"


async def test_the_same_key_is_the_same_job(settings, tokens, store) -> None:
    body = {**BODY, "idempotency_key": "k-1"}
    async with client_of(settings) as client:
        ids = [(await client.post("/v1/evaluations", json=body, headers=tokens["ann"])).json()["job_id"]]
        ids.append((await client.post("/v1/evaluations", json=body, headers=tokens["ann"])).json()["job_id"])
        ids.append((await client.post("/v1/evaluations", json=body, headers=tokens["bob"])).json()["job_id"])
    assert ids[0] == ids[1] != ids[2]
    assert await store.depth() == (2, 0)


async def test_quotas_answer_429_with_retry_after(settings, tokens, store) -> None:
    items = [{"task": "t", "candidate": {"source": RIGHT}}] * 4
    async with client_of(settings) as client:
        answer = await client.post("/v1/batches", json={"tasks": {"t": TASK}, "items": items}, headers=tokens["bob"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "quota_exceeded")
        assert int(answer.headers["Retry-After"]) > 0
        assert await store.depth() == (0, 0)
        answer = await client.post("/v1/batches", json={"tasks": {"t": TASK}, "items": items}, headers=tokens["ann"])
        assert answer.status_code == 202
        assert len(set(answer.json()["job_ids"])) == 4


async def test_draining_refuses_and_can_be_undone(settings, tokens, store, ledger) -> None:
    ledger.beat(FACTS, [])
    async with client_of(settings) as client:
        assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/drain", json={}, headers=tokens["boss"])).json()["draining"]
        answer = await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).json()["draining"]
        await client.post("/v1/drain", json={"on": False}, headers=tokens["boss"])
        assert (await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])).status_code == 202


async def test_health_tells_the_truth(settings, tokens, store, ledger) -> None:
    async with client_of(settings) as client:
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"], answer.json()["workers"]) == (503, "unhealthy", 0)
        ledger.beat(FACTS, [])
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"], answer.json()["workers"]) == (200, "healthy", 1)
        ledger.leave()
        assert (await client.get("/health")).status_code == 503


async def test_without_redis_everything_says_so(settings, tokens) -> None:
    from dataclasses import replace

    away = replace(settings, redis_url="redis://127.0.0.1:1/0")
    async with client_of(away) as client:
        assert (await client.get("/health")).json()["redis"] is False
        answer = await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert int(answer.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"task": {}}, "name: Field required"),
        ({"task": {**TASK, "files": {"../up.py": "x"}, "entry": "../up.py"}}, "leaves the project root"),
        ({"task": {**TASK, "tensors": "not base64!"}}, "base64"),
        ({"candidate": {"sauce": "x"}}, "source"),
        ({"misspelt_deadline": 1}, "misspelt_deadline"),
        ({"priority": "now"}, "priority"),
        ({"run_deadline_s": -1}, "run_deadline_s"),
        ({"idempotency_key": "a b"}, "idempotency_key"),
        ({"device_class": "h9000"}, "h9000"),
        ({"wait_s": 1e9}, "wait_s"),
    ],
)
async def test_malformed_requests_are_named(settings, tokens, store, change, where) -> None:
    async with client_of(settings) as client:
        answer = await client.post("/v1/evaluations", json={**BODY, **change}, headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
        assert where in json.dumps(answer.json())
    assert await store.depth() == (0, 0)


async def test_bodies_that_are_no_json(settings, tokens) -> None:
    headers = {**tokens["ann"], "Content-Type": "application/json"}
    async with client_of(settings) as client:
        for body in (b"", b"{", b"\xff\xfe", b"[" * 90_000, b"null", b'"x"', b'{"task": NaN}'):
            answer = await client.post("/v1/evaluations", content=body, headers=headers)
            assert 400 <= answer.status_code < 500, body[:20]
            assert answer.json()["error"]["code"] in ("invalid_request", "bad_request")
        surrogate = json.dumps({**BODY, "candidate": {"source": "\ud800"}}).encode()
        assert (await client.post("/v1/evaluations", content=surrogate, headers=headers)).status_code == 202
        odd = {**BODY, "task": {**TASK, "files": {**TASK["files"], "\ud800": 1}}}
        for text in (json.dumps(odd), json.dumps({**BODY, "\ud800": 1})):
            answer = await client.post("/v1/evaluations", content=text.encode(), headers=headers)
            assert answer.status_code == 422, "what is no Unicode is quoted, not choked on"


async def test_too_much_and_too_slow_bodies(settings, tokens) -> None:
    async def slowly():
        yield b"{"
        await asyncio.sleep(5)
        yield b"}"

    async def endlessly():
        while True:
            yield b"x" * 50_000

    async with client_of(settings) as client:
        answer = await client.post("/v1/evaluations", content=b"x" * 100_001, headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        answer = await client.post("/v1/evaluations", content=endlessly(), headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
        # Strangers may send little, so that they cannot fill the memory.
        for headers in ({}, {"Authorization": "Bearer drk_0_0"}, {"Content-Length": "90000"}):
            answer = await client.post("/v1/evaluations", content=endlessly(), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized"), (
                "strangers send little"
            )
        answer = await client.post("/v1/evaluations", content=slowly(), headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (408, "too_slow")


async def test_unknown_paths_and_methods_have_the_same_form_and_no_cors(settings, tokens) -> None:
    async with client_of(settings) as client:
        answer = await client.get("/nowhere", headers={"Origin": "https://elsewhere.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert not [name for name in answer.headers if name.startswith("access-control")]
        answer = await client.put("/v1/evaluations", json=BODY, headers=tokens["ann"])
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert "POST" in answer.headers["Allow"]


async def test_without_tokens_only_loopback_names_are_answered(settings, store) -> None:
    from dataclasses import replace

    async with client_of(replace(settings, tokens_file="", insecure_local=True)) as client:
        assert (await client.get("/v1/status")).status_code == 200
        assert (await client.get("/v1/status", headers={"Host": "localhost:8765"})).status_code == 200
        answer = await client.get("/v1/status", headers={"Host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


async def test_a_waiting_request_is_answered_when_the_job_is_done(settings, tokens, store, ledger) -> None:
    async with client_of(settings) as client:
        body = {**BODY, "idempotency_key": "k", "wait_s": 30}
        asked = asyncio.create_task(client.post("/v1/evaluations", json=body, headers=tokens["ann"]))
        while not (ids := await store.redis.zrange(scripts.WAITING, 0, -1)):
            await asyncio.sleep(0.01)
        _, fields = ledger.claim(ids[0])
        assert ledger.finish(fields, DONE, 60, 60, {})
        answer = await asked
        assert (answer.status_code, answer.json()["verdict"]) == (200, {"status": "accepted"})
        # and kept by content, for whoever asks for the same
        again = await client.post("/v1/evaluations", json={**BODY, "wait_s": 5}, headers=tokens["bob"])
        assert again.json()["cached"]
        assert again.json()["verdict"] == {"status": "accepted"}
        fresh = await client.post("/v1/evaluations", json={**BODY, "cache": False}, headers=tokens["bob"])
        assert fresh.status_code == 202


async def test_batch_events_can_be_resumed(settings, tokens, store, ledger) -> None:
    items = [{"task": "t", "candidate": {"source": f"{RIGHT}# {n}\n"}} for n in range(3)]
    async with client_of(settings) as client:
        made = (
            await client.post("/v1/batches", json={"tasks": {"t": TASK}, "items": items}, headers=tokens["ann"])
        ).json()
        for job_id in made["job_ids"]:
            ledger.finish(ledger.claim(job_id)[1], DONE, 60, 60, {})
        text = (await client.get(made["events"], headers=tokens["ann"])).text
        events = [part for part in text.split("\n\n") if part.startswith("id:")]
        assert len(events) == 3
        assert text.rstrip().endswith('event: end\ndata: {"total": 3}')
        first = events[0].split("\n")[0].removeprefix("id: ")
        rest = (await client.get(made["events"], headers={**tokens["ann"], "Last-Event-ID": first})).text
        assert rest.count("event: result") == 2
        assert rest.count("event: end") == 1
        assert (await client.get(made["events"], headers=tokens["bob"])).status_code == 404
        counts = (await client.get(f"/v1/batches/{made['batch_id']}", headers=tokens["ann"])).json()
        assert counts == {"batch_id": made["batch_id"], "total": 3, "finished": 3, "done": True}


async def test_the_same_key_with_other_items_is_another_batch(settings, tokens, store) -> None:
    async def submit(source: str) -> str:
        body = {"tasks": {"t": TASK}, "items": [{"task": "t", "candidate": {"source": source}}], "idempotency_key": "k"}
        answer = await client.post("/v1/batches", json=body, headers=tokens["ann"])
        return answer.json()["batch_id"]

    async with client_of(settings) as client:
        assert await submit(RIGHT) == await submit(RIGHT) != await submit(RIGHT + "# other\n")


async def test_a_batch_can_be_cancelled(settings, tokens, store) -> None:
    items = [{"task": "t", "candidate": {"source": RIGHT}}] * 3
    async with client_of(settings) as client:
        made = (
            await client.post("/v1/batches", json={"tasks": {"t": TASK}, "items": items}, headers=tokens["ann"])
        ).json()
        where = f"/v1/batches/{made['batch_id']}"
        assert (await client.delete(where, headers=tokens["bob"])).status_code == 404
        assert (await client.delete(where, headers=tokens["ann"])).json()["cancelled"] == 3
        assert (await client.get(where, headers=tokens["ann"])).json()["done"]
    assert await store.redis.hget(scripts.OPEN, "ann") == "0"


async def test_the_audit_log_names_who_and_what_but_no_source(settings, tokens, store, tmp_path) -> None:
    from dataclasses import replace

    async with client_of(settings) as client:
        await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
    text = (tmp_path / "audit").read_text()
    line = json.loads(text)
    assert (line["action"], line["principal"], line["kind"]) == ("submit", "ann", "evaluation")
    assert "relu(x)" not in text
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o600
    async with client_of(replace(settings, audit_sources=True)) as client:
        await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
    assert json.loads((tmp_path / "audit").read_text().splitlines()[1])["source"] == RIGHT


async def test_metrics_hold_what_happened(settings, tokens, store, ledger) -> None:
    async with client_of(settings) as client:
        await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
        text = (await client.get("/metrics", headers=tokens["boss"])).text
    assert "drk_gym_jobs_submitted_total 1.0" in text
    assert 'drk_gym_jobs{state="waiting"} 1.0' in text


async def test_openapi_shows_examples_that_are_accepted(settings, tokens, store) -> None:
    async with client_of(settings) as client:
        document = (await client.get("/openapi.json")).json()
        assert "/v1/evaluations" in document["paths"]
        properties = document["components"]["schemas"]["EvaluationBody"]["properties"]
        assert properties["task"]["examples"] == [TASK_EXAMPLE]
        body = {"task": TASK_EXAMPLE, "candidate": CANDIDATE_EXAMPLE}
        assert (await client.post("/v1/evaluations", json=body, headers=tokens["ann"])).status_code == 202


async def test_the_paper_tolerance_is_the_servers(settings, tokens, store) -> None:
    from dataclasses import replace

    async with client_of(replace(settings, tolerance="paper")) as client:
        await client.post("/v1/evaluations", json=BODY, headers=tokens["ann"])
    (key,) = await store.redis.keys("drk:task:*")
    assert json.loads(await store.redis.get(key))["tolerance"] == "paper"
