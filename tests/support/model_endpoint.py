"""A local stand-in for an endpoint of chat completions: a real HTTP server on loopback with scripted behaviour.

It checks what a real one checks (path, key, JSON, roles), streams server-sent events when asked to, reports usage, and
knows ``Idempotency-Key``: a key that was answered is answered again from memory and not charged a second time.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A completion. ``content`` is sent as it is: text, null, or parts; ``chunk`` is the size of streamed pieces."""

    content: Any
    finish: str = "stop"
    usage: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 16
    completion_tokens: int = 20


@dataclass(frozen=True)
class Refusal:
    """An HTTP error."""

    status: int
    message: str = "refused"
    headers: Mapping[str, str] = field(default_factory=dict)
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Hang:
    """No answer for ``seconds``; then the connection is closed. ``drip`` sends a byte of body every 50 ms."""

    seconds: float = 5.0
    drip: bool = False


@dataclass(frozen=True)
class Drop:
    """The connection is closed. ``after`` sends so many characters of a body or stream first."""

    after: int | None = None


@dataclass(frozen=True)
class Garbage:
    """A 200 whose body is not a completion."""

    body: bytes = b"<html>hello</html>"
    kind: str = "application/json"


Behaviour = Answer | Refusal | Hang | Drop | Garbage
Script = Callable[[dict[str, Any], int], Behaviour]


class Endpoint:
    """The running server. ``requests`` are the bodies in order; ``paid`` counts charged answers by idempotency key."""

    def __init__(self, script: Script, key: str = "secret-key-of-the-test", port: int = 0) -> None:
        self.script = script
        self.key = key
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paid: dict[str, int] = {}
        self.model_lists = 0
        self.models_status = 200
        self._memory: dict[str, Answer] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), type("Bound", (Handler,), {"endpoint": self}))
        self.server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def decide(self, body: dict[str, Any], headers: dict[str, str]) -> Behaviour:
        """Choose the behaviour for one request, and charge for answers."""
        identity = headers.get("idempotency-key", "")
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            if identity in self._memory:
                return self._memory[identity]
        behaviour = self.script(body, number)
        if isinstance(behaviour, Answer):
            with self._lock:
                self.paid[identity] = self.paid.get(identity, 0) + 1
                if identity:
                    self._memory[identity] = behaviour
        return behaviour


class Handler(BaseHTTPRequestHandler):
    """Speaks the protocol."""

    protocol_version = "HTTP/1.1"
    endpoint: Endpoint

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _allowed(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.endpoint.key}":
            return True
        said = f"Incorrect API key provided: {self.headers.get('Authorization', '').removeprefix('Bearer ')}"
        self._refuse(Refusal(401, said, code="invalid_api_key"))
        return False

    def do_GET(self) -> None:
        self.endpoint.model_lists += 1
        if not self._allowed():
            return
        if self.endpoint.models_status != 200:
            self._refuse(Refusal(self.endpoint.models_status, "no such page"))
        else:
            self._send(200, {"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if not self._allowed():
            return
        if self.path != "/v1/chat/completions":
            self._refuse(Refusal(404, "no such page"))
            return
        body = json.loads(raw)
        assert body["model"]
        assert all(set(one) == {"role", "content"} for one in body["messages"])
        behaviour = self.endpoint.decide(body, {name.lower(): value for name, value in self.headers.items()})
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._behave(behaviour, body)

    def _behave(self, behaviour: Behaviour, body: dict[str, Any]) -> None:
        if isinstance(behaviour, Refusal):
            self._refuse(behaviour)
        elif isinstance(behaviour, Garbage):
            self._raw(200, behaviour.body, behaviour.kind)
        elif isinstance(behaviour, Hang):
            self._hang(behaviour)
        elif isinstance(behaviour, Drop):
            self._drop(behaviour, body)
        elif body.get("stream"):
            self._stream(behaviour, body)
        else:
            self._send(200, self._completion(behaviour, body))

    def _completion(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.content, **answer.extra}
        data = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"] + "-0001",
            "choices": [{"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}],
        }
        return {**data, "usage": self._usage(answer, body)} if answer.usage else data

    def _usage(self, answer: Answer, body: dict[str, Any]) -> dict[str, Any]:
        prompt = sum(len(one["content"]) for one in body["messages"]) // 4
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": prompt + answer.completion_tokens,
            "completion_tokens_details": {"reasoning_tokens": 5},
            "prompt_tokens_details": None,
        }

    def _stream(self, answer: Answer, body: dict[str, Any], stop_after: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        text = answer.content or ""
        shown = text if stop_after is None else text[:stop_after]
        for start in range(0, len(shown), answer.chunk):
            delta = {"content": shown[start : start + answer.chunk], **({"role": "assistant"} if not start else {})}
            self._event({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        if stop_after is not None:
            return
        self._event({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        if answer.usage and (body.get("stream_options") or {}).get("include_usage"):
            self._event({**base, "choices": [], "usage": self._usage(answer, body)})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
        self.wfile.flush()

    def _hang(self, hang: Hang) -> None:
        end = time.monotonic() + hang.seconds
        if hang.drip:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "1000000")
            self.end_headers()
        while time.monotonic() < end and not self.endpoint.closing.wait(0.05):
            if hang.drip:
                self.wfile.write(b" ")
                self.wfile.flush()
        self.close_connection = True

    def _drop(self, drop: Drop, body: dict[str, Any]) -> None:
        self.close_connection = True
        if drop.after is None:
            return
        if body.get("stream"):
            self._stream(Answer("x" * (drop.after + 100)), body, stop_after=drop.after)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(b"{" + b" " * drop.after)

    def _refuse(self, refusal: Refusal) -> None:
        error = {
            "message": refusal.message,
            "type": "invalid_request_error",
            "code": refusal.code,
            "param": refusal.param,
        }
        self._send(refusal.status, {"error": error}, refusal.headers)

    def _send(self, status: int, data: Any, headers: Mapping[str, str] | None = None) -> None:
        self._raw(status, json.dumps(data).encode(), "application/json", headers)

    def _raw(self, status: int, body: bytes, kind: str, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def serve(script: Script, **options: Any) -> Iterator[Endpoint]:
    """Run an endpoint while the block lasts."""
    endpoint = Endpoint(script, **options)
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.closing.set()
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()


def sequence(*behaviours: Behaviour) -> Script:
    """Behave so in turn; the last one goes on for ever."""
    return lambda _, number: behaviours[min(number, len(behaviours) - 1)]
