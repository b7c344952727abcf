"""What a real server does with connections that are slow, oversized or malformed, and where it keeps its secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from gym_service import RIGHT, TASK, free_port

from drk.gym.serve.settings import VARIABLE, ServeSettings, to_environment


@contextmanager
def api_process(valkey_url: str) -> Iterator[tuple[int, int]]:
    """Start an API process with short deadlines; give its port and pid."""
    port = free_port()
    settings = ServeSettings(
        redis_url=valkey_url, port=port, insecure_local=True, header_s=1.0, body_s=1.0, body_bytes=10_000
    )
    process = subprocess.Popen([sys.executable, "-m", "drk.gym.serve.server"], env=to_environment(settings))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health", timeout=5)
            break
        except httpx.TransportError:
            time.sleep(0.1)
    yield port, process.pid
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def server(valkey_url) -> Iterator[tuple[int, int]]:
    with api_process(valkey_url) as found:
        yield found


def talk(port: int, *parts: bytes) -> bytes:
    """Send ``parts`` and return everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while True:
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                return found
            if not data:
                return found
            found += data


HEAD = b"POST /v1/evaluations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def test_headers_that_never_end(server) -> None:
    assert talk(server[0], b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ").startswith(b"HTTP/1.1 408")
    assert talk(server[0]).startswith(b"HTTP/1.1 408")


def test_later_headers_that_never_end(server) -> None:
    whole = b"GET /ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server[0]), timeout=20) as connection:
        connection.sendall(whole)
        answer = connection.recv(65536)
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
        connection.sendall(whole[:-4])
        found = b""
        while data := connection.recv(65536):
            found += data
    assert found.startswith(b"HTTP/1.1 408")


def test_a_body_that_never_ends(server) -> None:
    answer = talk(server[0], HEAD + b"Content-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"too_slow" in answer


def test_a_body_that_is_too_large_is_refused_before_it_comes(server) -> None:
    answer = talk(server[0], HEAD + b"Content-Length: 10001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()
    chunk = b"1388\r\n" + b"x" * 5000 + b"\r\n"
    answer = talk(server[0], HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk)
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/x\r\n\r\n",
        HEAD + b"Content-Length: x\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
)
def test_what_is_no_http_is_a_bad_request(server, request_bytes) -> None:
    assert talk(server[0], request_bytes).startswith(b"HTTP/1.1 400")


def test_the_server_still_works(server) -> None:
    assert httpx.get(f"http://127.0.0.1:{server[0]}/health").json()["redis"] is True


def test_a_foreign_host_name_is_refused(server) -> None:
    answer = httpx.get(f"http://127.0.0.1:{server[0]}/v1/status", headers={"Host": "gym.example"})
    assert answer.status_code == 403
    answer = httpx.get(f"http://127.0.0.1:{server[0]}/v1/status", headers={"Origin": "http://127.0.0.1:3000"})
    assert answer.status_code == 403


def test_who_waits_is_answered_when_the_server_ends(valkey_url) -> None:
    body = json.dumps({"task": TASK, "candidate": {"source": RIGHT}, "wait_s": 600}).encode()
    with (
        api_process(valkey_url) as (port, pid),
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
    ):
        connection.sendall(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        deadline = time.monotonic() + 60
        while httpx.get(f"http://127.0.0.1:{port}/v1/status").json()["waiting"] < 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(pid, signal.SIGTERM)
        assert connection.recv(65536).startswith(b"HTTP/1.1 202")


def test_secrets_are_on_no_command_line_and_cannot_be_inspected(server, valkey_url) -> None:
    password = valkey_url.split(":", 2)[2].partition("@")[0]
    assert len(password) > 20
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                assert password.encode() not in (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
    # Undumpable: its files in /proc belong to root, and only root (or CAP_SYS_PTRACE) reads its environment.
    assert os.stat(f"/proc/{server[1]}/environ").st_uid == 0
    assert VARIABLE not in os.environ
