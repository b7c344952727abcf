"""What the operators of a graph cost, from shapes alone. Never imports torch.

Each operator reads its operands and writes its results once (views cost nothing). FLOPs are counted for matrix
products, convolutions and attention; pointwise and reduction operators count one per element.

These are estimates: caches, launch gaps, and what a library's algorithm really moves are left out. Reports must call
them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from drk.gym.graph import Graph, Node, TensorMeta

# fmt: off
VIEWS = frozenset((
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand",
    "expand_as", "slice", "select", "split", "chunk", "split_with_sizes", "flatten", "unflatten", "alias",
    "detach", "detach_", "narrow", "unbind", "view_as", "movedim", "swapaxes", "mT", "numpy_T", "lift_fresh",
    "lift_fresh_copy", "contiguous", "getitem", "as_strided",
))
# fmt: on
"""Operators (bare names) that move no data, or usually none."""
_MATMULS = frozenset(("linear", "mm", "addmm", "matmul", "bmm", "baddbmm"))


@dataclass(frozen=True)
class Cost:
    """Estimated device-memory traffic and arithmetic."""

    size_bytes: int
    flops: int

    def time_us(self, bandwidth_gbs: float, peak_tflops: float) -> float:
        """Roofline time: the larger of traffic over bandwidth (GB/s) and arithmetic over peak (TFLOP/s)."""
        return max(self.size_bytes / (bandwidth_gbs * 1e3), self.flops / (peak_tflops * 1e6))


def node_cost(node: Node, metas: Mapping[str, TensorMeta]) -> Cost:
    """Estimate one operator; ``metas`` is :meth:`Graph.metas`."""
    results = [meta for meta in node.metas if meta is not None]
    operands = [metas[name] for name in node.inputs() if name in metas]
    return operator_cost(node.bare_op, operands, results)


def operator_cost(bare_op: str, operands: list[TensorMeta], results: list[TensorMeta]) -> Cost:
    """Estimate one operator from its name (without namespace and overload) and the shapes it reads and writes."""
    if bare_op in VIEWS:
        return Cost(0, 0)
    traffic = sum(meta.size_bytes for meta in (*operands, *results))
    return Cost(traffic, _flops(bare_op, operands, results))


def graph_cost(graph: Graph) -> Cost:
    """Sum of all operators, each on its own (what eager execution moves)."""
    metas = graph.metas()
    costs = [node_cost(node, metas) for node in graph.nodes]
    return Cost(sum(cost.size_bytes for cost in costs), sum(cost.flops for cost in costs))


def _flops(bare_op: str, operands: list[TensorMeta], results: list[TensorMeta]) -> int:
    out = results[0].numel if results else 0
    if bare_op in _MATMULS and operands and operands[-1].shape:
        left = operands[1 if bare_op in {"addmm", "baddbmm"} and len(operands) > 2 else 0]
        return 2 * out * (left.shape[-1] if left.shape else 1)
    if bare_op.startswith("conv") and len(operands) > 1 and operands[1].shape:
        weight = operands[1]
        return 2 * out * (weight.numel // max(1, weight.shape[0]))
    if bare_op == "scaled_dot_product_attention" and len(operands) > 2:
        query, key = operands[0], operands[1]
        return 4 * query.numel * key.shape[-2]
    return max([out, *(meta.numel for meta in operands)])


def format_graph(graph: Graph) -> str:
    """One line per operator: name, operator, shape, dtype, module, estimated MB and MFLOP."""
    metas = graph.metas()
    lines = []
    for node in graph.nodes:
        cost = node_cost(node, metas)
        meta = next((item for item in node.metas if item is not None), None)
        shape = f"{meta.dtype}{list(meta.shape)}" if meta else "-"
        figures = f"{cost.size_bytes / 1e6:9.3f} MB {cost.flops / 1e6:12.3f} MFLOP"
        lines.append(f"{node.name:24} {node.op:32} {shape:32} {figures}  {node.module}")
    return "\n".join(lines)
