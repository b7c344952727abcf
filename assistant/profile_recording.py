"""What a recorder left behind, read and checked: modules, kinds of calls, lines, steps (one process each).

The files come from the user's own process (:mod:`drk.assistant.profile_hooks`); they are parsed by pydantic into
frozen values. Of several processes (ranks, helpers) the one whose window holds most steps is reported, and the number
of processes told.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drk.assistant.errors import TargetError

MAX_RECORDING_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RecordedKind:
    """One kind of call: arguments as recorded JSON, and under which conditions how often."""

    args: list[dict[str, Any]]
    kwargs: dict[str, dict[str, Any]]
    training: bool
    grad: bool
    autocast: str | None
    count: int
    ranges: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True)
class RecordedModule:
    """One module object; ``called_at`` is a number of the line table, ``init`` one of the recording's ``inits``."""

    id: int
    root: int
    parent: int | None
    path: str
    class_name: str
    file: str
    called_at: int | None
    calls: int
    other_calls: int = 0
    compiled: bool = False
    init: int | None = None
    kinds: tuple[RecordedKind, ...] = ()


@dataclass(frozen=True)
class RecordedInit:
    """Constructor arguments of one or more objects of a class."""

    file: str
    class_name: str
    args: list[dict[str, Any]]
    kwargs: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class RecordedWindow:
    """How the profiler window went: ``state`` ``closed`` means that there is a trace."""

    state: str
    reason: str = ""
    trace: str = ""
    first_step: dict[str, int] = field(default_factory=dict)
    lines: bool = False


@dataclass(frozen=True)
class Recording:
    """Everything one process told."""

    pid: int
    argv: list[str]
    cwd: str
    environment: dict[str, Any]
    modules: tuple[RecordedModule, ...]
    inits: tuple[RecordedInit, ...]
    lines: tuple[tuple[str, int], ...]
    steps: dict[str, list[int]]
    window: RecordedWindow
    notes: tuple[str, ...] = ()
    main: str = ""
    device_steps_us: dict[str, list[float]] = field(default_factory=dict)
    """By root: how long steps after the window took on a GPU, from the begin of one to that of the next."""

    @property
    def step_root(self) -> int | None:
        """The root module whose calls are steps: of those called more than once the one with most parts."""
        parts = Counter(module.root for module in self.modules)
        numbers = [int(number) for number, times in self.steps.items() if times]
        again = [number for number in numbers if len(self.steps[str(number)]) > 1] or numbers
        return max(again, key=lambda number: (parts[number], len(self.steps[str(number)]), -number), default=None)

    def step_starts_us(self) -> list[float]:
        """Return when the steps of :attr:`step_root` began, on the process's own clock."""
        root = self.step_root
        return [time / 1e3 for time in self.steps[str(root)]] if root is not None else []

    def module_names(self) -> dict[int, str]:
        """Return a unique name for each module: class of the root, ``#2`` for a second root of it, and the path."""
        seen: dict[str, int] = {}
        roots: dict[int, str] = {}
        names: dict[int, str] = {}
        taken: dict[str, int] = {}
        for module in self.modules:
            if module.root == module.id:
                count = seen[module.class_name] = seen.get(module.class_name, 0) + 1
                roots[module.id] = module.class_name if count == 1 else f"{module.class_name}#{count}"
            path = plain_path(module.path)
            name = ".".join(filter(None, [roots.get(module.root, "?"), path]))
            count = taken[name] = taken.get(name, 0) + 1
            names[module.id] = name if count == 1 else f"{name}#{count}"
        return names


def plain_path(path: str) -> str:
    """Return a module's path without what ``torch.compile`` puts in front."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def moved(recording: Recording, old: str, new: str) -> Recording:
    """Return the recording with files below the folder ``old`` named as those below ``new``."""

    def name(file: str) -> str:
        return new + file[len(old) :] if file.startswith(f"{old}/") else file

    return replace(
        recording,
        lines=tuple((name(file), line) for file, line in recording.lines),
        modules=tuple(replace(module, file=name(module.file)) for module in recording.modules),
        inits=tuple(replace(init, file=name(init.file)) for init in recording.inits),
    )


def read_recordings(folder: Path) -> list[Recording]:
    """Return what the processes of a command left in ``folder``, the most telling first.

    Raises:
        TargetError: kind ``capture``: a recording is malformed.
    """
    from pydantic import TypeAdapter, ValidationError

    adapter = TypeAdapter(Recording)
    found: list[Recording] = []
    for path in sorted(folder.glob("recording-*.json")):
        try:
            if path.stat().st_size > MAX_RECORDING_BYTES:
                raise TargetError("the recording is too large", kind="capture", file=str(path))
            found.append(adapter.validate_python(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, ValidationError) as error:
            raise TargetError("the recording cannot be read", kind="capture", cause=str(error)[:300]) from error
    return sorted(found, key=_tells, reverse=True)


def _tells(recording: Recording) -> tuple[bool, int, int]:
    steps = max((len(times) for times in recording.steps.values()), default=0)
    return recording.window.state == "closed", steps, sum(module.calls for module in recording.modules)


def read_faults(folder: Path) -> list[str]:
    """Return the recorders' own faults, last line each."""
    texts = [path.read_text(errors="replace").strip() for path in sorted(folder.glob("fault-*.txt"))]
    return [text.splitlines()[-1] for text in texts if text]
