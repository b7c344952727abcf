"""Replays of CUDA graphs as steps; runs in the user's process, without drk.

A captured module is not called again: the program replays the graph. Here a replay counts as a call of the outermost
module that was called while the graph was captured, its kernels belong to that module, and their line is the one that
replays. The profiler's window begins anew with the first replay, since the calls before it were of another kind.

Left out: what the module's parts take inside of a replay; graphs that are captured without a module's call, and those
of ``torch.cuda.make_graphed_callables`` and ``torch.compile``, which are replayed inside of a module's call or of its
backward and belong to it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

WRAPPED = ("capture_begin", "capture_end", "replay")


class GraphWatch:
    """Which module each graph is of. ``recorder`` is the :class:`drk.assistant.profile_hooks.ProfileRecorder`."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._roots: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._capturing: Any = None
        self._replayed = False
        self._restore: Callable[[], None] | None = None

    def note(self, entry: Any) -> None:
        """A root module is called while a graph is captured: the graph is that module's, of several the largest's."""
        graph = self._capturing
        if graph is None:
            return
        known = self._roots.get(graph)
        if known is None or entry.parts > known.parts:
            self._roots[graph] = entry

    def watch(self, graph_class: Any) -> None:
        """Wrap the class ``torch.cuda.CUDAGraph``, once; what stands in for it where there is no GPU is left alone."""
        if self._restore is not None or not all(hasattr(graph_class, name) for name in WRAPPED):
            return
        begin, end, replay = graph_class.capture_begin, graph_class.capture_end, graph_class.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._capturing = graph
            return begin(graph, *args, **kwargs)

        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._capturing = None
            return end(graph, *args, **kwargs)

        def replayed(graph: Any) -> Any:
            entry = self._roots.get(graph)
            if entry is None or not self._recorder.active:
                return replay(graph)
            ranges = self._begin(entry, sys._getframe(1))
            try:
                return replay(graph)
            finally:
                self._end(ranges)

        def restore() -> None:
            graph_class.capture_begin, graph_class.capture_end, graph_class.replay = begin, end, replay

        graph_class.capture_begin, graph_class.capture_end, graph_class.replay = capture_begin, capture_end, replayed
        self._restore = restore

    def restore(self) -> None:
        """Take the wraps off again."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _begin(self, entry: Any, frame: Any) -> list[Any]:
        """A replay begins: a step, unless it lies in a module's call. Return the entered profiler ranges."""
        recorder, window = self._recorder, self._recorder.window
        try:
            if not recorder.stacks.__dict__.get("stack"):
                if not self._replayed:
                    self._replayed = True
                    window.start_over(entry.ref())
                entry.calls += 1
                recorder.tick(entry, entry.ref())
            line = recorder.lines.line_of(frame)
            marks = [entry.mark, *([f"l|{line}"] if line is not None else [])]
            return [made for made in map(window.range, marks) if made is not None]
        except Exception:  # noqa: BLE001 - our fault must not become the program's
            recorder.fault()
            return []

    @staticmethod
    def _end(ranges: list[Any]) -> None:
        for made in reversed(ranges):
            made.__exit__(None, None, None)
