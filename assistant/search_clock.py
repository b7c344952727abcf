"""The wall time of one search: what its budget leaves, what an earlier start of the run used, and who stops it.

Several candidates may be judged at the same time, so what was used is the time that their judgements cover together,
not the sum of their seconds. ``stop`` ends whatever is awaited under the clock; so does the budget.

Left out: time that an earlier start of a run spent on proposing, or on judgements that it did not end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """A search ends: ``stop`` was set (``interrupted``) or the time is spent; ``why`` is for people."""

    def __init__(self, why: str, *, interrupted: bool = False) -> None:
        super().__init__(why)
        self.why = why
        self.interrupted = interrupted


async def until_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event, timeout_s: float | None = None) -> T:
    """Await ``work``; it is cancelled when ``stop`` is set or the time is over first.

    Raises:
        TimeoutError: it was cancelled so.
    """
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise TimeoutError("stopped")
    finally:
        for future in (task, stopped):
            future.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that ``spans`` (begin, end) cover together."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


class SearchClock:
    """Counts from when it was made."""

    def __init__(self, max_time_s: float, stop: asyncio.Event) -> None:
        self._max_time_s = max_time_s
        self._stop = stop
        self._began = time.monotonic()
        self._spans: list[tuple[float, float]] = []
        self._unplaced_s = 0.0

    def replay(self, seconds: float, ended_unix_s: float | None) -> None:
        """Count a judgement of an earlier start; one whose end is not known counts beside all others."""
        if ended_unix_s is None:
            self._unplaced_s += seconds
        else:
            self._spans.append((ended_unix_s - seconds, ended_unix_s))

    def left_s(self) -> float:
        """Seconds that the budget leaves."""
        used = time.monotonic() - self._began + covered_s(self._spans) + self._unplaced_s
        return max(0.0, self._max_time_s - used)

    def check(self, needed_s: float = 0.0) -> None:
        """Raise where nothing that takes ``needed_s`` can be begun any more.

        Raises:
            Stopped: stopped, spent, or nearly so.
        """
        left_s = self.left_s()
        if self._stop.is_set() or left_s <= 0:
            raise self._stopped()
        if left_s < needed_s:
            why = f"the time budget of {self._max_time_s:g} s is spent but for {left_s:.0f} s, too little for another"
            raise Stopped(f"{why} candidate")

    async def before_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work`` while there is time.

        Raises:
            Stopped: it was cancelled.
        """
        try:
            return await until_stopped(work, self._stop, self.left_s())
        except TimeoutError:
            raise self._stopped() from None

    def _stopped(self) -> Stopped:
        if self._stop.is_set():
            return Stopped("interrupted", interrupted=True)
        return Stopped(f"the time budget of {self._max_time_s:g} s is spent")
