"""When a candidate in a CUDA graph is worth trying, and where it stands among the others.

Small modules are bound by what the host does to start kernels, not by the kernels. A graph starts them all at once; the
price is a copy of the inputs before and of the results after. Two rules find such modules: an estimate (starting takes
longer than the kernels and those copies would), and, better, an accepted candidate's verdict, whose latency is well
above what its kernels take on the device. What a loop over time steps unrolls to is estimated to be bound by launches
many times over; it gets its graph first.

Left out: what a launch costs on the host at hand; the estimate takes figures of one server for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from drk.assistant.synth.graphed import is_graphed
from drk.assistant.synth.layouts import is_convolution
from drk.gym.devices import DeviceFacts, device_facts
from drk.gym.graph import Graph, Node, TensorMeta, references
from drk.gym.graph_cost import VIEWS, Cost, node_cost

BUILTIN = "builtin"
KERNEL_US = 20.0
OPERATOR_US = 10.0
CONVOLUTION_US = 60.0
"""What starting an emitted kernel, one of PyTorch's operators and a convolution cost the host.

Measured beside an H200 (PyTorch 2.11, Triton 3.6): 10 us an operator, 25 us a kernel by Inductor's launcher, 50 us by
Triton's own, of which an emitted launcher that remembers what it compiled leaves less than half. Convolutions also
choose their algorithm and, channels last, see to their weights' layout."""
UNSURE = 2.5
"""A graph is tried where starting may take so many times what is estimated."""
CLEARLY = 4.0
"""Starting that takes so many times what the device does leaves no doubt."""
MANY_OPERATORS = 50
MIN_LAUNCHES = 2
WORTHWHILE = 1.5
"""A latency of so many times the device time is bound by launches."""
GRAPH_US = 20.0
"""What the host does for a replay: the call's kind, a copy, a launch, and a copy of the result."""
MAX_DEVICE_US = 1000.0
FUSED_SHARE = 0.5
"""Kernels take about so much of the time that the operators' own traffic would, and never less than inputs and results
once."""
_GATHERS = frozenset(("embedding", "index_select", "gather", "index", "take_along_dim"))


class Form(Protocol):
    """A compiled candidate."""

    @property
    def source(self) -> str:
        """Its text."""
        ...

    @property
    def launches(self) -> int:
        """About how many kernels and operators it starts."""
        ...

    @property
    def host_us(self) -> float:
        """About what starting them takes the host."""
        ...


F = TypeVar("F", bound=Form)


def with_graphs(
    plain: Iterable[F],
    in_graph: Callable[[F], F | None],
    graph: Graph,
    history: Sequence[Any],
    hardware: Any,
) -> Iterator[F]:
    """Yield ``plain`` candidates and, where launches bound the module, candidates in a CUDA graph at their places.

    On an estimate the second one is the first one in a graph; where there is no doubt they change places. After a
    measurement the next one is the best one in a graph, and so are all that follow once these are in front.

    Args:
        plain: without graphs, most promising first; iterated over several times.
        in_graph: makes a candidate in a graph of one without, or nothing where there can be none.
        graph: as captured.
        history: turns with ``candidate`` and ``verdict``.
        hardware: :class:`drk.gym.devices.DeviceFacts`; anything else stands for an H100.
    """
    facts = hardware if isinstance(hardware, DeviceFacts) else device_facts("sm_90")
    slow = launch_bound(graph, history, facts)
    if slow is not None:
        same = (one for one in plain if without_docstring(one.source) == without_docstring(slow.candidate.source))
        yield from graphed(same, in_graph)
    if graphs_lead(history):
        yield from graphed(plain, in_graph)
    for place, one in enumerate(plain):
        excess = launch_excess(graph, one, facts) if place == 0 else 0.0
        if excess > CLEARLY and _operators(graph) >= MANY_OPERATORS:
            yield from graphed([one], in_graph)
            yield one
            continue
        yield one
        if excess > 1.0 / UNSURE:
            yield from graphed([one], in_graph)


def graphed(plain: Iterable[F], in_graph: Callable[[F], F | None]) -> Iterator[F]:
    """Yield each candidate in a graph, where there can be one."""
    return (made for one in plain if (made := in_graph(one)) is not None)


def without_docstring(source: str) -> str:
    """Return a candidate's text without its module docstring, which says how it was chosen."""
    return source.split('"""', 2)[-1]


def starting_us(operators: Iterable[Node | None]) -> float:
    """Return about what starting costs the host: of the operators that stay PyTorch's, and of kernels (null)."""
    return sum(_starting_us(node) for node in operators)


def _starting_us(node: Node | None) -> float:
    if node is None:
        return KERNEL_US
    if node.bare_op in VIEWS:
        return 0.0
    return CONVOLUTION_US if is_convolution(node) else OPERATOR_US


def launch_excess(graph: Graph, form: Form, facts: DeviceFacts) -> float:
    """Return, by an estimate, how many times the device's time in a graph (with its copies) starting ``form`` takes.

    0 where a graph would not pay: a single launch, or less than a replay takes the host.
    """
    if form.launches < MIN_LAUNCHES or form.host_us <= GRAPH_US:
        return 0.0
    metas = graph.metas()
    apart_us = sum(_node_us(node, metas, facts) for node in graph.nodes)
    moved_us = sum(_moved_bytes(graph)) / (facts.bandwidth_gb_s * 1e3)
    device_us = max(FUSED_SHARE * apart_us, moved_us) + _copies_us(graph, facts)
    return form.host_us / max(device_us, GRAPH_US)


def _operators(graph: Graph) -> int:
    return sum(node.bare_op not in VIEWS for node in graph.nodes)


def _copies_us(graph: Graph, facts: DeviceFacts) -> float:
    """Return what copying inputs in and results out takes: each byte is read and written."""
    return 2 * sum(_moved_bytes(graph)) / (facts.bandwidth_gb_s * 1e3)


def _node_us(node: Node, metas: Mapping[str, TensorMeta], facts: DeviceFacts) -> float:
    results = [meta for meta in node.metas if meta is not None]
    if node.bare_op in _GATHERS:  # they read as much of their table as they write
        return Cost(2 * sum(meta.size_bytes for meta in results), 0).time_us(facts.bandwidth_gb_s, 1.0)
    peak = facts.peak_tflops.get({"bfloat16": "bf16", "float16": "fp16"}.get(_dtype(results), "fp32"), 60.0)
    return node_cost(node, metas).time_us(facts.bandwidth_gb_s, peak)


def _dtype(results: Sequence[TensorMeta]) -> str:
    return results[0].dtype if results else ""


def _moved_bytes(graph: Graph) -> tuple[int, int]:
    """Return the bytes of the inputs and of the results, which a replay copies."""
    metas = graph.metas()
    inputs = sum(item.meta.size_bytes for item in graph.placeholders if item.kind == "input")
    return inputs, sum(metas[name].size_bytes for name in set(references(graph.output)) if name in metas)


def launch_bound(graph: Graph, history: Sequence[Any], facts: DeviceFacts) -> Any | None:
    """Return the turn that is to be tried in a graph, or None.

    Of the accepted turns without a graph that a GPU measured to be bound by launches, the one that takes the least time
    on the device. What a replay costs beside its kernels must be small beside what can be gained.
    """
    least_us = GRAPH_US + 2 * _copies_us(graph, facts)
    found: list[tuple[float, int]] = []
    for index, turn in enumerate(history):
        latency_us, device_us = measured_us(getattr(turn, "verdict", None))
        if (
            turn.candidate.proposer != BUILTIN
            or is_graphed(turn.candidate.source)
            or not 0.0 < device_us <= MAX_DEVICE_US
        ):
            continue
        if latency_us > WORTHWHILE * device_us and latency_us - device_us > least_us:
            found.append((device_us, index))
    return history[min(found)[1]] if found else None


def measured_us(verdict: Any) -> tuple[float, float]:
    """Return latency and device time of one call in microseconds; zeros where no GPU measured an accepted candidate."""
    if verdict is None or getattr(verdict, "status", "") != "accepted" or verdict.latency_ms is None:
        return 0.0, 0.0
    return verdict.latency_ms.median * 1e3, sum(row.time_us or 0.0 for row in verdict.kernels)


def graphs_lead(history: Sequence[Any]) -> bool:
    """Say whether the fastest accepted candidate so far is one in a graph."""
    times = [(measured_us(getattr(turn, "verdict", None))[0], turn.candidate.source) for turn in history]
    times = [(latency_us, source) for latency_us, source in times if latency_us > 0.0]
    return bool(times) and is_graphed(min(times)[1])
