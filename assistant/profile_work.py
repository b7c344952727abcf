"""What an operator's call costs and what limits it: bytes and FLOPs from shapes, roofs, class, Amdahl's bound.

Every figure here is an estimate from the shapes that the profiler recorded: operands are read once, results written
once, views are free (:mod:`drk.gym.graph_cost`). Results are not recorded, so their shapes follow from the operands.

A row's class: ``memory`` or ``compute`` by the roof that binds it (the ridge point), unless it runs far below both:
then ``launch`` when its kernels are short and the device waits between kernels, else ``latency``.

Left out: caches, padding, what a library's algorithm really moves; attention masks are counted as if dense.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from drk.assistant.profile_tree import FREE, OpCall
from drk.assistant.report import BoundClass, Figure, Roof, Work
from drk.gym.devices import DeviceFacts
from drk.gym.graph import TensorMeta
from drk.gym.graph_cost import Cost, operator_cost

SHORT_US = 10.0
"""A kernel shorter than this is about as long as the launch of the next one."""
FAR_BELOW_PERCENT = 20.0
MUCH_IDLE = 0.3

# fmt: off
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "long int": "int64",
    "long": "int64", "int": "int32", "short": "int16", "short int": "int16", "signed char": "int8", "char": "int8",
    "unsigned char": "uint8", "bool": "bool", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2",
}
_REDUCING = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "norm", "linalg_vector_norm", "var",
             "std", "all", "any", "prod", "logsumexp", "nll_loss_forward", "mse_loss")
# fmt: on
_MATMUL = re.compile(r"^(linear|mm|addmm|bmm|baddbmm|matmul|_scaled_mm)$")
_SDPA = re.compile(r"^(_?scaled_dot_product\w*|_flash_attention\w*|_efficient_attention\w*)$")


def bare_name(op: str) -> str:
    """Return an operator's name without its namespace."""
    return op.rpartition("::")[2]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


def _meta(shape: Sequence[int], dtype: str) -> TensorMeta:
    sizes = tuple(int(extent) for extent in shape)
    return TensorMeta(sizes, dtype, _contiguous(sizes))


def operands(call: OpCall) -> list[TensorMeta]:
    """Return the tensors that a call takes, lists of tensors one by one; scalars left out."""
    found: list[TensorMeta] = []
    for dims, kind in zip(call.dims, call.types, strict=False):
        dtype = _DTYPES.get(kind)
        if isinstance(dims, list) and dims and all(isinstance(item, list) for item in dims):
            found += [_meta(item, dtype or "float32") for item in dims]
        elif dtype is not None and isinstance(dims, list):
            found.append(_meta(dims, dtype))
    return found


def _results(name: str, tensors: list[TensorMeta], call: OpCall) -> list[TensorMeta]:
    first = tensors[0]
    if _MATMUL.match(name) and len(tensors) >= 2:
        left, right = tensors[-2], tensors[-1]
        if name in ("linear",):
            left, right = tensors[0], tensors[1]
            return [_meta((*left.shape[:-1], right.shape[0]), left.dtype)]
        if left.shape and right.shape:
            return [_meta((*left.shape[:-1], right.shape[-1]), left.dtype)]
    if name == "convolution" and len(tensors) >= 2:
        shape = _convolution_shape(tensors, call)
        return [_meta(shape, first.dtype)]
    if name in _REDUCING:
        return []
    if name == "embedding" and len(tensors) >= 2:
        return [_meta((*tensors[1].shape, first.shape[-1]), first.dtype)]
    if name == "cat":
        return [_meta((sum(item.numel for item in tensors),), first.dtype)]
    if _SDPA.match(name):
        return [first]
    return [max(tensors, key=lambda item: item.numel)]


def _convolution_shape(tensors: list[TensorMeta], call: OpCall) -> tuple[int, ...]:
    """Output shape of ``aten::convolution(input, weight, bias, stride, padding, dilation, transposed, ...)``."""
    data, weight = tensors[0].shape, tensors[1].shape
    spatial = len(data) - 2
    lists = [_ints(text) for text in call.values[3:6]]
    if spatial < 1 or len(lists) < 3 or any(not item for item in lists):
        return data
    stride, padding, dilation = ((item * spatial)[:spatial] for item in lists)
    transposed = len(call.values) > 6 and call.values[6] == "True"
    sizes = []
    for i in range(spatial):
        reach = dilation[i] * (weight[i + 2] - 1)
        if transposed:
            sizes.append((data[i + 2] - 1) * stride[i] - 2 * padding[i] + reach + 1)
        else:
            sizes.append((data[i + 2] + 2 * padding[i] - reach - 1) // max(stride[i], 1) + 1)
    channels = weight[1] if transposed else weight[0]
    return (data[0], channels, *(max(size, 0) for size in sizes))


def _ints(text: str) -> list[int]:
    return [int(item) for item in re.findall(r"-?\d+", text)]


def call_cost(call: OpCall) -> Cost | None:
    """Estimate one operator's call; None where the profiler recorded no shapes of it."""
    name = bare_name(call.name)
    if name in FREE:
        return Cost(0, 0)
    tensors = operands(call)
    if not tensors:
        return None
    if name == "embedding" and len(tensors) >= 2:  # reads the rows that are asked for, not the table
        out = _results(name, tensors, call)[0]
        return Cost(2 * out.size_bytes + tensors[1].size_bytes, 0)
    if name == "convolution_backward" and len(tensors) >= 3:
        grad, data, weight = tensors[:3]
        flops = 4 * grad.numel * (weight.numel // max(1, weight.shape[0]))
        return Cost(grad.size_bytes + 2 * (data.size_bytes + weight.size_bytes), flops)
    if _SDPA.match(name) and len(tensors) >= 3:
        return _attention_cost(tensors, backward="backward" in name)
    if name.startswith(("_foreach_", "_fused_")):
        return Cost(sum(item.size_bytes for item in tensors) + tensors[0].size_bytes, sum(t.numel for t in tensors))
    results = _results(name, tensors, call)
    if name in ("addmm", "baddbmm"):
        return Cost(
            sum(item.size_bytes for item in (*tensors, *results)),
            2 * results[0].numel * tensors[-2].shape[-1] if tensors[-2].shape else 0,
        )
    return operator_cost(name.rstrip("_"), tensors[:2] if name == "linear" else tensors, results)


def _attention_cost(tensors: list[TensorMeta], *, backward: bool) -> Cost:
    offset = 1 if backward and len(tensors) > 3 else 0
    query, key, value = tensors[offset : offset + 3]
    length = key.shape[-2] if len(key.shape) > 1 else 1
    traffic = sum(item.size_bytes for item in (query, key, value, query))
    factor = 10 if backward else 4
    return Cost(traffic * (2 if backward else 1), factor * query.numel * length)


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


def peak_key(works: Sequence[tuple[OpCall, float]], *, tf32: bool) -> str:
    """Return the key of the arithmetic roof (``fp32``, ``bf16``, ...) that the heaviest call may use."""
    heaviest = max(works, key=lambda work: _flops(work[0]), default=None)
    if heaviest is None:
        return "fp32"
    tensors = operands(heaviest[0])
    wide = {item.dtype for item in tensors}
    name = bare_name(heaviest[0].name)
    product = bool(_MATMUL.match(name) or _SDPA.match(name)) or "convolution" in name
    if "float64" in wide:
        return "fp64"
    if not product:
        return "fp32"
    if wide & {"float8_e4m3fn", "float8_e5m2"}:
        return "fp8"
    if wide & {"bfloat16", "float16"} and "float32" not in wide:
        return "bf16"
    return "tf32" if tf32 else "fp32"


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
