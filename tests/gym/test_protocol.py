"""Frames: round trips, descriptors, and everything that must be refused."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drk.gym import protocol
from drk.gym.errors import ProtocolError
from drk.gym.protocol import AsyncChannel, Channel

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_round_trip(message: dict[str, object]) -> None:
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send(message)
        assert Channel(right).receive() == (message, [])


def test_descriptors_arrive_with_their_frame() -> None:
    left, right = socket.socketpair()
    read_fd, write_fd = os.pipe()
    with left, right:
        Channel(left).send({"first": True}, (write_fd,))
        Channel(left).send({"second": True})
        message, fds = Channel(right).receive()
        assert message == {"first": True} and len(fds) == 1
        os.write(fds[0], b"through")
        assert os.read(read_fd, 7) == b"through"
        assert Channel(right).receive() == ({"second": True}, [])
        for fd in (read_fd, write_fd, fds[0]):
            os.close(fd)


def test_frame_larger_than_socket_buffer_with_descriptor() -> None:
    left, right = socket.socketpair()
    message = {"text": "x" * 3_000_000}
    read_fd, write_fd = os.pipe()
    with left, right:
        sender = threading.Thread(target=Channel(left).send, args=(message, (write_fd,)))
        sender.start()
        received, fds = Channel(right).receive()
        sender.join()
    assert received == message and len(fds) == 1
    for fd in (read_fd, write_fd, fds[0]):
        os.close(fd)


def test_too_long_to_send() -> None:
    with pytest.raises(ProtocolError, match="exceeds the limit"):
        protocol.encode({"text": "x" * (protocol.MAX_FRAME_BYTES + 1)})


@pytest.mark.parametrize("body", [b"nonsense", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        protocol.decode(body)


async def test_async_side_refuses_huge_announcements() -> None:
    left, right = socket.socketpair()
    channel = AsyncChannel(right)
    left.sendall(struct.pack(">I", 2**32 - 1))
    with pytest.raises(ProtocolError, match="announces"):
        await channel.receive()
    left.close()
    channel.close()


async def test_async_side_sees_the_end() -> None:
    left, right = socket.socketpair()
    channel = AsyncChannel(right)
    left.sendall(b"\x00\x00")
    left.close()
    with pytest.raises(EOFError):
        await channel.receive()
    channel.close()


async def test_async_talks_to_blocking() -> None:
    left, right = socket.socketpair()
    channel = AsyncChannel(right)
    blocking = Channel(left)
    await channel.send({"ask": 1})
    message, _ = await asyncio.to_thread(blocking.receive)
    assert message == {"ask": 1}
    await asyncio.to_thread(blocking.send, {"answer": 2})
    assert await channel.receive() == {"answer": 2}
    left.close()
    channel.close()
