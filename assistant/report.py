"""The Report: where the time of a user's program goes, as frozen values (DESIGN 7, schema version 1).

``drk profile`` makes one; the terminal table, the page, the exports, ``drk compare`` and the language server read it.
Times are microseconds and belong to the whole measured window of ``method.steps`` steps unless a name says otherwise.
``times_are`` says whose time it is: ``device`` (GPU kernels) or ``cpu`` (operators on the CPU, where there is no GPU);
every figure that was not measured is a :class:`Figure` that says ``estimated``, and what is not known is null.

Shares are of ``total_us``, the time of everything that ran: rows of :class:`KernelRow` sum to it (what has no module
or line of its own is in them too, with null there), while modules contain each other: their ``times`` are inclusive.

Left out: before/after of an optimisation (that is a Run's), and the program's values, of which only ranges are kept.
Nothing here imports torch; pydantic is imported by :func:`from_json` only.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from drk.assistant.errors import UsageError

REPORT_SCHEMA_VERSION = 1

How = Literal["measured", "estimated"]
BoundClass = Literal["memory", "compute", "launch", "latency", "unknown"]
"""What limits a row: a roof (``memory``, ``compute``), short kernels behind idle gaps (``launch``), neither
(``latency``: far below both roofs), or not known."""
TimesAre = Literal["device", "cpu"]
Lane = Literal["device", "cpu", "module"]


@dataclass(frozen=True)
class Figure:
    """A number and how it is known; ``value`` counts bytes, FLOPs, ... as the field's name says."""

    value: float
    how: How


@dataclass(frozen=True)
class Place:
    """Where something stands in the user's sources.

    ``file`` is relative to ``Report.root`` (with ``/``) when it lies inside, else absolute. ``line`` is the line that
    takes the time (1-based). ``qualname``, ``first_line`` and ``end_line`` describe the enclosing function or class,
    ``ast_hash`` is of its syntax tree (:func:`drk.assistant.report_source.syntax_hash`): comments, blanks and moves do
    not change it, so an editor can tell whether the row still speaks of what it shows. Empty where the text is gone.
    """

    file: str
    line: int
    end_line: int
    first_line: int
    qualname: str = ""
    ast_hash: str = ""


@dataclass(frozen=True)
class Times:
    """How long, how often. ``median_us`` and ``p95_us`` are of one call (launch); ``per_step_us`` is the row's total in
    each measured step, for intervals (at most 200 kept, empty where steps are not known). ``share`` is 0..1."""

    total_us: float
    share: float
    calls: int
    median_us: float
    p95_us: float
    per_step_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Work:
    """What limits a row. Bytes and FLOPs are of the whole window.

    ``floor_us`` is the least time the roofs allow for this work (null: not known), ``percent_of_roof`` is
    100 * floor / total against the roof that binds. ``amdahl_bound`` is the speed-up of the whole if the row took no
    time (null: it is everything); ``attainable_speedup`` if it ran at its roof.
    """

    bound: BoundClass = "unknown"
    size_bytes: Figure | None = None
    flops: Figure | None = None
    floor_us: Figure | None = None
    percent_of_roof: float | None = None
    amdahl_bound: float | None = None
    attainable_speedup: float | None = None


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name from one place: on a GPU the device's kernels, on the CPU the operators (self time).

    ``op`` is the operator that launched it (``aten::addmm``); ``module`` a ``ModuleRow.name`` or null; ``place`` the
    innermost line of the user's own code, or null. Launch facts are of the most frequent launch.
    """

    name: str
    op: str
    times: Times
    work: Work = field(default_factory=Work)
    module: str | None = None
    place: Place | None = None
    owned: bool = False
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    phase: Literal["forward", "backward", "other"] = "forward"


@dataclass(frozen=True)
class InputKind:
    """One kind of call of a module: what it was called with and how often.

    ``arguments`` are in the form of ``--input`` (``f32[8,128]``), one each; ``text`` joins them by a blank. ``ranges``
    has one ``(low, high)`` per tensor, null where it was not looked at. ``task`` is the folder of the saved Task,
    relative to the profile's task folder, or null when the call has no form as a Task (``reason`` says why).
    """

    text: str
    count: int
    mode: Literal["eval", "train"]
    grad: bool
    autocast: str | None = None
    arguments: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    ranges: tuple[tuple[float, float] | None, ...] = ()
    task: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class ModuleRow:
    """One module object: ``name`` is root class and path (``Net.blocks.0.mlp``), ``path`` the path alone.

    ``times`` hold everything below it (inclusive), ``self_us`` what its own code launched. ``place`` is its class in
    the user's sources (null for a class of a library), ``called_at`` the line that calls it. ``target`` is what
    ``drk optimize`` takes (``model.py:Net.blocks.0.mlp``), empty where it cannot.
    """

    name: str
    path: str
    class_name: str
    times: Times
    self_us: float
    work: Work = field(default_factory=Work)
    parent: str | None = None
    depth: int = 0
    launches: int = 0
    place: Place | None = None
    called_at: Place | None = None
    inputs: tuple[InputKind, ...] = ()
    target: str = ""


@dataclass(frozen=True)
class FunctionRow:
    """One function of the user's sources, by the innermost-line rule: time launched from its own lines."""

    name: str
    times: Times
    place: Place
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class PartRow:
    """What ran outside of every module, by what it belongs to: an optimizer's step (``AdamW.step``), else the function
    of the user's sources that launched it (a loss, copies of a batch). ``place`` is its hottest line, null if unknown.
    """

    name: str
    times: Times
    place: Place | None = None


@dataclass(frozen=True)
class FusionCandidate:
    """Neighbouring operations, all from one module, that read and write the same large tensors and could be one kernel.

    ``saved_us`` estimates the traffic that fusing saves; ``occurrences`` counts how often the sequence ran.
    """

    ops: tuple[str, ...]
    module: str | None
    place: Place | None
    occurrences: int
    total_us: float
    saved_us: Figure
    attainable_speedup: float | None
    reason: str


@dataclass(frozen=True)
class TimelineSpan:
    """One bar of one step: ``start_us`` counts from the step's begin, ``depth`` is the row inside its lane."""

    lane: Lane
    name: str
    start_us: float
    duration_us: float
    depth: int = 0
    module: str | None = None


@dataclass(frozen=True)
class IdleSplit:
    """How the device spent the steps. ``launch_us`` are gaps while the host was still launching (short gaps between
    kernels), ``idle_us`` the longer ones: waiting for data or for Python. The three sum to ``wall_us``.

    Where steps ran without the profiler, ``wall_us`` is theirs: the gaps that were seen under the profiler, which slows
    the host, are shortened in proportion. ``profiled_us`` is how long it took under the profiler (0: not known).
    """

    wall_us: float
    busy_us: float
    launch_us: float
    idle_us: float
    profiled_us: float = 0.0


@dataclass(frozen=True)
class Roof:
    """The roofs that rows are held against: ``how`` says whether they were measured here or come from ``source``.

    ``peak_tflops`` is keyed as :class:`drk.gym.devices.DeviceFacts`.
    """

    name: str
    bandwidth_gb_s: float
    peak_tflops: dict[str, float]
    how: How
    source: str = ""


@dataclass(frozen=True)
class Environment:
    """What it ran on; empty text and null mean "not known". ``clocks`` and such go to ``facts``."""

    device: str
    torch: str
    triton: str
    python: str
    cuda: str = ""
    cpu: str = ""
    threads: int = 0
    drk: str = ""
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """How it was measured. ``source`` is ``call`` (drk called the target itself), ``command`` or ``notebook``.

    ``steps`` are those of the window that the times belong to; ``warmup`` came before it and is left out.
    ``exit_code`` is the user's program's, ``ended`` how it ended (``finished``, ``crashed``, ``killed``,
    ``time-limit``, ``interrupted``).
    """

    source: Literal["call", "command", "notebook"]
    times_are: TimesAre
    steps: int
    warmup: int = 0
    mode: Literal["eval", "train"] | None = None
    command: str = ""
    target: str = ""
    inputs: str = ""
    seed: int | None = None
    processes: int = 1
    exit_code: int | None = None
    ended: str = "finished"
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attribution:
    """How much of ``total_us`` is known to belong to a module and to a source line (0..1), and how the sum of rows
    compares with the wall clock: ``explanation`` says why they differ, where they do by more than 5 %. ``to_part`` adds
    to the modules what belongs to a named part outside of them (:class:`PartRow`)."""

    to_module: float
    to_line: float
    sum_of_wall: float | None = None
    explanation: str = ""
    to_part: float | None = None


@dataclass(frozen=True)
class Report:
    """Where the time goes. Rows are sorted: kernels and functions by time, modules by what is to be gained.

    ``root`` is the absolute folder that places are relative to. ``not_covered`` says in words what this report does
    not show. With ``method.times_are == "cpu"`` the roof is the GPU's that ``--target`` names: floors are estimates for
    that GPU (``floor_us`` their sum), never to be compared with the CPU's times, so percents of the roof are null.
    """

    id: str
    created: str
    title: str
    verdict: str
    root: str
    total_us: float
    wall_us: float
    method: Method
    environment: Environment
    attribution: Attribution
    roof: Roof | None = None
    kernels: tuple[KernelRow, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    functions: tuple[FunctionRow, ...] = ()
    parts: tuple[PartRow, ...] = ()
    fusions: tuple[FusionCandidate, ...] = ()
    timeline: tuple[TimelineSpan, ...] = ()
    idle: IdleSplit | None = None
    floor_us: Figure | None = None
    step_us: tuple[float, ...] = ()
    not_covered: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    schema_version: int = REPORT_SCHEMA_VERSION

    def path_of(self, place: Place) -> Path:
        """Return the absolute path of a place's file."""
        return Path(self.root) / place.file

    def module(self, name: str) -> ModuleRow | None:
        """Return the module of that name, or None."""
        return next((row for row in self.modules if row.name == name), None)


def to_json(report: Report) -> dict[str, Any]:
    """Return the public JSON form: plain lists, dicts, finite numbers (a number that is not finite becomes null)."""
    plain: dict[str, Any] = _plain(report)
    return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def from_json(data: Any) -> Report:
    """Parse and check the JSON form. Unknown keys are ignored, so that later drk may add fields.

    Raises:
        UsageError: kind ``report``: not a report, or of a schema version that this drk does not know.
    """
    from pydantic import TypeAdapter, ValidationError

    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != REPORT_SCHEMA_VERSION:
        told = "it holds no schema_version" if version is None else f"its schema version is {version!r}"
        raise UsageError(
            "not a report that this drk can read",
            kind="report",
            cause=f"{told}, this drk reads {REPORT_SCHEMA_VERSION}",
            help="make a new one with `drk profile`",
        )
    try:
        report: Report = TypeAdapter(Report).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError("not a valid report", kind="report", cause=f"{where}: {first['msg']}") from error
    return report
