"""The least time that a module's call can take on a GPU, from its graph and the data sheet.

Memory: inputs, weights and outputs move once. Arithmetic: the counted FLOPs at the fastest rate that the precision
allows (for fp32 a third of the TF32 rate, since three products make one of full precision). The larger of the two
bounds every kernel from below, as far as data-sheet peaks hold: a search that comes near has nothing left to find.

Left out: caches that keep weights from call to call (small modules can beat the memory bound), launch time, clocks.
"""

from __future__ import annotations

from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph
from drk.gym.graph_cost import graph_cost

NEAR = 1.10
"""A measured time below this multiple of the bound is as good as it gets."""


def least_bytes(graph: Graph) -> int:
    """Return the bytes of inputs, weights and outputs once, which no fusion can go below."""
    metas = graph.metas()
    results = {name for name, users in graph.users().items() if "output" in users}
    inputs = {item.name for item in graph.placeholders}
    return sum(metas[name].size_bytes for name in results | inputs if name in metas)


def least_memory_us(graph: Graph, hardware: DeviceFacts) -> float:
    """Return the time in microseconds that :func:`least_bytes` take at the data sheet's bandwidth."""
    return least_bytes(graph) / (hardware.bandwidth_gb_s * 1e3)


def bound_us(graph: Graph, hardware: DeviceFacts) -> float:
    """Return the larger of memory and arithmetic bound in microseconds."""
    peaks = hardware.peak_tflops
    wide = any(item.meta.dtype == "float32" for item in graph.placeholders)
    fastest = max(peaks.get("tf32", 0.0) / 3, peaks.get("fp32", 0.0)) if wide else max(peaks.values(), default=0.0)
    arithmetic_us = graph_cost(graph).flops / (fastest * 1e6) if fastest else 0.0
    return max(least_memory_us(graph, hardware), arithmetic_us)
