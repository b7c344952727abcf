"""When a candidate in a CUDA graph is worth trying, and where it stands among the others.

Small modules are bound by what the host does to start kernels, not by the kernels. A graph starts them all at once; the
price is a copy of the inputs before and of the results after. Two rules find such modules: an estimate (each operator's
roofline time is small beside :data:`LAUNCH_US` a launch), and, better, an accepted candidate's verdict, whose latency
is well above what its kernels take on the device.

Left out: what a launch costs on the host at hand, which is taken for granted by the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from drk.assistant.synth.graphed import is_graphed
from drk.gym.devices import DeviceFacts, device_facts
from drk.gym.graph import Graph, Node, TensorMeta, references
from drk.gym.graph_cost import Cost, node_cost

BUILTIN = "builtin"
LAUNCH_US = 5.0
"""What starting one kernel costs the host, at least; with Triton's launcher and PyTorch's allocations it is more."""
MIN_LAUNCHES = 2
WORTHWHILE = 1.5
"""A latency of so many times the device time is bound by launches."""
GRAPH_US = 20.0
"""What the host does for a replay: the call's kind, a copy, a launch, and a copy of the result."""
MAX_DEVICE_US = 1000.0
MAX_INPUT_BYTES = 8 * 2**20
"""Up to so many bytes of inputs a graph is tried on an estimate alone."""
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


F = TypeVar("F", bound=Form)


def with_graphs(
    plain: Iterable[F],
    in_graph: Callable[[F], F | None],
    graph: Graph,
    history: Sequence[Any],
    hardware: Any,
) -> Iterator[F]:
    """Yield ``plain`` candidates and, where launches bound the module, candidates in a CUDA graph at their places.

    On an estimate the second one is the first one in a graph. After a measurement the next one is the best one in a
    graph, and so are all that follow once these are in front.

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
        yield one
        if place == 0 and seems_launch_bound(graph, one.launches, facts):
            yield from graphed([one], in_graph)


def graphed(plain: Iterable[F], in_graph: Callable[[F], F | None]) -> Iterator[F]:
    """Yield each candidate in a graph, where there can be one."""
    return (made for one in plain if (made := in_graph(one)) is not None)


def without_docstring(source: str) -> str:
    """Return a candidate's text without its module docstring, which says how it was chosen."""
    return source.split('"""', 2)[-1]


def seems_launch_bound(graph: Graph, launches: int, facts: DeviceFacts) -> bool:
    """Say whether, by an estimate, starting ``launches`` kernels takes longer than running them."""
    if launches < MIN_LAUNCHES or _moved_bytes(graph)[0] > MAX_INPUT_BYTES:
        return False
    metas = graph.metas()
    device_us = sum(_node_us(node, metas, facts) for node in graph.nodes)
    return device_us < min(LAUNCH_US * launches, MAX_DEVICE_US)


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
    copies_us = 2 * sum(_moved_bytes(graph)) / (facts.bandwidth_gb_s * 1e3)
    least_us = GRAPH_US + 2 * copies_us
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
