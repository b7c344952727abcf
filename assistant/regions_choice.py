"""Which parts of a large module are worth kernels of their own: regions at module level, by their share of the time.

Shares come from the graph's cost on the target device where the whole module was captured (an estimate), else from the
times of a run of the whole module (:mod:`drk.gym.runner.parts`). A region is the largest part that is small enough to
be compiled as one, or, where it turns out that it cannot be captured, its own parts. Parts that are alike and called
alike are one region with several places: found once, put everywhere.

Left out: regions that cross module borders, and parts that are called in several ways (they keep the original code).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph
from drk.gym.graph_cost import node_cost
from drk.gym.schema import Argument, Call, Nested, Scalar, TensorSpec

MIN_SHARE = 0.02
MAX_LEAVES = 16
"""A part with more leaf modules than this is looked into."""
MAX_REGIONS = 6


@dataclass(frozen=True)
class Part:
    """One part of the module as it was called: ``share`` of the whole's time (0..1), children included."""

    path: str
    kind: str
    calls: int
    leaf: bool
    call: Call | None
    signature: str
    share: float


@dataclass(frozen=True)
class Region:
    """Parts that are alike, to be replaced by the same kernels; ``share`` is of all of them together."""

    paths: tuple[str, ...]
    kind: str
    call: Call
    share: float


def read_parts(rows: Sequence[Mapping[str, Any]], graph: Graph | None, hardware: DeviceFacts) -> dict[str, Part]:
    """Return the parts by path, in the order of the module.

    Args:
        rows: rows of :mod:`drk.gym.runner.parts`.
        graph: the captured call of the whole module, or null.
        hardware: whose data sheet the graph's cost is taken on.
    """
    estimated = graph_shares(graph, hardware) if graph is not None else {}
    total_us = max((row["time_us"] for row in rows), default=0.0) or 1.0
    found = {}
    for row in rows:
        path = str(row["path"])
        share = estimated.get(path, 0.0) if estimated else row["time_us"] / total_us
        call = _call(row["call"]) if row.get("call") else None
        found[path] = Part(path, row["type"], row["calls"], row["leaf"], call, row["signature"], share)
    return found


def graph_shares(graph: Graph, hardware: DeviceFacts) -> dict[str, float]:
    """Return the share of each module path in the graph's estimated time, children included."""
    metas = graph.metas()
    peak = max(hardware.peak_tflops.get("fp32", 0.0), 1.0)
    times: dict[str, float] = {}
    for node in graph.nodes:
        time_us = node_cost(node, metas).time_us(hardware.bandwidth_gb_s, peak)
        names = node.module.split(".") if node.module else []
        for length in range(len(names) + 1):
            path = ".".join(names[:length])
            times[path] = times.get(path, 0.0) + time_us
    total_us = times.get("", 0.0)
    return {path: time_us / total_us for path, time_us in times.items()} if total_us else {}


def choose_regions(parts: Mapping[str, Part]) -> list[Region]:
    """Return regions that do not overlap, the largest share first."""
    return group(walk(parts, ""))


def below(parts: Mapping[str, Part], region: Region) -> list[Region]:
    """Return the regions inside of a region that cannot be taken as a whole."""
    return group(part for path in region.paths for part in walk(parts, path))


def walk(parts: Mapping[str, Part], root: str) -> Iterator[Part]:
    """Give the parts below ``root`` that could be regions, none inside of another."""
    for path in _children(parts, root):
        part = parts.get(path)
        if part is not None and part.share < MIN_SHARE:
            continue
        if part is not None and part.call is not None and _leaves(parts, path) <= MAX_LEAVES:
            yield part
        else:
            yield from walk(parts, path)


def group(found: Iterator[Part]) -> list[Region]:
    """Put parts that are alike together."""
    groups: dict[str, Region] = {}
    for part in found:
        assert part.call is not None
        known = groups.get(part.signature)
        if known is None:
            groups[part.signature] = Region((part.path,), part.kind, part.call, part.share)
        else:
            groups[part.signature] = replace(known, paths=(*known.paths, part.path), share=known.share + part.share)
    return sorted(groups.values(), key=lambda region: -region.share)


def _children(parts: Mapping[str, Part], root: str) -> list[str]:
    """Return the paths one level below ``root``, containers that are never called themselves included."""
    start = f"{root}." if root else ""
    names = [path.removeprefix(start).split(".")[0] for path in parts if path.startswith(start) and path != root]
    return list(dict.fromkeys(start + name for name in names if name))


def _leaves(parts: Mapping[str, Part], path: str) -> int:
    return sum(part.leaf for name, part in parts.items() if name == path or name.startswith(f"{path}."))


# --- calls -----------------------------------------------------------------------------------------------------


def read_call(row: Mapping[str, Any]) -> Call | None:
    """Return the call of a row, or null where it has no form."""
    return _call(row["call"]) if row.get("call") else None


def _call(data: Mapping[str, Any]) -> Call:
    args = tuple(_argument(value) for value in data["args"])
    return Call(args, {name: _argument(value) for name, value in data["kwargs"].items()})


def _argument(data: Mapping[str, Any]) -> Argument:
    if data["kind"] == "scalar":
        return Scalar(data["value"])
    if data["kind"] == "nested":
        items = tuple(_argument(item) for item in data["items"])
        return Nested(data["form"], items, tuple(data.get("keys", ())))
    return TensorSpec(
        shape=tuple(data["shape"]),
        dtype=data["dtype"],
        strides=tuple(data["strides"]) if data["strides"] is not None else None,
        low=data.get("low"),
        high=data.get("high"),
        fill=data.get("fill", "normal"),
    )
