"""How the gym works: device, sandbox level, limits, number of trials. Values only; the CLI reads files and flags.

Defaults are those of a developer's own machine. Times are wall-clock seconds, sizes bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SandboxLevel = Literal["strict", "standard", "basic"]

LEAST_SESSIONS = 4
"""References that a gym keeps at least."""


@dataclass(frozen=True)
class Limits:
    """Hard limits; what exceeds one is killed and classified.

    ``load_s`` covers importing and constructing, ``compile_s`` the first call, ``run_s`` each later one, ``total_s``
    one whole evaluation. ``memory_bytes`` counts a Runner's process tree; ``output_bytes`` all outputs of one call;
    ``log_bytes`` what it prints.
    """

    load_s: float = 60.0
    compile_s: float = 120.0
    run_s: float = 60.0
    total_s: float = 300.0
    memory_bytes: int = 16 * 2**30
    output_bytes: int = 16 * 2**30
    scratch_bytes: int = 4 * 2**30
    log_bytes: int = 64 * 1024
    processes: int = 256


@dataclass(frozen=True)
class Timing:
    """The paired-timing procedure of DESIGN 4.6.

    ``best_only`` is for those who look for the fastest candidate: one that is clearly slower than the best so far of
    its task, or than a baseline, is timed no longer than it takes to see that. Its interval is then wider.
    """

    enabled: bool = True
    min_pairs: int = 20
    max_pairs: int = 200
    target_halfwidth: float = 0.01
    max_s: float = 3.0
    window_us: float = 800.0
    compile_baseline: bool = True
    best_only: bool = False


@dataclass(frozen=True)
class GymSettings:
    """Settings of one :class:`drk.gym.Gym`.

    ``device`` is ``auto`` (first CUDA device, else the interpreter), ``cuda:N`` or ``interpret``. ``target`` is the
    architecture that offline compilation aims at. ``seeds`` is the number of correctness trials; ``hidden_shape`` adds
    one at a shape that the task does not show, on a GPU. Under the interpreter, inputs are reduced to about
    ``interpret_elements`` elements, a trial may launch ``interpret_programs`` programs, and no new trial begins after
    ``interpret_s`` seconds.
    """

    device: str = "auto"
    target: str = "sm_90"
    sandbox: SandboxLevel = "standard"
    seeds: int = 5
    interpret_elements: int = 2**16
    interpret_programs: int = 5000
    interpret_s: float = 4.0
    hidden_shape: bool = True
    offline_compile: bool = True
    parallel: int = 2
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)
