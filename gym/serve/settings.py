"""What a server and its workers are told. Values only; the command line fills them in.

Times are seconds, sizes bytes. They travel to child processes as JSON in one environment variable, which the child
removes from its environment at once: command lines are readable by everybody on the machine, and these hold secrets.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from drk.gym.schema import Tolerance
from drk.gym.settings import SandboxLevel

VARIABLE = "DRK_GYM_SERVE"
SWITCH_S = 0.0005
"""How long a thread may keep the interpreter from others: these processes hand short work from thread to thread."""
HEARTBEAT_TTL_S = 15
HEARTBEAT_S = 3.0
MAX_DEATHS = 3
"""A job whose worker died this often is given up."""
PRIORITIES = {"urgent": 0, "high": 3, "normal": 6, "low": 9}
"""Steps of the queue; 0 is served first."""
Priority = Literal["urgent", "high", "normal", "low"]
TimingWish = bool | Literal["eager"]
"""Whether a candidate is to be timed: against all baselines, or against the eager reference only."""


@dataclass(frozen=True)
class ServeSettings:
    """One API process.

    ``tokens_file`` holds hashes of bearer tokens; without it (``insecure_local``) only loopback may be bound.
    ``body_bytes`` limits a request's body, ``body_s`` the time it may take to arrive, ``header_s`` the same for its
    headers; ``queue_limit`` jobs not yet finished, of all owners. ``device_class`` is where jobs go that name none.
    """

    redis_url: str = ""
    host: str = "127.0.0.1"
    port: int = 8765
    tokens_file: str = ""
    insecure_local: bool = False
    device_class: str = "any"
    sandbox: SandboxLevel = "strict"
    tolerance: Tolerance = "float64"
    body_bytes: int = 64 * 2**20
    body_s: float = 60.0
    header_s: float = 10.0
    queue_limit: int = 20_000
    batch_limit: int = 5_000
    queue_s: float = 3600.0
    run_s: float = 300.0
    max_run_s: float = 3600.0
    result_ttl_s: int = 24 * 3600
    cache_ttl_s: int = 7 * 24 * 3600
    audit_file: str = ""
    audit_sources: bool = False
    parent: int = 0


@dataclass(frozen=True)
class WorkerSettings:
    """One worker process: a device, and ``slots`` evaluations at once (more wait for their turn to be timed)."""

    redis_url: str = ""
    device: str = "interpret"
    device_class: str = "interpret"
    target: str = "sm_90"
    sandbox: SandboxLevel = "strict"
    seeds: int = 5
    slots: int = 3
    offline_compile: bool = True
    run_s: float = 300.0
    result_ttl_s: int = 24 * 3600
    cache_ttl_s: int = 7 * 24 * 3600
    host_error_retries: int = 2
    limits: dict[str, Any] = field(default_factory=dict)
    """Fields of :class:`drk.gym.settings.Limits` that differ from its defaults."""
    timing: dict[str, Any] = field(default_factory=dict)
    """The same of :class:`drk.gym.settings.Timing`."""
    parent: int = 0
    """Process id of the one that started this worker and with which it ends; 0: none."""


Either = TypeVar("Either", ServeSettings, WorkerSettings)


def to_environment(settings: ServeSettings | WorkerSettings) -> dict[str, str]:
    """Return this process's environment, with the settings and without any other word of Redis."""
    kept = {key: value for key, value in os.environ.items() if key != "REDIS_URL"}
    return {**kept, VARIABLE: json.dumps(asdict(settings))}


def take_from_environment(kind: type[Either]) -> Either:
    """Return the settings that the parent gave, and forget them in the environment.

    Raises:
        KeyError: this process was not started by ``drk gym``.
    """
    return kind(**json.loads(os.environ.pop(VARIABLE)))
