"""Cuts into equal parts, whatever words they are written in, as ``chunk``: numbers of parts instead of elements.

``x[..., : x.shape[-1] // 2]`` and ``x[..., x.shape[-1] // 2 :]`` are captured with the half as a number, which is
another place at other sizes; so is ``x.split(x.shape[1] // 3, 1)``. Slices that together are the whole of a dimension,
each as long as the others, are taken for a cut into so many parts: at the captured sizes both are the same.

Left out: weights, whose sizes are given, and slices that overlap or leave something out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import fresh_name
from drk.gym.graph import Graph, Node, Ref, TensorMeta

MAX_PARTS = 64


def in_equal_parts(graph: Graph) -> Graph:
    """Return the graph with cuts into equal parts as ``chunk``; without any, the graph itself."""
    metas = graph.metas()
    fixed = {item.name for item in graph.placeholders if item.kind != "input"}
    groups: dict[tuple[str, int], dict[str, tuple[int, int]]] = {}
    for node in graph.nodes:
        cut = _cut(node, metas)
        if cut is not None and cut[0][0] not in fixed:
            groups.setdefault(cut[0], {})[node.name] = cut[1]
    parts = {key: count for key, cuts in groups.items() if (count := _count(key, cuts, metas))}
    taken, made = set(graph.names()), dict[tuple[str, int], str]()
    nodes: list[Node] = []
    for node in graph.nodes:
        cut = _cut(node, metas)
        if cut is None or cut[0] not in parts:
            nodes.append(_split(node, metas) if node.bare_op in _SPLITS else node)
            continue
        key, (start, _) = cut
        count, size = parts[key], metas[key[0]].shape[key[1]]
        if key not in made:
            made[key] = fresh_name("chunk", taken)
            args = (Ref(key[0]), count, key[1])
            parted = (node.meta,) * count
            nodes.append(replace(node, name=made[key], op="aten.chunk.default", args=args, kwargs={}, metas=parted))
        place = start * count // size
        nodes.append(replace(node, op="getitem", args=(Ref(made[key]), place), kwargs={}))
    return graph if list(graph.nodes) == nodes else replace(graph, nodes=tuple(nodes))


_SPLITS = frozenset({"split", "split_with_sizes"})


def _cut(node: Node, metas: Mapping[str, TensorMeta]) -> tuple[tuple[str, int], tuple[int, int]] | None:
    """((tensor, dimension), (start, end)) of a slice without steps."""
    if node.op not in {"aten.slice.Tensor", "aten.narrow.default"} or node.kwargs or len(node.metas) != 1:
        return None
    source = node.args[0]
    meta = metas.get(source.name) if isinstance(source, Ref) else None
    dim, start, end, step = (*node.args[1:], *(0, None, None, 1)[len(node.args) - 1 :])[:4]
    if meta is None or not all(item is None or type(item) is int for item in (dim, start, end)) or step != 1:
        return None
    size = meta.shape[dim % len(meta.shape)]
    start = start or 0
    if node.bare_op == "narrow":
        end = start + end
    first, last = (
        min(max(item + size if item < 0 else item, 0), size) for item in (start, size if end is None else end)
    )
    return (source.name, dim % len(meta.shape)), (first, last)


def _count(key: tuple[str, int], cuts: Mapping[str, tuple[int, int]], metas: Mapping[str, TensorMeta]) -> int:
    """How many equal parts ``cuts`` are together, or 0."""
    size, ranges = metas[key[0]].shape[key[1]], sorted(set(cuts.values()))
    count = len(ranges)
    if not 2 <= count <= MAX_PARTS or size % count or size == count:
        return 0
    length = size // count
    return count if ranges == [(place * length, (place + 1) * length) for place in range(count)] else 0


def _split(node: Node, metas: Mapping[str, TensorMeta]) -> Node:
    """``split`` into equal parts as ``chunk``."""
    source = node.args[0]
    meta = metas.get(source.name) if isinstance(source, Ref) else None
    if not node.op.startswith("aten.") or meta is None or len(node.metas) < 2:
        return node
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(meta.shape)
    shapes = {part.shape if part is not None else () for part in node.metas}
    if len(shapes) != 1 or meta.shape[dim] == len(node.metas):
        return node
    return replace(node, op="aten.chunk.default", args=(source, len(node.metas), dim), kwargs={})
