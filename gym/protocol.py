"""Frames between Judge, zygote and Runners: length-limited JSON over one Unix socket, descriptors beside it.

A frame is a 4-byte big-endian length and that many bytes of UTF-8 JSON. Tensors never travel in frames: they go through
a memfd that the Judge owns (:mod:`drk.gym.arena`). What a Runner sends is untrusted: lengths are limited, JSON is the
only form, and nothing is ever unpickled. The blocking half serves zygote and Runners, the async half the Judge.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from drk.gym.errors import ProtocolError

MAX_FRAME_BYTES = 16 * 2**20
MAX_FDS = 8
_HEADER = struct.Struct(">I")


def encode(message: dict[str, Any]) -> bytes:
    """Return the frame of ``message``.

    Raises:
        ProtocolError: it is larger than a frame may be.
    """
    body = json.dumps(message, separators=(",", ":")).encode("utf-8", "backslashreplace")
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """Parse a frame's body.

    Raises:
        ProtocolError: not a JSON object.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a frame does not hold JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a frame does not hold a JSON object")
    return message


def frame_length(header: bytes) -> int:
    """Return the body length that ``header`` announces.

    Raises:
        ProtocolError: longer than the limit.
    """
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame announces {length} bytes, the limit is {MAX_FRAME_BYTES}")
    return int(length)


class Channel:
    """The blocking half, for processes that do one thing at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send one frame; ``fds`` ride on its first byte."""
        frame = encode(message)
        if fds:
            sent = socket.send_fds(self.sock, [frame], list(fds))
            frame = frame[sent:]
        if frame:
            self.sock.sendall(frame)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Receive one frame and the descriptors that came with it.

        Raises:
            EOFError: the other side has gone.
            ProtocolError: see :func:`decode` and :func:`frame_length`.
        """
        fds: list[int] = []
        header = self._exactly(_HEADER.size, fds)
        body = self._exactly(frame_length(header), fds)
        return decode(body), fds

    def _exactly(self, count: int, fds: list[int]) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            data, new_fds, _flags, _address = socket.recv_fds(self.sock, count - len(parts), MAX_FDS)
            fds.extend(new_fds)
            if not data:
                raise EOFError("the other side closed the channel")
            parts += data
        return bytes(parts)


class AsyncChannel:
    """The Judge's half, on the running event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock

    async def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send one frame; ``fds`` ride on its first byte."""
        frame = encode(message)
        if fds:
            sent = socket.send_fds(self.sock, [frame], list(fds))
            frame = frame[sent:]
        if frame:
            await asyncio.get_running_loop().sock_sendall(self.sock, frame)

    async def receive(self) -> dict[str, Any]:
        """Receive one frame.

        Raises:
            EOFError: the other side has gone.
            ProtocolError: see :func:`decode` and :func:`frame_length`.
        """
        header = await self._exactly(_HEADER.size)
        return decode(await self._exactly(frame_length(header)))

    async def _exactly(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < count:
            data = await loop.sock_recv(self.sock, min(count - len(parts), 2**20))
            if not data:
                raise EOFError("the other side closed the channel")
            parts += data
        return bytes(parts)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
