"""The whole service, real: ``drk gym up`` judging under the interpreter, and what survives being killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from gym_service import REFERENCE, RIGHT, SLEEPER, TASK, WRONG, GymService, command_of

KINDS = ("zygote", "worker", "server", "valkey")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def service() -> Iterator[GymService]:
    with GymService("--insecure-local", "--workers", "2", "--slots", "2", "--seeds", "2") as running:
        running.wait_ready(workers=2)
        yield running


@pytest.fixture
def client(service) -> Iterator[httpx.Client]:
    service.wait_ready(workers=2)
    with httpx.Client(base_url=service.url, timeout=120) as opened:
        yield opened


def until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)


def start(client: httpx.Client, source: str, **fields: object) -> str:
    body = {"task": TASK, "candidate": {"source": source}, "cache": False, **fields}
    return client.post("/v1/evaluations", json=body).raise_for_status().json()["job_id"]


def state(client: httpx.Client, job_id: str) -> str:
    return client.get(f"/v1/evaluations/{job_id}").json()["state"]


def result(client: httpx.Client, job_id: str) -> dict:
    return client.get(f"/v1/evaluations/{job_id}", params={"wait_s": 90}).json()


def test_right_and_wrong_are_told_apart(client) -> None:
    right, wrong, broken = (start(client, source) for source in (RIGHT, WRONG, "def"))
    verdict = result(client, right)["verdict"]
    assert (verdict["status"], verdict["correct"], verdict["evidence"]) == ("accepted", True, "interpreter")
    assert (verdict["speedups"], verdict["sandbox_level"]) == (None, "standard")
    assert result(client, wrong)["verdict"]["status"] == "rejected"
    error = result(client, broken)["verdict"]["error"]
    assert (error["stage"], error["kind"], error["line"]) == ("parse", "syntax-error", 1)


def test_a_reference_that_cannot_be_judged_is_a_fault_of_the_task(client) -> None:
    task = {**TASK, "files": {"model.py": REFERENCE.replace("torch.relu(x)", "nonsense")}}
    body = {"task": task, "candidate": {"source": RIGHT}, "wait_s": 90}
    found = client.post("/v1/evaluations", json=body).json()
    assert (found["state"], found["verdict"]) == ("failed", None)
    assert found["error"]["infrastructure"] is False
    assert (found["error"]["file"], found["error"]["line"]) == ("model.py", 6)


def test_a_profile_shows_shapes_and_estimates(client) -> None:
    found = client.post("/v1/profiles", json={"task": TASK, "wait_s": 90}).json()
    assert found["state"] == "done"
    assert found["report"]["estimate"]["size_bytes"] > 0
    assert found["report"]["measured"] is None
    assert found["report"]["inspection"]["inputs"][0]["shape"] == [8, 16]


def test_running_and_waiting_jobs_are_cancelled(client) -> None:
    running = [start(client, SLEEPER + f"# {n}\n") for n in range(4)]
    until(lambda: [state(client, job) for job in running] == ["running"] * 4)
    waiting = start(client, RIGHT)
    assert client.delete(f"/v1/evaluations/{waiting}").json() == {
        "job_id": waiting,
        "was": "waiting",
        "cancelled": True,
    }
    began = time.monotonic()
    for job in running:
        assert client.delete(f"/v1/evaluations/{job}").json()["was"] == "running"
    for job in [*running, waiting]:
        assert result(client, job)["state"] == "cancelled"
    assert time.monotonic() - began < 40, "a sleeping candidate was killed, not waited for"
    assert result(client, start(client, RIGHT))["verdict"]["status"] == "accepted"


def test_deadlines_on_running_and_waiting(client) -> None:
    slow = start(client, SLEEPER, run_deadline_s=5)
    found = result(client, slow)
    assert (found["state"], found["verdict"]["status"]) == ("done", "failed")
    assert found["verdict"]["error"]["kind"] == "timeout"
    holding = [start(client, SLEEPER + f"# {n}\n", run_deadline_s=20) for n in range(4)]
    until(lambda: [state(client, job) for job in holding] == ["running"] * 4)
    late = start(client, RIGHT, queue_deadline_s=0.5)
    assert result(client, late)["error"]["code"] == "queue-deadline"
    for job in holding:
        client.delete(f"/v1/evaluations/{job}")


def test_kernelgym_clients_are_answered_in_their_form(client) -> None:
    reference = (
        REFERENCE + "\ndef get_inputs():\n    return [torch.randn(8, 16)]\n\ndef get_init_inputs():\n    return []\n"
    )
    request = {"task_id": "t-1", "reference_code": reference, "kernel_code": RIGHT, "num_warmup": 3, "uuid": "u"}
    found = client.post("/evaluate", json=request).json()
    assert (found["status"], found["compiled"], found["correctness"]) == ("completed", True, True)
    assert found["decoy_kernel"] is True, "pure torch launches no kernel of its own"
    assert found["speedup"] is None, "there is no GPU: not measured"
    assert client.get("/results/t-1").json()["status"] == "completed"
    assert client.get("/status/t-1").json()["status"] == "completed"
    wrong = client.post("/evaluate", json={**request, "kernel_code": WRONG}).json()
    assert (wrong["status"], wrong["correctness"]) == ("completed", False), "a known task_id with other code"
    assert (wrong["error_code"], wrong["speedup"]) == ("CORRECTNESS_ERROR", 0.0)
    other = reference.replace("Model", "Net")
    batch = {
        "batch_id": "b",
        "tasks": [
            {**request, "task_id": "b-1"},
            {**request, "task_id": "b-2", "kernel_code": "class ModelNew(: pass"},
            {
                **request,
                "task_id": "b-3",
                "reference_code": other,
                "entry_point": "Net",
                "kernel_code": RIGHT.replace("ModelNew", "NetNew"),
            },
        ],
    }
    answer = client.post("/evaluate/batch", json=batch).json()
    assert [row["status"] for row in answer["results"]] == ["completed", "failed", "completed"]
    assert answer["results"][1]["error_code"] == "SYNTAX_ERROR"
    assert answer["results"][2]["correctness"] is True
    assert (answer["total_tasks"], answer["completed_tasks"], answer["failed_tasks"]) == (3, 2, 1)
    flow = client.post("/workflow/submit", json={"workflow": "kernelbench", "payload": request}).json()
    assert flow["result"]["correctness"] is True
    assert client.post("/workflow/submit", json={"workflow": "kernel_simple", "payload": {}}).status_code == 400
    assert client.post("/evaluate", json={"task_id": "x"}).status_code == 400
    assert client.get("/workers/status").json()["total_workers"] == 2


def test_a_killed_workers_job_moves_on(client, service) -> None:
    jobs = [start(client, SLEEPER + f"# {n}\n", run_deadline_s=4) for n in range(2)]
    until(lambda: "running" in [state(client, job) for job in jobs])
    for pid in service.workers():
        os.kill(pid, signal.SIGKILL)
    for job in jobs:
        found = result(client, job)
        assert (found["state"], found["verdict"]["error"]["kind"]) == ("done", "timeout")
    assert max(result(client, job)["attempts"] for job in jobs) >= 2


def test_a_killed_zygote_api_and_valkey_lose_nothing(client, service) -> None:
    jobs = [start(client, RIGHT + f"# {n}\n") for n in range(6)]
    for pid in service.zygotes():
        os.kill(pid, signal.SIGKILL)
    for pid in service.valkey():
        os.kill(pid, signal.SIGKILL)
    until(service.valkey)
    for pid in service.api():
        os.kill(pid, signal.SIGKILL)
    service.wait_ready(workers=2)
    found = [result(client, job) for job in jobs]
    assert [row["state"] for row in found] == ["done"] * 6, [row["error"] for row in found]
    assert {row["verdict"]["status"] for row in found} == {"accepted"}, found
    status = client.get("/v1/status").json()
    assert (status["waiting"], status["running"], status["you"]["open"]) == (0, 0, 0)


def test_everything_dies_with_the_parent() -> None:
    with GymService("--insecure-local") as service:
        pids = [*service.workers(), *service.zygotes(), *service.api(), *service.valkey()]
        words = {pid: command_of(pid) for pid in pids}
        assert {kind for kind in KINDS for word in words.values() if kind in word} == set(KINDS)
        service.process.kill()
        service.process.wait()
        until(lambda: not [pid for pid in pids if command_of(pid) == words[pid]], 30)
