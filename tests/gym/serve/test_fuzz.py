"""Schemathesis on the API's own OpenAPI document, over HTTP: nothing that it makes up may end in a 5xx."""

from __future__ import annotations

import subprocess
import sys
import time

import httpx
import pytest
from gym_service import free_port
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from drk.gym.serve.settings import ServeSettings, to_environment

schemathesis = pytest.importorskip("schemathesis", reason="fuzzing needs schemathesis")

EXAMPLES = 4


@pytest.fixture(scope="module")
def api(valkey_url):
    """Start an API without workers: jobs expire soon, so that KernelGYM's routes, which wait, answer."""
    port = free_port()
    server = ServeSettings(
        redis_url=valkey_url, port=port, insecure_local=True, device_class="interpret", queue_s=0.2, body_bytes=10**6
    )
    process = subprocess.Popen([sys.executable, "-m", "drk.gym.serve.server"], env=to_environment(server))
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(url + "/health", timeout=5)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield schemathesis.openapi.from_url(url + "/openapi.json")
    process.terminate()
    process.wait(20)


@pytest.mark.slow
def test_no_request_breaks_the_server(api) -> None:
    tried = 0
    for found in api.get_all_operations():
        operation = found.ok()
        if operation.path == "/v1/drain":
            continue  # a server that drains refuses everything else
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            def ask(case) -> None:
                nonlocal tried
                tried += 1
                check(case)

            try:
                ask()
            except Unsatisfiable:
                continue  # nothing about this operation can be wrong
    assert tried > 100


def check(case) -> None:
    """Send one request, with short waits, and look at the status."""
    if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), float | int):
        case.body = {**case.body, "wait_s": min(case.body["wait_s"], 0.1)}
    if isinstance(case.query, dict) and "wait_s" in case.query:
        case.query = {**case.query, "wait_s": "0"}
    response = case.call(timeout=60)
    # /health and /ready say 503, which is the truth: there is no worker.
    expected = 503 if case.path in ("/health", "/ready") and case.method == "GET" else 499
    assert response.status_code <= expected, (case.method, case.path, response.status_code, response.text[:500])
