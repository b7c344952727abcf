"""The part of an artefact that puts kernels into several parts of a user's module: real code, copied as text.

Everything below the marker line is written by :mod:`drk.assistant.artefact_regions` behind a table of places. Each
place names a part of the module and the file with its kernels, which is an artefact of its own with guard, counted
fallback and registered operator. Parts without kernels keep the original code.

Left out: what :mod:`drk.assistant.artefact_runtime_template` leaves out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

_TARGET = "Model"
_KIND = "module"
_PLACES: dict[str, str] = {}

# --- drk places -------------------------------------------------------------------------------------------------


def _files() -> list[tuple[str, Any]]:
    """Return each place with the module that holds its kernels."""
    start = f"{__package__}." if __package__ else ""
    return [(path, importlib.import_module(start + name)) for path, name in _PLACES.items()]


def optimize(model: Any, build: Callable[..., Any] | None = None) -> Any:
    """Let the parts of ``model`` use the kernels where they fit; return the same object.

    ``build`` makes a model from the recorded arguments (default: the model's class); a part that was configured
    otherwise than the one that was verified is left alone, and :func:`stats` says why.
    """
    for path, kernels in _files():
        kernels.optimize(model, build, path)
    return model


def restore(model: Any) -> Any:
    """Take the kernels out again; return the same model."""
    for path, kernels in _files():
        kernels.restore(model, path)
    return model


def stats(model: Any) -> dict[str, Any]:
    """Return by part what ``stats`` of its kernels' file says, and the sums of calls."""
    parts = {path: kernels.stats(model, path) for path, kernels in _files()}
    sums = {key: sum(part[key] for part in parts.values()) for key in ("kernel_calls", "fallback_calls")}
    return {"optimized": any(part["optimized"] for part in parts.values()), **sums, "parts": parts}


def optimized(target: Any) -> Any:
    """Decorate the class or factory that was optimised: what it makes uses the kernels."""
    if _KIND == "factory":

        @functools.wraps(target)
        def factory(*args: Any, **kwargs: Any) -> Any:
            return optimize(target(*args, **kwargs), build=target)

        return factory
    construct: Callable[..., None] = target.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        if type(self) is target:  # a subclass is something else than what was verified
            optimize(self)

    target.__init__ = __init__
    return target
