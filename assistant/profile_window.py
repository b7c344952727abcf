"""The window of steps that torch.profiler watches inside the user's process; runs there, without drk.

It begins with the first call of a module (anew, when the program begins to use its GPU after that, or when the first
step was compiling) and ends when enough steps were seen, when it lasts too long, or with the program. The trace is
written by torch as a Chrome trace, which the ``drk`` process reads; nothing is computed here.

What is watched: operators with shapes on the CPU, kernels and copies on a GPU. Python stacks are not recorded (they
would slow the program several times); :mod:`drk.assistant.profile_marks` supplies lines.

The window belongs to the thread that begins it: torch.profiler watches that thread (and autograd's) only, and only that
thread may end it. Calls in other threads are counted, and their time is not seen.

Limits: a program that already profiles itself is left alone, and one that starts to do so within our window meets
torch's own "already enabled" error.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from drk.assistant.profile_marks import MARK, LineTable, ModeSlot, compiles, range_maker

MANY = 20
"""Times the wanted steps that another root (a metric, a loss) may be called before it ends the window."""


def uses_gpu(torch: Any, told: bool | None) -> bool:
    """Whether this process works on a GPU; ``told`` is the answer of whoever knows."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_available()) if told is None else told


class Window:
    """One profiler window of this process. ``state``: ``waiting``, ``open``, ``closed`` or ``refused``.

    ``on_gpu`` says whether kernels are to be recorded; null asks torch when the window opens.
    """

    def __init__(
        self, folder: Path, lines: LineTable, steps: int, max_seconds: float, on_gpu: bool | None = None
    ) -> None:
        self.on_gpu = on_gpu
        self.folder = folder
        self.lines = lines
        self.steps = steps
        self.max_seconds = max_seconds
        self.state = "waiting"
        self.reason = ""
        self.trace = ""
        self.seen: dict[int, int] = {}
        self.first_step: dict[int, int] = {}
        self.slot: ModeSlot | None = None
        self.inside = False
        """Whether lines are marked inside of modules too; they are not where a module is compiled."""
        self.device = ""
        """What is watched beside the host: ``cuda`` or nothing."""
        self._compiled = False
        self._profiler: Any = None
        self._began = 0.0
        self._owner = 0
        self._range: Any = None

    def open(self, module: Any) -> None:
        """Start the profiler; ``module`` is called first."""
        torch = sys.modules["torch"]
        # not torch.profiler.profile, whose start imports all of torch._inductor: 900 modules, 3 s of CPU time
        self.device = "cuda" if uses_gpu(torch, self.on_gpu) else ""
        profiler = torch.autograd.profiler.profile(use_device=self.device or None, record_shapes=True, use_kineto=True)
        try:
            profiler.__enter__()
        except RuntimeError as error:
            self.state, self.reason = "refused", str(error).splitlines()[0]
            return
        self._profiler, self._range, self.state = profiler, range_maker(), "open"
        self._began, self._owner = time.monotonic(), threading.get_ident()
        self.inside = not compiles(module)
        if self.inside or self._compiled:  # not in the step that compiles: that would be slower still
            self.slot = ModeSlot(self.lines, inside=self.inside)

    def mark_step(self, root: int, number: int, module: Any, *, is_main: bool) -> None:
        """Note that a call of a root module begins; close the window when it has seen enough steps of the main one."""
        if self.state == "waiting":
            self.open(module)
        if self.state != "open" or threading.get_ident() != self._owner:
            return
        if self._is_unlike_what_follows(module, first=is_main and self.seen.get(root) == 1):
            self.start_over(module)
            if self.state != "open":
                return
        seen = self.seen[root] = self.seen.get(root, 0) + 1
        self.first_step.setdefault(root, number)
        late = time.monotonic() - self._began > self.max_seconds
        if (is_main and seen > self.steps) or seen > MANY * self.steps or (late and seen > 2):
            self.close()
            return
        with self._range(f"{MARK}s|{root}|{number}"):
            pass

    def _is_unlike_what_follows(self, module: Any, *, first: bool) -> bool:
        """Whether the window so far should be dropped: no kernels were watched, or its one step was compiling."""
        if not self.device and uses_gpu(sys.modules["torch"], self.on_gpu):
            return True
        if first and not self._compiled and compiles(module):
            self._compiled = True
            return True
        return False

    def start_over(self, module: Any) -> None:
        """Begin an open window anew: the program does something else from now on."""
        if self.state != "open" or threading.get_ident() != self._owner:
            return
        # torch does so too: beside CUDA graphs CUPTI may not be taken down and had again
        os.environ["TEARDOWN_CUPTI"] = "0"
        if self.slot is not None:
            self.slot.close()
            self.slot = None
        self._profiler.__exit__(None, None, None)
        self.seen.clear()
        self.first_step.clear()
        self.open(module)

    def range(self, name: str) -> Any:
        """Return an entered profiler range, or None when the window is not open."""
        if self.state != "open":
            return None
        made = self._range(MARK + name)
        made.__enter__()
        return made

    def begin_root(self) -> bool:
        """Let operators be marked with lines while a root module runs."""
        if self.slot is None or self.state != "open" or threading.get_ident() != self._owner:
            return False
        return self.slot.begin_call()

    def end_root(self, entered: bool) -> None:
        """Undo :meth:`begin_root`, or let the mode rest for the code between calls."""
        if entered and self.slot is not None:
            self.slot.end_call(rest=self.state == "open")

    def close(self) -> None:
        """Stop the profiler and write its trace."""
        if self.state != "open":
            return
        if threading.get_ident() != self._owner:
            self.state, self.reason = "refused", "the thread that called modules has ended, and with it the profiler"
            return
        self.state = "closed"
        if self.slot is not None:
            self.slot.close()
        name = f"trace-{os.getpid()}.json"
        try:
            self._profiler.__exit__(None, None, None)
            self._profiler.export_chrome_trace(str(self.folder / name))
        except (RuntimeError, OSError) as error:
            self.state, self.reason = "refused", str(error).splitlines()[0]
        else:
            self.trace = name
        self._profiler = None
