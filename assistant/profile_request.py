"""What ``drk profile`` asks of the process that calls the target: a value, written to and read from ``request.json``.

It stands apart from :mod:`drk.assistant.profile_driver` because that imports torch, which the command does not need.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drk.gym.sandbox import Level

NAME = "request.json"


@dataclass(frozen=True)
class Request:
    """What to run: ``meta`` is the Task's JSON without sources and tensors.

    ``device`` is ``cpu`` or ``cuda:0`` of the GPU with the UUID ``gpu``; ``level`` the sandbox; ``target`` the GPU that
    a file which names one is to believe in; ``window_s`` the longest time of the profiler's window, ``clean_s`` that of
    the steps without it.
    """

    meta: dict[str, Any]
    device: str
    gpu: str
    level: Level
    target: str
    steps: int
    window_s: float
    clean_s: float
    memory_bytes: int
    threads: int


def write_request(folder: Path, request: Request) -> None:
    """Write the request into ``folder``."""
    (folder / NAME).write_text(json.dumps(asdict(request)), encoding="utf-8")


def read_request(folder: Path) -> Request:
    """Read it back."""
    return Request(**json.loads((folder / NAME).read_text(encoding="utf-8")))
