"""Where a reference launches its kernels: scopes named after its parts and lines, which a profiler hangs times on.

While :func:`place_scopes` is open, each call of a part opens a scope named after the part's path, and each call of a
PyTorch function one named after the innermost line of the user's files that led to it. ``enter`` and ``leave`` are
Proton's; what they do is none of this module's business. Shares of device time do not change: only the host does more.

Only for profiles, never while anything is timed. Honest limits: work that other threads launch has no place, and what
``torch.compile`` made of a part belongs to the line that called it; whatever is being compiled is left alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MODULE = "drk-module-"
LINE = "drk-line-"
MAX_PARTS = 2000

Enter = Callable[[str], Any]
Leave = Callable[[], Any]


@contextlib.contextmanager
def place_scopes(module: torch.nn.Module, root: Path, enter: Enter, leave: Leave) -> Iterator[None]:
    """Open a scope around each call of a part of ``module`` and of a function from a line below ``root``."""
    handles: list[Any] = []
    try:
        for path, part in list(module.named_modules())[:MAX_PARTS]:
            handles += _watch(part, path, enter, leave)
        with _Lines(root, enter, leave):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(part: torch.nn.Module, path: str, enter: Enter, leave: Leave) -> list[Any]:
    def begin(_part: Any, _args: Any) -> None:
        if not torch.compiler.is_compiling():
            enter(f"{MODULE}{path}")

    def end(_part: Any, _args: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave()

    return [part.register_forward_pre_hook(begin), part.register_forward_hook(end, always_call=True)]


class _Lines(TorchFunctionMode):
    """Opens a scope named after the user's line around each PyTorch function."""

    def __init__(self, root: Path, enter: Enter, leave: Leave) -> None:
        super().__init__()
        self._root = f"{root}{os.sep}"
        self._enter = enter
        self._leave = leave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        line = "" if torch.compiler.is_compiling() else self._user_line()
        if not line:
            return func(*args, **(kwargs or {}))
        self._enter(f"{LINE}{line}")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._leave()

    def _user_line(self) -> str:
        """Return the innermost line of the user's files as ``path:number``, or an empty string."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(self._root):
                return f"{file.removeprefix(self._root)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""
