"""What one look at a task's reference found, as :meth:`drk.gym.Gym.inspect` returns it.

A module of its own because a client of a gym server makes one too and must not import torch for it. Left out: anything
that needs the reference's process to be read again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Inspection:
    """What one look at a task's reference found.

    ``inputs`` and ``state`` are rows with name or path, shape and dtype; ``output`` is the description of what one call
    returns; ``reduced`` the plan by which inputs are made smaller for the interpreter, if any.
    """

    device: str
    inputs: list[dict[str, Any]]
    state: list[dict[str, Any]]
    output: dict[str, Any]
    reduced: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
