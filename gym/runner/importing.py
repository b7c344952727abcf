"""Imports a user's or a candidate's file inside a sandboxed Runner.

The file is imported under its dotted package name, or a unique name for odd file names; never as ``__main__``. Around
the import the process is made plain: ``sys.argv`` holds the file's name only, standard input is empty, the project's
folders come first on ``sys.path``. Global defaults that the file sets (default dtype and device, seed, precision flags)
stay as the file sets them and are recorded.

Left out: data files (only sources travel), work at import that never ends (the Judge's time limit ends it), and any
protection of this process against the code it imports: that is the sandbox's part.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drk.gym.module_names import ModulePlace, place_module
from drk.gym.runner.failures import LoadFailure, user_code


@dataclass
class Reference:
    """The user's code as loaded in this process.

    ``built`` is None when only the file was imported (:func:`load_namespace`). ``init`` are the constructor's
    arguments, ``defaults`` the global settings after the import, ``notes`` sentences for the report.
    """

    namespace: types.ModuleType
    meta: Mapping[str, Any]
    source_root: Path
    entry: str
    built: nn.Module | None = None
    init: tuple[list[Any], dict[str, Any]] = field(default_factory=lambda: ([], {}))
    defaults: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        """The module under test.

        Raises:
            LoadFailure: only the namespace was loaded.
        """
        if self.built is None:
            raise LoadFailure("load", "not-built", "the reference's module is not built in this process")
        return self.built


# --- the process and its imports ------------------------------------------------------------------------------


def neutralise_process(entry: str) -> None:
    """Give user code an empty standard input and an argument list that holds the file's name only."""
    sys.argv = [entry]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - stays open for the life of the process


def global_defaults() -> dict[str, Any]:
    """Return the global PyTorch settings that a file may change at import."""
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "default_device": str(torch.get_default_device()),
        "initial_seed": torch.initial_seed(),
        "grad_enabled": torch.is_grad_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def uses_relative_imports(text: str) -> bool:
    """Whether the source holds ``from . import x``; False when it does not parse (the import says why)."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


def import_file(name: str, path: Path) -> types.ModuleType:
    """Import ``path`` as the module ``name``, whatever the file is called; what it raises goes through."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadFailure("load", "not-python", f"{path.name} is no Python file", file=path.name)
    module = importlib.util.module_from_spec(spec)
    # Registered first: dataclasses, Triton and torch.compile look classes up by module name while it runs.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_placed(place: ModulePlace, path: Path) -> types.ModuleType:
    if place.synthetic:
        package = types.ModuleType(place.synthetic)
        package.__path__ = [str(path.parent)]
        sys.modules[place.synthetic] = package
    parent = place.name.rpartition(".")[0]
    if parent and not place.synthetic:
        importlib.import_module(parent)
    present = sys.modules.get(place.name)
    if present is not None and _same_file(present, path):
        return present
    module = import_file(place.name, path)
    if parent:
        setattr(sys.modules[parent], place.name.rpartition(".")[2], module)
    return module


def _same_file(module: types.ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return bool(file) and Path(str(file)).resolve() == path.resolve()


def load_namespace(meta: Mapping[str, Any], source_root: Path) -> Reference:
    """Import the task's entry file from ``source_root`` and build nothing.

    Raises:
        LoadFailure: kinds ``syntax``, ``missing-module``, ``missing-file``, ``reads-stdin``, ``exit``, ``raised``, ...
    """
    root = source_root.resolve()
    entry = str(meta["entry"])
    path = root / entry
    if not path.is_file():
        raise LoadFailure("load", "missing-entry", f"the task has no file {entry!r}", file=entry)
    neutralise_process(entry)
    files = {found.relative_to(root).as_posix() for found in root.rglob("*.py")}
    taken = sys.stdlib_module_names | {name for name in sys.modules if "." not in name}
    relative = uses_relative_imports(path.read_text("utf-8", errors="replace"))
    place = place_module(entry, files, relative=relative, taken=taken)
    sys.path[:0] = [str(root / folder) for folder in place.search]
    importlib.invalidate_caches()
    before = global_defaults()
    with user_code("load", root, kind="import-raised", what=f"importing {entry}"):
        namespace = _import_placed(place, path)
    reference = Reference(namespace, meta, root, entry, defaults=global_defaults())
    changed = [name for name, value in reference.defaults.items() if before[name] != value]
    if changed:
        told = ", ".join(f"{name}={reference.defaults[name]}" for name in changed)
        reference.notes.append(f"{entry} sets global defaults at import: {told}")
    return reference
