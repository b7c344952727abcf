"""Starts a recorder inside the user's own Python; standard library only.

A copy of this file stands as ``sitecustomize.py`` in a folder that comes first on ``PYTHONPATH`` of the user's command,
so that Python runs it at start-up (:mod:`drk.assistant.capture_launch` writes the folder). It runs the
``sitecustomize`` that it hides, if there is one, takes the folder off ``sys.path`` again, and waits until torch's
module class is imported; then ``start`` of the recorder named by ``DRK_CAPTURE_PART`` begins.

Left out: ``python -S`` and ``-I`` (Python then reads neither), programs that clear their environment before they start
Python. What goes wrong here is noted in the folder and never stops the user's program.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WATCHED = "torch.nn.modules.module"
PARTS = "drk_capture_parts"


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


class Finder(importlib.abc.MetaPathFinder):
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


def run_hidden(own: Path) -> None:
    """Run the ``sitecustomize`` that the file in ``own`` hides, as Python would have."""
    rest = [entry for entry in sys.path if Path(entry or ".").resolve() != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def begin(own: Path, folder: str, part: str) -> None:
    """Load the recorder ``part`` beside this file and let it start once torch is there."""
    recorder = importlib.import_module(f"{PARTS}.{part}")
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != own]

    def then(module: types.ModuleType) -> None:
        with noting(folder):
            recorder.start(folder, module)

    sys.meta_path.insert(0, Finder(then))


@contextlib.contextmanager
def noting(folder: str) -> Any:
    """Write what escapes the block to ``fault-<pid>.txt`` in ``folder``: a recorder's fault is not the program's."""
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever it is, the user's program goes on
        with contextlib.suppress(OSError):
            (Path(folder) / f"fault-{os.getpid()}.txt").write_text(traceback.format_exc())


if __name__ == "sitecustomize" and "DRK_CAPTURE_FOLDER" in os.environ:
    _own = Path(__file__).resolve().parent
    with noting(os.environ["DRK_CAPTURE_FOLDER"]):
        begin(_own, os.environ["DRK_CAPTURE_FOLDER"], os.environ["DRK_CAPTURE_PART"])
    run_hidden(_own)
