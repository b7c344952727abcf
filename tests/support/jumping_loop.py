"""An event loop whose clock jumps to the next timer where nothing else is to be done: half a minute takes no time.

Only for coroutines that wait on timers and on each other: the clock also jumps while a thread or a process works.
"""

from __future__ import annotations

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """Use it as ``loop_factory`` of :class:`asyncio.Runner`."""

    def __init__(self) -> None:
        self.ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self.ahead_s

    def _run_once(self) -> None:
        if not self._ready:
            due = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            if due:
                self.ahead_s += max(0.0, min(due) - self.time())
        super()._run_once()
