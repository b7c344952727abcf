"""Contestants of a measurement take turns on one processor core, and whoever is not timed stands still.

On an H200's host the core on which a process happens to sit decides more than the clocks do: medians of a hundred
pairs of the same code differed from run to run by 19 % at 10 us, 1.1 % at 100 us and 0.3 % at 5 ms; with both
processes on the same core, another one each round, by 1.7, 0.3 and 0.06 %, as much as their intervals say.

Who shares a core with the baseline could slow it by keeping that core busy. So every process of the others is stopped
while one is timed; that holds whatever a candidate leaves running on the host.

Left out: work that a candidate left running on the GPU. Threads that a contestant starts during its turn begin on the
core of the thread that starts them. Where the system refuses (another user's process), contestants stay where they
are; :attr:`TurnsOnCore.held` says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from drk.gym.sandbox import ProcessTable, descendants


class TurnsOnCore:
    """The process trees of a measurement's contestants, as they are when this is made.

    ``pids`` names the first process of each contestant; two names may share one. Leaving the context lets all go on,
    wherever they were before.
    """

    def __init__(self, pids: Mapping[str, int], cores: Iterable[int] | None = None) -> None:
        self.cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
        self.held = True
        self._random = random.SystemRandom()
        self._pids = dict(pids)
        table = ProcessTable(max_age_s=0.0).recent()
        roots = {pid for pid in pids.values() if pid}
        self._trees = {pid: [pid, *(process.pid for process in descendants(pid, table))] for pid in roots}
        self._before: dict[int, set[int]] = {}
        self._handles: dict[int, list[int]] = {}
        self._stopped: set[int] = set()

    def __enter__(self) -> Self:
        for root, tree in self._trees.items():
            self._handles[root] = []
            for pid in tree:
                with contextlib.suppress(OSError):
                    self._handles[root].append(os.pidfd_open(pid))
                for thread in _threads(pid):
                    with contextlib.suppress(OSError):
                        self._before[thread] = os.sched_getaffinity(thread)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        everywhere = set(self.cores)
        for root, tree in self._trees.items():
            for thread in (thread for pid in tree for thread in _threads(pid)):
                self._place(thread, self._before.get(thread, everywhere))
            self._tell(root, signal.SIGCONT)
            for handle in self._handles[root]:
                os.close(handle)
        self._handles.clear()

    def move(self) -> int:
        """Have all contestants run on one core, chosen at random; return it."""
        core = self._random.choice(self.cores)
        for thread in self._before:
            self._place(thread, {core})
        return core

    def turn_of(self, name: str) -> None:
        """Let this contestant run and stop the others."""
        mine = self._pids[name]
        for root in self._trees:
            if root != mine and root not in self._stopped:
                self._tell(root, signal.SIGSTOP)
                self._stopped.add(root)
        if mine in self._stopped:
            self._tell(mine, signal.SIGCONT)
            self._stopped.discard(mine)

    def _place(self, thread: int, cores: set[int]) -> None:
        with self._noting_refusals():
            os.sched_setaffinity(thread, cores)

    def _tell(self, root: int, number: int) -> None:
        for handle in self._handles.get(root, []):
            with self._noting_refusals():
                signal.pidfd_send_signal(handle, number)

    @contextlib.contextmanager
    def _noting_refusals(self) -> Iterator[None]:
        try:
            yield
        except ProcessLookupError:
            pass  # a process or thread that has ended
        except OSError:
            self.held = False


def _threads(pid: int) -> list[int]:
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []  # it has ended
