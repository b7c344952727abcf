"""Loads a script of tests/benchmarks as a module, so that tests can look at its constants and functions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """Return tests/benchmarks/``name``.py, run as a module of another name than ``__main__``."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
