"""Why nothing was won: where the time is, what bounds it, and what else to try, from graph, data sheet and verdict.

Shares are estimates from the graph (each operator at its roofline) unless a GPU measured the best candidate's kernels.
A call is launch-bound when starting its operators takes longer than their work, memory-bound or compute-bound by the
larger of traffic and arithmetic. The advice names things that drk does not do by itself, since they change numbers,
layouts or how the module is called.

Left out: what other hardware would bring, and changes of the algorithm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drk.assistant.outcome import Outcome
from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph, Node
from drk.gym.graph_cost import VIEWS, node_cost
from drk.gym.schema import Task

Bound = Literal["launch", "memory", "compute"]
LAUNCH_US = 4.0
"""What eager PyTorch needs to start one operator, about."""
TOP = 4
IN_A_GRAPH = "in a CUDA graph"
"""How the notes of candidates end that were tried in one (:mod:`drk.assistant.synth.graphed`)."""
PRODUCTS = frozenset(("linear", "mm", "addmm", "matmul", "bmm", "baddbmm", "einsum"))


@dataclass(frozen=True)
class Explanation:
    """``time`` lists what takes the most of it; ``bound`` is null where the module could not be captured."""

    bound: Bound | None
    reason: str
    time: tuple[str, ...]
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the public form."""
        return {"bound": self.bound, "reason": self.reason, "time": list(self.time), "advice": list(self.advice)}


def explain(outcome: Outcome, task: Task, graph: Graph | None, hardware: DeviceFacts) -> Explanation | None:
    """Return why nothing was won, or null where something was."""
    if outcome.status in ("optimised", "unmeasured") or outcome.interrupted:
        return None
    if graph is None:
        return Explanation(
            None,
            "the module could not be captured as one graph, nor were kernels found for its parts",
            _measured(outcome),
            (
                "name a part of it that has no branches on data (drk optimize FILE:CLASS.part)",
                "a language model as proposer needs no graph (--model)",
            ),
        )
    bound, reason = _bound(graph, hardware)
    time = _measured(outcome) or _estimated(graph, hardware)
    return Explanation(bound, reason, time, _advice(outcome, bound, task, graph))


def _bound(graph: Graph, hardware: DeviceFacts) -> tuple[Bound, str]:
    metas = graph.metas()
    launched = [node for node in graph.nodes if node.bare_op not in VIEWS]
    costs = [node_cost(node, metas) for node in launched]
    memory_us = sum(cost.size_bytes for cost in costs) / (hardware.bandwidth_gb_s * 1e3)
    compute_us = sum(cost.flops for cost in costs) / (_peak(graph, hardware) * 1e6)
    launch_us = LAUNCH_US * len(launched)
    told = f"about {memory_us:.0f} us of memory traffic and {compute_us:.0f} us of arithmetic on {hardware.name}"
    if launch_us > max(memory_us, compute_us):
        return "launch", f"launch-bound: starting {len(launched)} operators takes about {launch_us:.0f} us; {told}"
    if memory_us >= compute_us:
        return "memory", f"memory-bound: {told}"
    return "compute", f"compute-bound: {told}"


def _peak(graph: Graph, hardware: DeviceFacts) -> float:
    wide = any(item.meta.dtype == "float32" for item in graph.placeholders)
    peaks = hardware.peak_tflops
    return float(peaks.get("fp32", 0.0) if wide else max(peaks.values(), default=0.0)) or 1.0


def _measured(outcome: Outcome) -> tuple[str, ...]:
    kernels = outcome.best.verdict.kernels if outcome.best is not None else ()
    timed = sorted((row for row in kernels if row.share), key=lambda row: -(row.share or 0.0))
    return tuple(f"{row.name} {row.share:.0%}" for row in timed[:TOP])


def _estimated(graph: Graph, hardware: DeviceFacts) -> tuple[str, ...]:
    metas, peak = graph.metas(), _peak(graph, hardware)
    times: dict[str, float] = {}
    for node in graph.nodes:
        cost_us = node_cost(node, metas).time_us(hardware.bandwidth_gb_s, peak)
        times[_where(node)] = times.get(_where(node), 0.0) + cost_us
    total_us = sum(times.values()) or 1.0
    ranked = sorted(times.items(), key=lambda item: -item[1])[:TOP]
    return tuple(f"{name} {time_us / total_us:.0%} (estimated)" for name, time_us in ranked if time_us)


def _where(node: Node) -> str:
    return f"{node.bare_op} (line {node.line})" if node.line else node.bare_op


def _advice(outcome: Outcome, bound: Bound, task: Task, graph: Graph) -> tuple[str, ...]:
    ops = {node.bare_op for node in graph.nodes}
    wide = any(item.meta.dtype == "float32" for item in graph.placeholders)
    found = []
    if bound == "launch":
        if not any(IN_A_GRAPH in turn.candidate.note for turn in outcome.episode.turns):
            found.append(
                'CUDA graphs: torch.compile(model, mode="reduce-overhead"), or torch.cuda.graph around the call'
            )
        found.append("larger batches: several calls in one")
    if wide and ops & PRODUCTS and task.precision == "match":
        found.append("lower precision for matrix products, where the model allows it: --precision tf32, or bf16")
    if wide and bound == "memory":
        found.append("bfloat16 or float16 storage halves the traffic: --autocast bf16, or model.to(torch.bfloat16)")
    if any(op.startswith("conv") for op in ops):
        found.append("channels-last layout for convolutions: model.to(memory_format=torch.channels_last)")
    if not found:
        found.append("what calls this module: a larger region around it may hold more to fuse")
    return tuple(found)


def explanation_lines(explained: Mapping[str, Any] | None) -> list[str]:
    """Return the summary's lines for the JSON form."""
    if explained is None:
        return []
    lines = [f"  why:       {explained['reason']}"]
    lines += [f"  time:      {', '.join(explained['time'])}"] if explained["time"] else []
    return lines + [f"  try:       {one}" for one in explained["advice"]]
