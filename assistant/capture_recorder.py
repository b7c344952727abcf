"""Records the calls of one module inside the user's own command (``--capture``); standard library and torch only.

:mod:`drk.assistant.capture_site` starts it once torch is imported. It watches objects of the target's class:
constructor arguments, shapes, dtypes, strides, mode, autocast and how often each kind of call occurs
(:mod:`drk.assistant.capture_values`). What it saw is written to ``calls-<pid>.json``: at each new kind of call, at
exit, and before ``os._exit``.

Left out: functions (only classes can be watched), objects made by ``copy`` or ``pickle`` (their constructor is not
called), calls inside ``torch.compile`` after the first one; counts of a process that is killed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

from drk.assistant.capture_values import ValueWriter, autocast_dtype

MAX_KINDS = 64


class Recorder:
    """What was seen of one class in this process."""

    def __init__(self, folder: Path, file: str, name: str, submodule: str) -> None:
        self.folder = folder
        self.file = file
        self.name = name
        self.submodule = submodule
        self.calls: dict[str, dict[str, Any]] = {}
        self.init: dict[str, Any] | None = None
        self.patched: set[type] = set()
        self.values = ValueWriter(folder)

    def is_target(self, kind: type) -> bool:
        """Whether ``kind`` is the target's class: same qualified name, same file."""
        if kind.__qualname__ != self.name:
            return False
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        return file is not None and os.path.realpath(file) == self.file

    def made(self, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a new object: its constructor's arguments, and from now on its calls."""
        kind = type(instance)
        if self.init is None:
            self.init = self.values.call_json(args, kwargs, data=False)
        if kind in self.patched:
            return
        self.patched.add(kind)
        original = kind.__call__

        def recording(module: Any, *call_args: Any, **call_kwargs: Any) -> Any:
            self.called(module, call_args, call_kwargs)
            return original(module, *call_args, **call_kwargs)

        kind.__call__ = recording

    def called(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of the target's object, or hook its submodule at the first one."""
        if not self.submodule:
            self.record(module, args, kwargs)
            return
        part = module.get_submodule(self.submodule)
        if not getattr(part, "_drk_recorded", False):
            part._drk_recorded = True
            part.register_forward_pre_hook(self.record, with_kwargs=True)

    def record(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count one call; write its kind down when it is new."""
        torch = sys.modules["torch"]
        if torch.compiler.is_compiling():
            return
        facts = {
            **self.values.call_json(args, kwargs, data=False),
            "training": bool(module.training),
            "grad": bool(torch.is_grad_enabled()),
            "autocast": autocast_dtype(torch),
        }
        key = json.dumps(facts, sort_keys=True)
        known = self.calls.get(key)
        if known is not None:
            known["count"] += 1
        elif len(self.calls) < MAX_KINDS:
            self.calls[key] = {**facts, **self.values.call_json(args, kwargs, data=True), "count": 1}
            self.write()

    def write(self) -> None:
        """Write everything seen so far, whole or not at all."""
        target = self.folder / f"calls-{os.getpid()}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps({"init": self.init, "calls": list(self.calls.values())}))
        partial.replace(target)


def watch(module_class: Any, recorder: Recorder) -> None:
    """Let ``torch.nn.Module`` tell the recorder of each new object of the target's class."""

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        instance: Any = object.__new__(kind)
        if recorder.is_target(kind):
            recorder.made(instance, args, kwargs)
        return instance

    module_class.__new__ = new


def before_hard_exit(write: Any) -> None:
    """Let ``os._exit``, which skips exit handlers, write first; forked children, which share nothing new, do not."""
    original, pid = os._exit, os.getpid()

    def _exit(status: int) -> Any:
        if os.getpid() == pid:
            write()
        original(status)

    os._exit = _exit


def start(folder: str, module: types.ModuleType) -> None:
    """Begin to watch; ``module`` is ``torch.nn.modules.module``."""
    recorder = Recorder(
        Path(folder),
        os.environ["DRK_CAPTURE_FILE"],
        os.environ["DRK_CAPTURE_NAME"],
        os.environ.get("DRK_CAPTURE_SUBMODULE", ""),
    )
    watch(module.Module, recorder)
    atexit.register(recorder.write)
    before_hard_exit(recorder.write)
