"""What a connection may cost before anything is known about it: bytes of body, and time for headers and body.

The body is counted as it arrives (a wrong or missing Content-Length changes nothing). Uvicorn has no limit for slow
headers, so its HTTP/1.1 protocol gets one here. Bodies are read whole before the application runs, which also frees
it from half-read requests; who shows no valid token may send little, so that strangers cannot fill the memory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from drk.gym.serve.refusals import Refusal

BODY_BYTES = "drk.body_bytes"
"""Where a request's scope says how large its body is."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})


STRANGERS_BYTES = 64 * 1024


class BodyLimit:
    """ASGI middleware: 413 for too many bytes, 408 for too slow ones, 401 for many of somebody without a token.

    ``knows`` says whether a token is valid; null where nobody needs one.
    """

    def __init__(
        self,
        app: ASGIApp,
        size_bytes: int,
        seconds: float,
        *,
        loopback_only: bool = False,
        knows: Callable[[str], bool] | None = None,
    ) -> None:
        self._app = app
        self._size_bytes = size_bytes
        self._knows = knows
        self._seconds = seconds
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body, then let the application have the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_origin(headers)
            size_bytes, excess = self._allowed(headers)
            length = headers.get(b"content-length", b"0")
            if length.isdigit() and int(length) > size_bytes:
                raise excess
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive, size_bytes, excess)
        except TimeoutError:
            await refuse(send, Refusal("too_slow", f"the request's body took longer than {self._seconds:g} s"))
            return
        except Refusal as refusal:
            await refuse(send, refusal)
            return
        if body is None:
            return  # the client went away
        scope[BODY_BYTES] = len(body)
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    def _allowed(self, headers: Mapping[bytes, bytes]) -> tuple[int, Refusal]:
        """Return how long the body may be, and what to say to a longer one."""
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        known = self._knows is None or (kind.lower() == "bearer" and self._knows(token.strip()))
        if known or self._size_bytes <= STRANGERS_BYTES:
            limit = self._size_bytes
            return limit, Refusal("too_large", f"the request's body is larger than {limit} bytes")
        return STRANGERS_BYTES, Refusal("unauthorized", "a valid bearer token is needed for a body of this size")

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        if self._loopback_only:
            # Without tokens, a web page could reach this server through a name that it points at loopback.
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name not in LOOPBACK_HOSTS:
                raise Refusal("forbidden", "this server answers to loopback names only", help="use 127.0.0.1")
            if b"origin" in headers:
                raise Refusal("forbidden", "this server is not for web pages", help="start it with tokens")

    async def _read(self, receive: Receive, limit_bytes: int, excess: Refusal) -> bytes | None:
        parts: list[bytes] = []
        size_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size_bytes += len(part)
            if size_bytes > limit_bytes:
                raise excess
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)


async def refuse(send: Send, refusal: Refusal) -> None:
    """Answer with an error and close the connection, since the rest of the request is not read."""
    body = json.dumps(refusal.body()).encode()
    headers = {**refusal.headers(), "Content-Type": "application/json", "Connection": "close"}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    raw.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def protocol_with_deadline(header_s: float) -> type[H11Protocol]:
    """Return uvicorn's HTTP/1.1 protocol, but closing connections on which headers take longer than ``header_s``.

    That holds for the first request of a connection, from its beginning, and for later ones, from their first byte.
    """

    class Deadline(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._deadline = self.loop.call_later(header_s, self._give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()
            elif self._deadline is None and self.conn.trailing_data[0]:
                self._deadline = self.loop.call_later(header_s, self._give_up)

        def _give_up(self) -> None:
            self._deadline = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                answer = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                self.transport.write(answer)
                self.transport.close()

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

    return Deadline
