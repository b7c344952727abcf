"""What limits a row of a report: what its calls cost, roofs, class, Amdahl's bound.

Every figure here is an estimate from the shapes that the profiler recorded (:mod:`drk.assistant.profile_costs`).

A row's class: ``memory`` or ``compute`` by the roof that binds it (the ridge point), unless it runs far below both:
then ``launch`` when its kernels are short and the device waits between kernels, else ``latency``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from drk.assistant.profile_costs import MATMUL, SDPA, bare_name, call_cost, operands
from drk.assistant.profile_tree import OpCall
from drk.assistant.report import BoundClass, Figure, Roof, Work
from drk.gym.devices import DeviceFacts

SHORT_US = 10.0
"""A kernel shorter than this is about as long as the launch of the next one."""
FAR_BELOW_PERCENT = 20.0
MUCH_IDLE = 0.3


def total_cost(works: Sequence[tuple[OpCall, float]]) -> tuple[float, float] | None:
    """Return (bytes, FLOPs) of several calls with their fractions; None when nothing is known of any."""
    size_bytes = flops = 0.0
    known = False
    for call, fraction in works:
        cost = call_cost(call)
        if cost is not None:
            known = True
            size_bytes += fraction * cost.size_bytes
            flops += fraction * cost.flops
    return (size_bytes, flops) if known else None


def peak_key(works: Sequence[tuple[OpCall, float]], *, tf32: bool, tf32_conv: bool = False) -> str:
    """Return the key of the arithmetic roof (``fp32``, ``bf16``, ...) that the heaviest call may use.

    ``tf32`` and ``tf32_conv`` say whether PyTorch was allowed TF32 for products and for convolutions.
    """
    heaviest = max(works, key=lambda work: _flops(work[0]), default=None)
    if heaviest is None:
        return "fp32"
    tensors = operands(heaviest[0])
    name = bare_name(heaviest[0].name)
    wide = {item.dtype for item in (tensors[:3] if SDPA.match(name) else tensors)}  # its statistics are float32
    convolution = "convolution" in name or name.startswith("conv")
    product = bool(MATMUL.match(name) or SDPA.match(name)) or convolution
    if "float64" in wide:
        return "fp64"
    if not product:
        return "fp32"
    if wide & {"float8_e4m3fn", "float8_e5m2"}:
        return "fp8"
    if wide & {"bfloat16", "float16"} and "float32" not in wide:
        return "bf16"
    return "tf32" if (tf32_conv if convolution else tf32) else "fp32"


def _flops(call: OpCall) -> int:
    cost = call_cost(call)
    return cost.flops if cost is not None else 0


def roof_of(facts: DeviceFacts, *, running: bool) -> Roof:
    """Return a device's roofs from its data sheet; they are estimates also where the device is the one that runs."""
    name = facts.name if running else f"{facts.name}, which is not in this machine"
    return Roof(name, facts.bandwidth_gb_s, dict(facts.peak_tflops), "estimated", facts.source)


def floor_us(size_bytes: float, flops: float, roof: Roof, key: str) -> tuple[float, BoundClass]:
    """Return the least time in microseconds that the roofs allow, and which of them binds."""
    memory = size_bytes / (roof.bandwidth_gb_s * 1e3)
    peak = roof.peak_tflops.get(key) or roof.peak_tflops.get("fp32") or 0.0
    compute = flops / (peak * 1e6) if peak else 0.0
    if not memory and not compute:
        return 0.0, "unknown"
    return (memory, "memory") if memory >= compute else (compute, "compute")


def amdahl(total_us: float, saved_us: float) -> float | None:
    """Return the speed-up of the whole when ``saved_us`` of ``total_us`` go away; None when everything does."""
    rest = total_us - saved_us
    return total_us / rest if total_us > 0 and rest > 1e-9 * total_us else None


def classify(binding: BoundClass, percent: float | None, median_us: float, waiting: float | None) -> BoundClass:
    """Return a row's class.

    Args:
        binding: the roof that binds.
        percent: of that roof, null when not known.
        median_us: of one launch.
        waiting: share of the window in which the device waited, null when not known.
    """
    if percent is None or binding == "unknown":
        return "unknown"
    if percent >= FAR_BELOW_PERCENT:
        return binding
    if median_us < SHORT_US and (waiting or 0.0) > MUCH_IDLE:
        return "launch"
    return "latency"


def row_work(
    *,
    total_us: float,
    all_us: float,
    median_us: float,
    cost: tuple[float, float] | None,
    floor: tuple[float, BoundClass] | None,
    comparable: bool,
    waiting: float | None = None,
) -> Work:
    """Put a row's figures together; ``comparable`` says that its times are of the device whose roofs are used."""
    bound = amdahl(all_us, total_us)
    if cost is None:
        return Work(amdahl_bound=bound)
    size_bytes, flops = (Figure(value, "estimated") for value in cost)
    if floor is None:
        return Work("unknown", size_bytes, flops, amdahl_bound=bound)
    least, binding = floor
    percent = 100.0 * least / total_us if comparable and total_us > 0 else None
    return Work(
        bound=classify(binding, percent, median_us, waiting) if comparable else binding,
        size_bytes=size_bytes,
        flops=flops,
        floor_us=Figure(least, "estimated"),
        percent_of_roof=percent,
        amdahl_bound=bound,
        attainable_speedup=amdahl(all_us, max(total_us - least, 0.0)) if comparable else None,
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the ``share`` quantile (nearest rank); 0 for no values."""
    ordered = sorted(values)
    return ordered[min(max(math.ceil(share * len(ordered)) - 1, 0), len(ordered) - 1)] if ordered else 0.0
