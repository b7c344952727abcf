"""The gym judges kernels: is a candidate correct, honest and faster than the module that it replaces?

::

    from drk.gym import Candidate, Gym, GymSettings, Task

    async with Gym(GymSettings(device="auto")) as gym:
        verdict = await gym.evaluate(task, Candidate(source))

Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drk.gym.engine import Gym, evaluate, evaluate_async
    from drk.gym.errors import BundleError, DeviceError, GymError, HostError, SandboxUnavailable, TaskError
    from drk.gym.inspection import Inspection
    from drk.gym.schema import Candidate, Task, Verdict
    from drk.gym.settings import GymSettings, Limits, Timing

_HOMES = {
    "BundleError": "errors",
    "Candidate": "schema",
    "DeviceError": "errors",
    "Gym": "engine",
    "GymError": "errors",
    "GymSettings": "settings",
    "HostError": "errors",
    "Inspection": "inspection",
    "Limits": "settings",
    "SandboxUnavailable": "errors",
    "Task": "schema",
    "TaskError": "errors",
    "Timing": "settings",
    "Verdict": "schema",
    "evaluate": "engine",
    "evaluate_async": "engine",
}

__all__ = [
    "BundleError",
    "Candidate",
    "DeviceError",
    "Gym",
    "GymError",
    "GymSettings",
    "HostError",
    "Inspection",
    "Limits",
    "SandboxUnavailable",
    "Task",
    "TaskError",
    "Timing",
    "Verdict",
    "evaluate",
    "evaluate_async",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(f"drk.gym.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'drk.gym' has no attribute {name!r}")
