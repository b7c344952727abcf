"""Attention of the library with fewer key and value heads than queries: heads are not repeated in memory.

Grouped queries are often written as keys and values repeated for each query head, by ``repeat_interleave`` or by
``expand`` and ``reshape``. The library's flash kernel reads each of them for all heads of its group
(``enable_gqa=True``).

Left out: float32 and masks, which the flash kernel does not take: without it the library repeats heads itself, or
falls back to written-out attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.rewrites import without_dead
from drk.gym.graph import Graph, Node, Ref, TensorMeta

_HALVES = frozenset({"float16", "bfloat16"})
MAX_HEAD = 256
"""Widest heads of the flash kernel."""


def with_shared_heads(graph: Graph) -> Graph:
    """Return the graph with attention that reads keys and values as they were before each was repeated."""
    metas = graph.metas()
    by_name = {node.name: node for node in graph.nodes}
    nodes = [_shared(node, by_name, metas) for node in graph.nodes]
    if all(own is node for own, node in zip(nodes, graph.nodes, strict=True)):
        return graph
    return without_dead(replace(graph, nodes=tuple(nodes)))


def _shared(node: Node, by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta]) -> Node:
    if node.op != "aten.scaled_dot_product_attention.default" or len(node.metas) != 1 or node.metas[0] is None:
        return node
    given: list[Any] = [*node.args[3:], *(None, 0.0, False)[len(node.args) - 3 :]]
    mask, dropout = node.kwargs.get("attn_mask", given[0]), node.kwargs.get("dropout_p", given[1])
    query = metas.get(node.args[0].name) if isinstance(node.args[0], Ref) else None
    if query is None or query.dtype not in _HALVES or len(query.shape) != 4 or query.shape[-1] > MAX_HEAD:
        return node
    if mask is not None or dropout != 0.0 or node.kwargs.get("enable_gqa"):
        return node
    sources = [_before_repeat(item, by_name, metas) for item in node.args[1:3]]
    if None in sources or len({metas[name].shape[1] for name in sources if name is not None}) != 1:
        return node
    refs = tuple(Ref(name) for name in sources if name is not None)
    return replace(node, args=(node.args[0], *refs, *node.args[3:]), kwargs={**node.kwargs, "enable_gqa": True})


def _before_repeat(value: Any, by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta]) -> str | None:
    """Name of the tensor (batch, heads, length, width) whose heads ``value`` repeats one by one, or None."""
    node = by_name.get(value.name) if isinstance(value, Ref) else None
    if node is None:
        return None
    if node.op == "aten.repeat_interleave.self_int":
        source, count, dim = (*node.args, None)[:3]
        return source.name if type(count) is int and dim in (1, -3) and len(metas[source.name].shape) == 4 else None
    steps = [node]
    while len(steps) < 3 and isinstance(steps[-1].args[0], Ref) and steps[-1].args[0].name in by_name:
        steps.append(by_name[steps[-1].args[0].name])
    if [step.bare_op for step in steps[1:]] != ["expand", "unsqueeze"]:
        return None
    if node.bare_op not in {"reshape", "view", "flatten", "_unsafe_view"} or not isinstance(steps[2].args[0], Ref):
        return None
    source = steps[2].args[0].name
    batch, heads, *rest = metas[source].shape if source in metas else (0, 0)
    count = node.meta.shape[1] // max(heads, 1)
    told = steps[1].meta.shape == (batch, heads, count, *rest) and node.meta.shape == (batch, heads * count, *rest)
    return source if told and len(rest) == 2 and steps[2].meta.shape == (batch, heads, 1, *rest) else None
