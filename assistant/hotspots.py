"""The measured kernels of a reference as a language model is told of them, and how they are kept with a run.

The gym measures once (:meth:`drk.gym.Gym.kernels`: a forward call of the module as it is, on fresh inputs, with the GPU
to itself). Rows of one kernel at one line of the user's files are put together, the heaviest are kept, and the event
``hotspots`` in the run's log holds exactly what was told, so that a resumed run asks a model with the very same text.
Where nothing could be measured the event says so, and prompts give estimates from shapes, called that.

Left out: backward passes, and what ``torch.compile`` would make of the module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from drk.assistant.events import Event, make_event
from drk.gym.errors import BundleError, HostError, TaskError
from drk.gym.kernels import ReferenceKernel, ReferenceProfile
from drk.gym.schema import Task

EVENT = "hotspots"
SHOWN = 8
NAME_CHARS = 120
LINE_CHARS = 80
REASON_CHARS = 300


class KernelsGym(Protocol):
    """The part of :class:`drk.gym.Gym` that is needed here."""

    async def kernels(self, task: Task) -> ReferenceProfile:
        """Measure the reference's kernels; raises TaskError, BundleError, HostError."""
        ...


@dataclass(frozen=True)
class Hotspot:
    """One kernel at one line: launches and device time of a call, share of all device time, where it is launched."""

    name: str
    launches: int
    time_us: float
    share: float
    place: str = ""

    def line(self) -> str:
        """Return the row for a prompt."""
        where = f" ({self.place})" if self.place else ""
        return f"{self.name}{where}: {self.share:.0%}, {self.time_us:.1f} us, {counted(self.launches, 'launch')}"


@dataclass(frozen=True)
class Hotspots:
    """The heaviest rows, most time first, and the sums over all of a call's kernels on ``gpu``.

    Without rows nothing was measured: for ``reason``, or because there is no GPU where that is empty.
    """

    gpu: str = ""
    rows: tuple[Hotspot, ...] = ()
    kernels: int = 0
    launches: int = 0
    time_us: float = 0.0
    reason: str = ""

    @property
    def how(self) -> str:
        """How the rows are known, for a title."""
        return f"measured on {self.gpu}"

    @property
    def note(self) -> str:
        """What the rows are a part of, for a prompt."""
        return (
            f"One forward call of the module as it is takes {self.time_us:.1f} us of GPU time, in "
            f"{counted(self.launches, 'launch')} of {counted(self.kernels, 'kernel')}. Most of it is in:"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the keys of the event."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows]}


def counted(number: int, word: str) -> str:
    """Return a number with its noun: ``1 launch``, ``2 launches``."""
    return f"{number} {word}" if number == 1 else f"{number} {word}{'es' if word.endswith('ch') else 's'}"


async def measure_hotspots(gym: KernelsGym, task: Task) -> Hotspots:
    """Measure the reference of ``task``; what hinders that becomes the answer's reason."""
    try:
        profile = await gym.kernels(task)
    except (TaskError, BundleError, HostError) as error:
        return Hotspots(reason=error.message.removeprefix("the reference cannot be judged: ")[:REASON_CHARS])
    if not profile.kernels:
        return Hotspots(reason="the profiler saw no kernel")
    return hottest(profile, task)


def hottest(profile: ReferenceProfile, task: Task) -> Hotspots:
    """Put the rows of one kernel at one line together, and keep the heaviest."""
    total_us = sum(row.time_us for row in profile.kernels) or 1.0
    groups: dict[tuple[str, str], list[ReferenceKernel]] = defaultdict(list)
    for row in profile.kernels:
        groups[row.name, row.source].append(row)
    rows = [_hotspot(alike, total_us, task) for alike in groups.values()]
    rows.sort(key=lambda row: (-row.time_us, row.name, row.place))
    return Hotspots(
        profile.gpu,
        tuple(rows[:SHOWN]),
        len({row.name for row in profile.kernels}),
        sum(row.launches for row in profile.kernels),
        round(sum(row.time_us for row in profile.kernels), 3),
    )


def _hotspot(alike: list[ReferenceKernel], total_us: float, task: Task) -> Hotspot:
    time_us = sum(row.time_us for row in alike)
    name = alike[0].name.removeprefix("void ")[:NAME_CHARS]
    place = ", ".join(filter(None, (_line(alike[0].source, task), _parts(row.module for row in alike))))
    launches = sum(row.launches for row in alike)
    return Hotspot(name, launches, round(time_us, 3), round(time_us / total_us, 4), place)


def _line(source: str, task: Task) -> str:
    """Return ``file.py:12 `the text of that line` ``; without the text where there is no such line."""
    path, _, number = source.rpartition(":")
    lines = task.files.get(path, "").splitlines()
    text = lines[int(number) - 1].strip() if number.isdecimal() and 0 < int(number) <= len(lines) else ""
    return f"{source} `{text[:LINE_CHARS]}`" if text else source


def _parts(modules: Iterable[str]) -> str:
    """Return ``in fc1 and 2 more``; the module itself has no name."""
    named = sorted({module for module in modules if module})
    return "" if not named else f"in {named[0]}" + (f" and {len(named) - 1} more" if len(named) > 1 else "")


def hotspots_event(found: Hotspots) -> Event:
    """Return the event that keeps ``found`` in a run's log."""
    return make_event(EVENT, **found.to_json())


def recorded_hotspots(events: Iterable[Event]) -> Hotspots | None:
    """Return what a run's log says was told, or null where nothing was told yet."""
    event = next((event for event in events if event.get("event") == EVENT), None)
    return None if event is None else hotspots_from_json(event)


def hotspots_from_json(data: Mapping[str, Any]) -> Hotspots:
    """Return what :meth:`Hotspots.to_json` gave; keys that are not there have their usual values."""
    known = {key: data[key] for key in ("gpu", "kernels", "launches", "time_us", "reason") if key in data}
    rows = [
        (row["name"], row["launches"], row["time_us"], row["share"], row["place"]) for row in data.get("rows") or []
    ]
    return Hotspots(**known, rows=tuple(Hotspot(*row) for row in rows))
