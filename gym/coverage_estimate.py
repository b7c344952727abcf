"""How much of the reference's work the candidate's own kernels take over, estimated from shapes (DESIGN 4.2).

Both calls' ATen operators are costed by the same roofline (bytes moved, FLOPs, the target's data sheet). The estimate
is ``1 - left / total``, where ``left`` is what the candidate still leaves to torch. It is an estimate: launch gaps,
caches and the quality of either kernel are not in it. A measured coverage needs a GPU.
"""

from __future__ import annotations

from typing import Any

from drk.gym.devices import device_facts
from drk.gym.graph import TensorMeta
from drk.gym.graph_cost import operator_cost

_PEAKS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_COPIES = {"copy", "clone", "_to_copy", "contiguous", "fill", "zero", "zeros", "zeros_like", "full", "ones_like"}
DEFAULT_PEAK_TFLOPS = 60.0
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def _meta(row: Any) -> TensorMeta:
    shape = tuple(int(size) for size in row[0])
    strides = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        strides[index] = strides[index + 1] * max(shape[index + 1], 1)
    return TensorMeta(shape=shape, dtype=str(row[1]), strides=tuple(strides))


def times_us(rows: list[Any], target: str) -> dict[str, float]:
    """Return the roofline time on ``target`` by operator name.

    Rows come from a Runner; malformed ones raise one of :data:`MALFORMED`.
    """
    facts = device_facts(target)
    total: dict[str, float] = {}
    for row in rows:
        operands = [_meta(item) for item in row["operands"]]
        results = [_meta(item) for item in row["results"]]
        name = str(row["op"]).rstrip("_")
        cost = operator_cost(name, operands, results)
        dtype = results[0].dtype if results else "float32"
        peak = facts.peak_tflops.get(_PEAKS.get(dtype, ""), DEFAULT_PEAK_TFLOPS)
        total[name] = total.get(name, 0.0) + cost.time_us(facts.bandwidth_gb_s, peak)
    return total


def coverage_estimate(reference_rows: list[Any], candidate_rows: list[Any], target: str) -> float | None:
    """Return the estimate in 0..1, or None when the reference does nothing that can be costed or rows are malformed.

    A copy that the candidate makes for its own layout is not the reference's work: of copies at most as much counts as
    the reference spends on them.
    """
    try:
        total, left = times_us(reference_rows, target), times_us(candidate_rows, target)
    except MALFORMED:
        return None
    whole = sum(total.values())
    if whole <= 0:
        return None
    rest = sum(min(spent, total.get(name, 0.0)) if name in _COPIES else spent for name, spent in left.items())
    return min(max(1.0 - rest / whole, 0.0), 1.0)
