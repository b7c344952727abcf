"""The GPU's own clock for steps outside of the profiler's window; runs in the user's process, without drk.

The host launches kernels and runs ahead, by whole steps where a step has few kernels: its clock then sees how long
launching took. A CUDA event at each step's begin is reached when the GPU gets there, so that the time between two of
them is what a step takes in the long run. Recording one costs microseconds and waits for nothing.

Left out: steps on several devices or in streams that do not wait for each other; the times of such are dropped where
CUDA says so.
"""

from __future__ import annotations

import itertools
from typing import Any

MAX_EVENTS = 200


def capturing_graph(torch: Any) -> bool:
    """Whether a CUDA graph is being captured: nothing may wait for the device then."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


class DeviceClock:
    """Events at the begins of steps, by root module."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._events: dict[int, list[Any]] = {}

    def tick(self, root: int) -> None:
        """A step of ``root`` begins."""
        events = self._events.setdefault(root, [])
        if len(events) >= MAX_EVENTS:
            return
        try:
            event = self._torch.cuda.Event(enable_timing=True)
            event.record()
        except RuntimeError:  # the program has broken its CUDA context, and will say so itself
            return
        events.append(event)

    def to_json(self) -> dict[str, list[float]]:
        """Return the steps' times in microseconds that are known by now; it does not wait for the others."""
        return {str(root): self._times_us(events) for root, events in self._events.items()}

    def _times_us(self, events: list[Any]) -> list[float]:
        try:
            over = list(itertools.takewhile(lambda event: event.query(), events))
            return [1e3 * before.elapsed_time(after) for before, after in itertools.pairwise(over)]
        except RuntimeError:
            return []
