"""Marks that tie what torch.profiler sees to modules and source lines; runs in the user's process, without drk.

A mark is a profiler range whose name starts with ``drk|``: ``drk|m|7`` around a call of module 7, ``drk|l|12`` around
an operator called from line 12 of the line table, ``drk|s|7|3`` where the step 3 of root module 7 begins, ``drk|own``
around work of the recorder's own. Whatever lies inside a range, kernels launched from there included, belongs to it.

Lines come from a torch function mode, which sees operators (``x + y`` too) at the place where Python calls them; the
innermost frame outside of the standard library and installed packages counts. It stays off while modules run that are
compiled (``torch.compile`` guards on modes and would compile them anew); a compiled function is compiled once more.
"""

from __future__ import annotations

import contextlib
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

MARK = "drk|"


class LineTable:
    """Numbers for source lines of the user's own code; ``rows`` are (file, line) by number.

    What is the user's own: files that exist outside of Python's own folders and of installed packages.
    """

    def __init__(self, extra_library_roots: tuple[str, ...] = ()) -> None:
        paths = sysconfig.get_paths()
        own = str(Path(__file__).resolve().parent)
        named = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths}
        named |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
        torch = getattr(sys.modules.get("torch"), "__file__", None) or __file__
        named |= {str(Path(torch).resolve().parent), own, *extra_library_roots}
        self.library_roots = tuple(sorted(f"{root.rstrip('/')}/" for root in named))
        self.rows: list[tuple[str, int]] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._users: dict[str, bool] = {}

    def is_user(self, file: str) -> bool:
        """Whether ``file`` is the user's own code."""
        known = self._users.get(file)
        if known is None:
            known = file[:1] != "<" and not str(Path(file).absolute()).startswith(self.library_roots)
            known = known and (Path(file).is_file() or "ipykernel" in file)
            self._users[file] = known
        return known

    def line_of(self, frame: FrameType | None) -> int | None:
        """Return the number of the innermost user line at or above ``frame``, or None."""
        users = self._users
        while frame is not None:
            file = frame.f_code.co_filename
            known = users.get(file)
            if known is None:
                known = self.is_user(file)
            if known:
                return self.number(file, frame.f_lineno)
            frame = frame.f_back
        return None

    def number(self, file: str, line: int) -> int:
        """Return the number of a line, a new one where needed."""
        key = (file, line)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.rows)
            self.rows.append((str(Path(file).absolute()), line))
        return found


def range_maker() -> Any:
    """Return what makes a profiler range from a name: torch's fast one where it has it."""
    torch = sys.modules["torch"]
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return fast if fast is not None else torch.autograd.profiler.record_function


@contextlib.contextmanager
def own_work() -> Iterator[None]:
    """Mark what runs inside as the recorder's own, outside of any torch function mode."""
    torch = sys.modules["torch"]
    with range_maker()(f"{MARK}own"), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def line_mode(lines: LineTable) -> Any:
    """Return a torch function mode that marks each operator with its source line."""
    torch, make = sys.modules["torch"], range_maker()

    class LineMode(torch.overrides.TorchFunctionMode):  # type: ignore[name-defined,misc]
        """Marks operators with the line that calls them."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            if torch.compiler.is_compiling():  # a compiled function: traced without marks
                return func(*args, **(kwargs or {}))
            number = lines.line_of(sys._getframe(1))
            if number is None:
                return func(*args, **(kwargs or {}))
            with make(f"{MARK}l|{number}"):
                return func(*args, **(kwargs or {}))

    return LineMode()


def compiles(module: Any) -> bool:
    """Whether ``torch.compile`` is in use: for a part of ``module``, or anywhere in this process so far."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    if getattr(frames, "most_recent_backend", None) is not None:
        return True
    parts = [part for part in module.modules() if isinstance(part, frames.OptimizedModule)]
    return bool(parts) or any(getattr(part, "_compiled_call_impl", None) is not None for part in module.modules())


class ModeSlot:
    """Keeps the line mode on the stack of modes without disturbing the program's own.

    Modes form a stack, and whoever leaves a ``with`` block pops its top. Inside a root module's call ours nests by
    itself; between calls it may only lie at the bottom, below whatever the program enters and leaves. Where modules are
    compiled (``inside`` false) it lies there between calls only: optimizers and losses have their lines then.
    """

    def __init__(self, lines: LineTable, *, inside: bool = True) -> None:
        self._inside = inside
        self._mode = line_mode(lines)
        self._overrides = sys.modules["torch"].overrides
        self._resting = False

    def on_top(self) -> bool:
        """Whether our mode is on top."""
        stack = self._stack()
        return bool(stack) and stack[-1] is self._mode

    def _stack(self) -> list[Any]:
        current = getattr(self._overrides, "_get_current_function_mode_stack", None)
        return list(current()) if current is not None else [None]

    def begin_call(self) -> bool:
        """Before a root module's call: enter the mode unless it is in force; return whether :meth:`end_call` is due."""
        if not self._inside:
            self.close()
            return True
        if self._mode in self._stack():
            return False
        self._mode.__enter__()
        return True

    def end_call(self, *, rest: bool) -> None:
        """After it: leave the mode, or let it rest at the bottom (``rest``) where nothing else is on the stack."""
        if not self._inside and rest and not self._stack():
            self._mode.__enter__()
        if not self.on_top():
            return
        if rest and len(self._stack()) == 1:
            self._resting = True
            return
        self._mode.__exit__(None, None, None)

    def close(self) -> None:
        """Take a resting mode away; where something lies on top of it, it stays (and costs little) until later."""
        if self._resting and self.on_top():
            self._mode.__exit__(None, None, None)
            self._resting = False
