"""Records the calls of one module inside the user's own command (``--capture``); standard library only.

A copy of this file stands as ``sitecustomize.py`` in a folder that comes first on ``PYTHONPATH`` of the user's command,
so that Python runs it at start-up. It waits until torch is imported, then watches objects of the target's class:
constructor arguments, shapes, dtypes, strides, mode, autocast and how often each kind of call occurs. What it saw is
written to ``calls-<pid>.json`` in ``DRK_CAPTURE_FOLDER``; integer, boolean and non-finite tensors (ids, masks) are
written as raw bytes, once per kind of call, up to a limit.

Left out: functions (only classes can be watched), objects made by ``copy`` or ``pickle`` (their constructor is not
called), calls inside ``torch.compile`` after the first one, processes that end by ``os._exit``.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WATCHED = "torch.nn.modules.module"
MAX_KINDS = 64
MAX_DATA_BYTES = 256 * 2**20


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
        self.data_bytes = 0

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
            self.init = self.call_json(args, kwargs, data=False)
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
            **self.call_json(args, kwargs, data=False),
            "training": bool(module.training),
            "grad": bool(torch.is_grad_enabled()),
            "autocast": autocast_dtype(torch),
        }
        key = json.dumps(facts, sort_keys=True)
        known = self.calls.get(key)
        if known is not None:
            known["count"] += 1
        elif len(self.calls) < MAX_KINDS:
            self.calls[key] = {**facts, **self.call_json(args, kwargs, data=True), "count": 1}
            self.write()

    # --- values as JSON ------------------------------------------------------------------------------------------

    def call_json(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, data: bool) -> dict[str, Any]:
        """Return the arguments in the form of the schema's Call."""
        return {
            "args": [self.argument(value, data) for value in args],
            "kwargs": {name: self.argument(value, data) for name, value in kwargs.items()},
        }

    def argument(self, value: Any, data: bool) -> dict[str, Any]:
        """Return one argument; ``unsupported`` with its type where the schema has no form for it."""
        torch = sys.modules["torch"]
        if isinstance(value, torch.Tensor):
            return self.tensor(value, data)
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"kind": "scalar", "value": value}
        if type(value) in (list, tuple):
            items = [self.argument(item, data) for item in value]
            return {"kind": "nested", "form": type(value).__name__, "items": items}
        if type(value) is dict and all(isinstance(key, str) for key in value):
            items = [self.argument(item, data) for item in value.values()]
            return {"kind": "nested", "form": "dict", "keys": list(value), "items": items}
        return {"kind": "unsupported", "type": type(value).__qualname__}

    def tensor(self, value: Any, data: bool) -> dict[str, Any]:
        """Describe a tensor; with ``data``, write the bytes of those whose values carry meaning."""
        torch = sys.modules["torch"]
        if value.layout != torch.strided:
            return {"kind": "unsupported", "type": str(value.layout)}
        spec: dict[str, Any] = {
            "kind": "tensor",
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "strides": None if value.is_contiguous() else list(value.stride()),
            "requires_grad": bool(value.requires_grad),
        }
        meaningful = not (value.is_floating_point() or value.is_complex())
        if data and value.numel():
            plain = value.detach()
            meaningful = meaningful or not bool(plain.isfinite().all())
            size = plain.numel() * plain.element_size()
            if meaningful and self.data_bytes + size <= MAX_DATA_BYTES:
                spec["file"] = self.dump(plain)
            elif meaningful and plain.dtype != torch.bool and not plain.is_floating_point():
                spec.update(fill="integers", low=float(plain.min()), high=float(plain.max()) + 1)
        return spec

    def dump(self, tensor: Any) -> str:
        """Write a tensor's bytes in row-major order; return the file's name."""
        torch = sys.modules["torch"]
        raw = tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        name = f"data-{os.getpid()}-{self.data_bytes}.bin"
        self.data_bytes += len(raw)
        (self.folder / name).write_bytes(raw)
        return name

    def write(self) -> None:
        """Write everything seen so far, whole or not at all."""
        target = self.folder / f"calls-{os.getpid()}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps({"init": self.init, "calls": list(self.calls.values())}))
        partial.replace(target)


def autocast_dtype(torch: Any) -> str | None:
    """Return the dtype of the active autocast, or None."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return None


def watch(module_class: Any, recorder: Recorder) -> None:
    """Let ``torch.nn.Module`` tell the recorder of each new object of the target's class."""

    def new(kind: type, *args: Any, **kwargs: Any) -> Any:
        instance: Any = object.__new__(kind)
        if recorder.is_target(kind):
            recorder.made(instance, args, kwargs)
        return instance

    module_class.__new__ = new


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then calls back."""

    def __init__(self, inner: Any, then: Callable[[types.ModuleType], None]) -> None:
        self.inner = inner
        self.then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Leave it to the real loader."""
        created: types.ModuleType | None = self.inner.create_module(spec)
        return created

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, then call back."""
        self.inner.exec_module(module)
        self.then(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for torch's module class."""

    def __init__(self, then: Callable[[types.ModuleType], None]) -> None:
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the watched module only, once."""
        del path, target
        if fullname != WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.then)
        return spec


def start(folder: str) -> None:
    """Begin to watch; called at start-up of the user's Python."""
    recorder = Recorder(
        Path(folder),
        os.environ["DRK_CAPTURE_FILE"],
        os.environ["DRK_CAPTURE_NAME"],
        os.environ.get("DRK_CAPTURE_SUBMODULE", ""),
    )
    sys.meta_path.insert(0, _Finder(lambda module: watch(module.Module, recorder)))
    atexit.register(recorder.write)


if __name__ == "sitecustomize" and "DRK_CAPTURE_FOLDER" in os.environ:
    start(os.environ["DRK_CAPTURE_FOLDER"])
