"""The gym's nouns: Task, Candidate, Verdict (DESIGN 4.2), as frozen dataclasses.

Inside drk these are plain values. At wires (CLI, HTTP, disk) they are read and written by
:mod:`drk.gym.wire`, which validates with pydantic; nothing here imports torch or pydantic, so that the command line
starts fast and Runners stay small.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

SCHEMA_VERSION = 1

Status = Literal["accepted", "rejected", "failed", "error"]
Rung = Literal["parsed", "loaded", "compiled", "ran", "correct", "honest", "measured"]
RUNGS: tuple[Rung, ...] = ("parsed", "loaded", "compiled", "ran", "correct", "honest", "measured")
Evidence = Literal["gpu", "interpreter", "compile-only"]
Family = Literal["no-work", "caching", "timing", "tampering", "precision", "shape", "escape", "delegation", "lazy"]
Severity = Literal["fraud", "label"]
Stage = Literal["parse", "load", "compile", "run", "check", "time", "profile", "host"]
Precision = Literal["match", "strict", "tf32", "bf16"]
Tolerance = Literal["float64", "paper"]
Mode = Literal["eval", "train"]
WeightsHow = Literal["copied", "converted", "seeded"]


# --- Task ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """How to draw one tensor argument.

    ``dtype`` is a torch name without prefix (``float32``, ``bfloat16``, ``int64``, ``bool``). ``strides`` are in
    elements, ``None`` for contiguous; ``layout`` names a memory format instead (``channels_last``). Integers are
    drawn from ``[low, high)``; floats are standard normal unless ``fill`` says ``uniform`` (then from [low, high)).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    strides: tuple[int, ...] | None = None
    layout: Literal["contiguous", "channels_last", "channels_last_3d"] = "contiguous"
    low: float | None = None
    high: float | None = None
    fill: Literal["normal", "uniform", "integers", "bernoulli", "zeros", "ones"] = "normal"
    requires_grad: bool = False
    kind: Literal["tensor"] = "tensor"


@dataclass(frozen=True)
class CapturedTensor:
    """A tensor that travels with the task as ``tensors["input.<name>"]``, permuted by the key at each trial."""

    name: str
    requires_grad: bool = False
    kind: Literal["captured"] = "captured"


@dataclass(frozen=True)
class Scalar:
    """A plain Python argument."""

    value: bool | int | float | str | None
    kind: Literal["scalar"] = "scalar"


@dataclass(frozen=True)
class Nested:
    """A list, tuple or dict of arguments; ``keys`` are given for dicts only."""

    form: Literal["list", "tuple", "dict"]
    items: tuple[Argument, ...] = ()
    keys: tuple[str, ...] = ()
    kind: Literal["nested"] = "nested"


Argument = TensorSpec | CapturedTensor | Scalar | Nested


@dataclass(frozen=True)
class Call:
    """Arguments of one call, drawn by drk."""

    args: tuple[Argument, ...] = ()
    kwargs: dict[str, Argument] = field(default_factory=dict)
    kind: Literal["call"] = "call"


@dataclass(frozen=True)
class UserFunction:
    """Arguments come from a name in the reference file: a function without arguments, or a value.

    KernelBench's ``get_inputs`` / ``get_init_inputs`` and ``example_inputs`` are of this kind. It is only ever called
    in a sandboxed Runner, with every generator seeded by the Judge's key.
    """

    name: str
    kind: Literal["function"] = "function"


Inputs = Call | UserFunction


@dataclass(frozen=True)
class Task:
    """What is to be made faster.

    ``files`` maps paths relative to the project root to source text (the reference's import closure); ``entry`` is the
    one that holds ``target``. ``target`` is a dotted name in it: a class (``target_kind`` ``module``), a function
    (``function``, judged as a stateless module) or a factory that returns a module (``factory``); ``submodule`` selects
    a part of the built module. ``tensors`` is a safetensors blob: ``state.<key>`` are weights that replace the
    constructor's, ``input.<name>`` captured inputs. ``weight`` is the frequency of these inputs in the user's run.
    """

    name: str
    files: dict[str, str]
    entry: str
    target: str
    target_kind: Literal["module", "function", "factory"] = "module"
    submodule: str = ""
    init: Inputs = field(default_factory=Call)
    inputs: Inputs = field(default_factory=Call)
    mode: Mode = "eval"
    precision: Precision = "match"
    tolerance: Tolerance = "float64"
    grad: bool = False
    autocast: str | None = None
    tensors: bytes | None = None
    weight: float = 1.0


# --- Candidate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Source text that defines ``ModelNew`` (KernelBench form). ``proposer`` and ``note`` are provenance only."""

    source: str
    proposer: str = "file"
    note: str = ""
    parent: str | None = None


# --- Verdict -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A ratio baseline/candidate: median, 95 % bootstrap interval, number of pairs."""

    value: float
    low: float
    high: float
    pairs: int


@dataclass(frozen=True)
class Latency:
    """A latency in milliseconds: median and 95 % interval."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Speedups:
    """Speed-ups over each baseline that was measured."""

    eager: Interval
    compile: Interval | None = None
    max_autotune: Interval | None = None
    cuda_graph: Interval | None = None


@dataclass(frozen=True)
class Flag:
    """One finding about honesty. ``severity`` ``fraud`` rejects; ``label`` informs. ``proof`` names the experiment."""

    kind: str
    family: Family
    severity: Severity
    proof: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One correctness cell: a seed x shape x dtype x stride x mode x output combination.

    ``rms`` and ``max`` are the candidate's errors against float64 truth, scaled by local magnitude; ``reference_rms``
    and ``reference_max`` the reference's own; ``rms_limit`` and ``max_limit`` what was allowed.
    """

    name: str
    passed: bool
    reason: str = ""
    rms: float | None = None
    max: float | None = None
    reference_rms: float | None = None
    reference_max: float | None = None
    rms_limit: float | None = None
    max_limit: float | None = None


@dataclass(frozen=True)
class KernelRow:
    """One device kernel seen while the candidate ran (or was compiled). Unknown figures are null, never guessed."""

    name: str
    owned: bool
    launches: int = 0
    time_us: float | None = None
    share: float | None = None
    grid: tuple[int, ...] | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True)
class Failure:
    """Why something stopped. ``line`` is in the candidate's file when the fault lies there."""

    stage: Stage
    kind: str
    message: str
    line: int | None = None


@dataclass(frozen=True)
class Verdict:
    """The evidence about one candidate on one task (DESIGN 4.2). Field meanings are those of the public contract."""

    status: Status
    evidence: Evidence
    reached: Rung | None
    correct: bool
    honest: bool | None
    task_id: str = ""
    candidate_id: str = ""
    flags: tuple[Flag, ...] = ()
    speedups: Speedups | None = None
    headline: str | None = None
    latency_ms: Latency | None = None
    baselines_ms: dict[str, Latency] = field(default_factory=dict)
    coverage: float | None = None
    coverage_estimate: float | None = None
    kernels: tuple[KernelRow, ...] = ()
    cells: tuple[Cell, ...] = ()
    weights: WeightsHow | None = None
    error: Failure | None = None
    notes: tuple[str, ...] = ()
    repro: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    sandbox_level: str = ""
    timings_s: dict[str, float] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def accepted(self) -> bool:
        """Correct and not dishonest."""
        return self.status == "accepted"
