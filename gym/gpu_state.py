"""What a GPU is doing while somebody is timed: clocks, throttling, other processes, by NVML.

NVML is read in the Judge; it makes no CUDA context. Interleaved pairs cancel most of a slow drift, so nothing here
rejects a candidate: a doubt is written into the verdict, with its figures. Where NVML or one of its answers is
missing (containers often hide foreign processes), the field is null and nothing is said.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

SLOW_CLOCK = 0.7
# NVML's reasons that make a measurement doubtful; idle, application clocks and sync boost do not.
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown (software)",
    0x40: "thermal slowdown (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class GpuState:
    """One reading. Clocks in MHz, temperature in degrees Celsius; ``processes`` are pids with a context."""

    sm_clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()
    processes: tuple[int, ...] | None = None


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    """Yield the initialised NVML module, or None where there is none."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def read_state(uuid: str) -> GpuState | None:
    """Read the GPU of that UUID; null where NVML is not to be had."""
    with _session() as nvml:
        if nvml is None:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return None

        def asked(question: Callable[..., Any], *arguments: Any) -> Any:
            try:
                return question(handle, *arguments)
            except nvml.NVMLError:
                return None

        processes = asked(nvml.nvmlDeviceGetComputeRunningProcesses)
        return GpuState(
            sm_clock_mhz=asked(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            max_clock_mhz=asked(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            temperature_c=asked(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            throttle=throttle_words(asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0),
            processes=None if processes is None else tuple(sorted(int(row.pid) for row in processes)),
        )


def throttle_words(reasons: int) -> tuple[str, ...]:
    """Name the reasons in NVML's bit mask that make a measurement doubtful."""
    return tuple(word for bit, word in THROTTLE_REASONS.items() if reasons & bit)


def doubts(state: GpuState, ours: Collection[int]) -> list[str]:
    """Return what in a reading right after a measurement makes it doubtful, as sentences with their figures.

    ``ours`` are the pids that drk started. Where none of them is listed, the driver shows other numbers than we see
    (a container), and nothing can be said of foreign processes.
    """
    found = []
    if state.throttle:
        found.append(f"the GPU's clock was held down while timing: {', '.join(state.throttle)}")
    clock, limit = state.sm_clock_mhz, state.max_clock_mhz
    if clock and limit and clock < SLOW_CLOCK * limit:
        found.append(f"the GPU ran at {clock} MHz of {limit} MHz while timing")
    listed = set(state.processes or ())
    foreign = sorted(listed - set(ours))
    if foreign and listed & set(ours):
        found.append(f"other processes used the GPU while timing: {', '.join(map(str, foreign[:5]))}")
    return found
