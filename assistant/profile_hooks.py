"""Watches every call of every ``nn.Module`` in the user's unchanged program; runs in its process, without drk.

Wrapped are ``Module.__call__`` (what is called with what, how often, from where, inside what) and ``Module.__new__``
(constructor arguments of the user's own classes). The first steps run under torch.profiler
(:mod:`drk.assistant.profile_window`); afterwards only counting goes on. What was seen is written to
``recording-<pid>.json``: when the window closes, every few seconds, at exit, on SIGTERM and before ``os._exit``.

A step is a call of the main root module: of the modules that are outermost on the stack, the one with most parts.
Forked children (DataLoader
workers) are not watched. Nothing that goes wrong here reaches the program: the recorder notes it and stops.

Left out: modules called by ``forward`` directly count as their caller; what ``torch.compile`` compiled is one module.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

from drk.assistant.capture_recorder import before_hard_exit
from drk.assistant.capture_values import ValueWriter, autocast_dtype, value_range
from drk.assistant.profile_clock import DeviceClock, capturing_graph
from drk.assistant.profile_entry import Entry
from drk.assistant.profile_graphs import GraphWatch
from drk.assistant.profile_marks import LineTable, own_work
from drk.assistant.profile_window import Window, uses_gpu

MAX_KINDS = 16
MAX_MODULES = 20_000
MAX_STEPS_KEPT = 2_000
MAX_INITS = 5_000
WRITE_EVERY_S = 5.0
MAX_DATA_BYTES = 64 * 2**20


class ProfileRecorder:
    """What was seen in this process. ``settings``: ``steps`` of the window, ``window_s`` its longest time."""

    def __init__(
        self,
        folder: Path,
        steps: int,
        window_s: float,
        library_roots: tuple[str, ...] = (),
        *,
        on_gpu: bool | None = None,
    ) -> None:
        self.folder = folder
        self.pid = os.getpid()
        self.active = True
        self.torch = sys.modules["torch"]
        self.lines = LineTable(library_roots)
        self.window = Window(folder, self.lines, steps, window_s, on_gpu)
        self.values = ValueWriter(folder, MAX_DATA_BYTES)
        self.entries: dict[int, Entry] = {}
        self.all_entries: list[Entry] = []
        self.inits: list[dict[str, Any]] = []
        self.init_numbers: dict[str, int] = {}
        self.init_of: dict[int, int] = {}
        self.steps: dict[int, list[int]] = {}
        self.main: Entry | None = None
        self.clock = DeviceClock(self.torch)
        self.graphs = GraphWatch(self)
        self.notes: list[str] = []
        self.stacks = threading.local()
        self.lock = threading.RLock()
        self.written_at = time.monotonic()
        self.in_values = False

    # --- constructors --------------------------------------------------------------------------------------------

    def made(self, instance: Any, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the constructor's arguments of an object of the user's own classes."""
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if not file or not self.lines.is_user(file) or len(self.inits) >= MAX_INITS:
            return
        if sys._getframe(2).f_globals.get("__name__") == "copyreg":  # copied or unpickled: not constructed
            return
        init = {"file": file, "class_name": kind.__qualname__, **self.values.call_json(args, kwargs, data=False)}
        text = json.dumps(init, sort_keys=True)
        number = self.init_numbers.setdefault(text, len(self.inits))
        if number == len(self.inits):
            self.inits.append(init)
        self.init_of[id(instance)] = number

    # --- calls ---------------------------------------------------------------------------------------------------

    def enter(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Note the begin of a call; return the profiler range and whether the line mode was entered."""
        stack: list[Entry] = self.stacks.__dict__.setdefault("stack", [])
        entry = self.entries.get(id(module))
        if entry is None or entry.ref() is not module:
            entry = self.new_entry(module, stack)
        entry.calls += 1
        entered = False
        if not stack:
            self.tick(entry, module)
        stack.append(entry)
        self.count_kind(entry, module, args, kwargs)
        if len(stack) == 1:
            entered = self.window.begin_root()
        return self.window.range(entry.mark), entered

    def leave(self, made: Any, entered: bool) -> None:
        """Note its end."""
        stack = self.stacks.stack
        stack.pop()
        if made is not None:
            made.__exit__(None, None, None)
        if not stack:
            self.window.end_root(entered)

    def new_entry(self, module: Any, stack: list[Entry]) -> Entry:
        """Make the entry of a module that is called for the first time."""
        with self.lock:
            parent = stack[-1] if stack else None
            root = stack[0] if stack else None
            entry = Entry(len(self.all_entries), module, root, parent)
            inner = module if not entry.compiled else module._modules["_orig_mod"]
            init = self.init_of.get(id(inner))
            if init is not None and self.inits[init]["class_name"] == entry.class_name:
                entry.init = init  # an object of a library's class may have the id of one that is gone
            entry.called_at = self.lines.line_of(sys._getframe(2))
            self.place(entry, module)
            entry.root.parts += 1
            if self.main is None or entry.root.parts > self.main.parts:
                self.main = entry.root
            if len(self.all_entries) == 0:  # all of torch is there by now
                self.graphs.watch(self.torch.cuda.CUDAGraph)
            if len(self.all_entries) < MAX_MODULES:
                self.all_entries.append(entry)
                self.entries[id(module)] = entry
            return entry

    def place(self, entry: Entry, module: Any) -> None:
        """Find the module's path below its root; a part that the root does not list is named by its class."""
        if entry.root is entry:
            return
        root = entry.root
        top = root.ref()
        if id(module) not in root.paths and top is not None:
            root.paths = {id(part): path for path, part in top.named_modules()}
        path = root.paths.get(id(module))
        if path is None:
            above = entry.parent.path if entry.parent is not None else ""
            path = f"{above}.<{entry.class_name}>".lstrip(".")
        entry.path = path

    def tick(self, entry: Entry, module: Any) -> None:
        """A call of a root module begins."""
        times = self.steps.setdefault(entry.number, [])
        if len(times) < MAX_STEPS_KEPT:
            times.append(time.perf_counter_ns())
        if capturing_graph(self.torch):
            self.graphs.note(entry)
            return  # no profiler may start or stop, and nothing be waited for, until the graph is whole
        before = self.window.state
        if before == "closed" and self.window.device and entry is self.main:
            self.clock.tick(entry.number)
        self.window.mark_step(entry.number, entry.calls - 1, module, is_main=entry is self.main)
        closed = before == "open" and self.window.state != "open"
        if closed or time.monotonic() - self.written_at > WRITE_EVERY_S:
            self.write()

    def count_kind(self, entry: Entry, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the kind of this call; write its arguments down when it is new."""
        torch = self.torch
        key = (
            tuple([self.sign(value) for value in args]),
            tuple([(name, self.sign(value)) for name, value in kwargs.items()]) if kwargs else (),
            module.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        )
        known = entry.kinds.get(key)
        if known is not None:
            known["count"] += 1
        elif len(entry.kinds) < MAX_KINDS:
            entry.kinds[key] = self.describe(module, args, kwargs)
        else:
            entry.other_calls += 1

    def sign(self, value: Any) -> Any:
        """Return what two values of one kind have in common; cheap, since it runs for every call."""
        if isinstance(value, self.torch.Tensor):
            strided = value.layout is self.torch.strided
            return value.shape, value.dtype, value.stride() if strided else None, value.requires_grad
        if isinstance(value, (list, tuple)):
            return type(value), tuple([self.sign(item) for item in value[:16]])
        if isinstance(value, dict):
            return dict, tuple([(str(name), self.sign(item)) for name, item in list(value.items())[:32]])
        return (type(value), value) if type(value) in (bool, int, str, float) else type(value)

    def describe(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Write the arguments of a new kind of call down."""
        torch = self.torch
        facts = {
            "training": bool(module.training),
            "grad": bool(torch.is_grad_enabled()),
            "autocast": autocast_dtype(torch),
            "count": 1,
        }
        if capturing_graph(torch):  # looking at values would wait for the device, which breaks the capture
            return {**self.values.call_json(args, kwargs, data=False), **facts, "ranges": []}
        with own_work():
            call = self.values.call_json(args, kwargs, data=True)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            return {**call, **facts, "ranges": [value_range(tensor) for tensor in tensors[:16]]}

    # --- output --------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return everything seen so far."""
        window = self.window
        return {
            "version": 1,
            "pid": self.pid,
            "main": str(getattr(sys.modules.get("__main__"), "__file__", "") or ""),
            "argv": list(sys.argv),
            "cwd": str(Path.cwd()),
            "environment": environment_facts(self.torch, self.window.on_gpu),
            "modules": [entry.to_json() for entry in self.all_entries],
            "inits": self.inits,
            "lines": self.lines.rows,
            "steps": {str(number): times for number, times in self.steps.items()},
            "window": {
                "state": window.state,
                "reason": window.reason,
                "trace": window.trace,
                "first_step": {str(number): first for number, first in window.first_step.items()},
                "lines": window.inside,
            },
            "notes": self.notes,
            "device_steps_us": self.clock.to_json(),
        }

    def write(self) -> None:
        """Write everything seen so far, whole or not at all."""
        self.written_at = time.monotonic()
        target = self.folder / f"recording-{self.pid}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(self.to_json()))
        partial.replace(target)

    def finish(self) -> None:
        """Close the window and write; at the program's end, however it comes."""
        if not self.active or os.getpid() != self.pid:
            return
        self.active = False
        if self.all_entries:
            with self.lock:
                self.window.close()
                self.write()

    def fault(self) -> None:
        """Note what went wrong in the recorder and stop watching."""
        self.active = False
        self.notes.append("the recorder stopped: " + traceback.format_exc(limit=-3))
        self.window.close()
        self.write()


def environment_facts(torch: Any, on_gpu: bool | None = None) -> dict[str, Any]:
    """Return what the program ran on."""
    gpu = uses_gpu(torch, on_gpu)
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "device": torch.cuda.get_device_name() if gpu else "cpu",
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "tf32_matmul": bool(torch.backends.cuda.matmul.allow_tf32),
        "tf32_conv": bool(torch.backends.cudnn.allow_tf32),
    }


def is_watched(module_class: Any) -> bool:
    """Whether a recorder watches already."""
    return getattr(module_class.__call__, "drk_recorder", None) is not None


def plain_new(kind: type, *args: Any, **kwargs: Any) -> Any:
    """Make an object as ``object`` does. A class that had no ``__new__`` of its own cannot lose one again: Python
    keeps the slot, and ``object.__new__`` then refuses arguments."""
    del args, kwargs
    return object.__new__(kind)


def watch(module_class: Any, recorder: ProfileRecorder) -> Any:
    """Wrap ``Module.__call__`` and ``Module.__new__``; return a function that takes both wraps off again."""
    torch = recorder.torch
    call, new = module_class.__call__, module_class.__dict__.get("__new__")

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        # first whether it compiles: what stands after it is then not traced, and the code not guarded by it
        if torch.compiler.is_compiling() or not recorder.active or torch.jit.is_tracing():
            return call(self, *args, **kwargs)
        try:
            made, entered = recorder.enter(self, args, kwargs)
        except Exception:  # noqa: BLE001 - our fault must not become the program's
            recorder.fault()
            return call(self, *args, **kwargs)
        try:
            return call(self, *args, **kwargs)
        finally:
            recorder.leave(made, entered)

    def __new__(kind: type, *args: Any, **kwargs: Any) -> Any:
        instance: Any = object.__new__(kind)
        if recorder.active:
            try:
                recorder.made(instance, kind, args, kwargs)
            except Exception:  # noqa: BLE001
                recorder.fault()
        return instance

    def restore() -> None:
        module_class.__call__ = call
        module_class.__new__ = plain_new if new is None else new
        recorder.graphs.restore()

    __call__.drk_recorder = recorder  # type: ignore[attr-defined]
    module_class.__call__, module_class.__new__ = __call__, __new__
    return restore


def on_terminate(recorder: ProfileRecorder) -> None:
    """Write before SIGTERM ends the program; a program's own handler, set later, wins."""

    def end(number: int, frame: types.FrameType | None) -> None:
        del frame
        recorder.finish()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def start(folder: str, module: types.ModuleType) -> None:
    """Begin to watch this process; ``module`` is ``torch.nn.modules.module``. The rest of torch is not there yet."""
    recorder = ProfileRecorder(
        Path(folder), int(os.environ["DRK_PROFILE_STEPS"]), float(os.environ["DRK_PROFILE_WINDOW_S"])
    )
    watch(module.Module, recorder)

    def forget() -> None:
        recorder.active = False
        recorder.window.state = "refused"

    os.register_at_fork(after_in_child=forget)
    atexit.register(recorder.finish)
    before_hard_exit(recorder.finish)
    on_terminate(recorder)
