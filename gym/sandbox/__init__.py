"""The sandbox that a Runner enters (DESIGN 4.7): policy, probe of the layers, entering, watching, ending.

Standard library only, so that a Runner's fork stays small and ``drk doctor`` starts fast. Linux only.
"""

from __future__ import annotations

from drk.gym.sandbox.entry import adopt_orphans, enter, protect_process
from drk.gym.sandbox.layers import Layer, Layers, achieved_level, lacking, require
from drk.gym.sandbox.policy import Level, Policy, environment, scrub
from drk.gym.sandbox.probe import probe
from drk.gym.sandbox.watch import (
    MemoryWatch,
    Process,
    ProcessTable,
    Usage,
    cpu_seconds,
    descendants,
    scratch_bytes,
    strays,
    terminate,
)

__all__ = [
    "Layer",
    "Layers",
    "Level",
    "MemoryWatch",
    "Policy",
    "Process",
    "ProcessTable",
    "Usage",
    "achieved_level",
    "adopt_orphans",
    "cpu_seconds",
    "descendants",
    "enter",
    "environment",
    "lacking",
    "probe",
    "protect_process",
    "require",
    "scratch_bytes",
    "scrub",
    "strays",
    "terminate",
]
