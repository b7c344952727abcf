"""Memory that the Judge owns and a Runner writes tensors into: one memfd per Runner.

The Judge sizes it, the Runner writes with ``pwrite``, the Judge reads with ``pread`` into memory of its own before it
looks at a single value. It never maps a Runner's file: a Runner that shrinks the file yields a short read (an error of
its own), not a SIGBUS in the Judge. Weights use a second memfd that is sealed against writing once it is filled.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

from drk.gym.errors import ProtocolError

_ADD_SEALS = 1033
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 1, 2, 4, 8
ALIGNMENT = 64
_CHUNK_BYTES = 2**30


class Arena:
    """A memfd, named for ``/proc``, that is closed with :meth:`close`."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Make room for ``size_bytes``; memory is only used where something is written."""
        if size_bytes > self.size_bytes:
            os.ftruncate(self.fd, size_bytes)
            self.size_bytes = size_bytes

    def seal(self) -> None:
        """Forbid any further change, for everyone who holds the descriptor."""
        fcntl.fcntl(self.fd, _ADD_SEALS, _SEAL_WRITE | _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_exactly(fd: int, offset: int, count: int) -> bytearray:
    """Copy ``count`` bytes at ``offset`` out of a memfd.

    Raises:
        ProtocolError: the file is shorter than was agreed.
    """
    buffer = bytearray(count)
    view = memoryview(buffer)
    done = 0
    while done < count:
        got = os.preadv(fd, [view[done : done + _CHUNK_BYTES]], offset + done)
        if got <= 0:
            raise ProtocolError(f"the shared memory ends after {offset + done} of {offset + count} bytes")
        done += got
    return buffer


def write_exactly(fd: int, offset: int, data: Any) -> None:
    """Write a bytes-like object at ``offset``."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + _CHUNK_BYTES], offset + done)


def map_read_only(fd: int, count: int) -> mmap.mmap:
    """Map a sealed memfd (weights) for reading; safe because nobody can shrink it."""
    return mmap.mmap(fd, count, prot=mmap.PROT_READ)


def aligned(offset: int) -> int:
    """Return the next multiple of :data:`ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
