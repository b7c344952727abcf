"""``embedding_bag`` over bags of equal length as a gather and a reduction, which one kernel computes.

Bags given as a matrix reach the graph as a flat list with offsets ``0, L, 2 L, ...``; the matrix is taken again.

Left out: bags of different lengths, weights for each sample, padding, maxima and sparse gradients stay PyTorch's.
"""

from __future__ import annotations

from dataclasses import replace

from drk.assistant.synth.draft import contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Graph, Node, Ref, TensorMeta

_REDUCING = {0: "sum.dim_IntList", 1: "mean.dim"}
"""Operators by the mode of ``embedding_bag``."""
_NAME = "bag_rows"


def equal_bags(graph: Graph) -> Graph:
    """Return the graph with bags of equal length written out; without any, the graph itself."""
    by_name = {node.name: node for node in graph.nodes}
    metas, users = graph.metas(), graph.users()
    nodes: list[Node] = []
    done: set[str] = set()
    for node in graph.nodes:
        if node.op != "getitem" or node.args[1] != 0 or not isinstance(node.args[0], Ref):
            nodes.append(node)
            continue
        bag = by_name.get(node.args[0].name)
        ids = None if bag is None else _matrix(bag, by_name, metas)
        others = () if bag is None else users[bag.name]
        if bag is None or ids is None or any(users[name] for name in others if name != node.name):
            nodes.append(node)
            continue
        table, name = bag.args[0], _unused(node.name, {*metas, *by_name})
        shape = (*metas[ids.name].shape, metas[table.name].shape[1])
        rows = contiguous_meta(shape, metas[table.name].dtype)
        nodes.append(replace(bag, name=name, op="aten.embedding.default", args=(table, ids), kwargs={}, metas=(rows,)))
        op = f"aten.{_REDUCING[bag.args[4]]}"
        nodes.append(replace(bag, name=node.name, op=op, args=(Ref(name), (1,)), kwargs={}, metas=(node.meta,)))
        done |= {bag.name, *others} - {node.name}
    return replace(graph, nodes=tuple(item for item in nodes if item.name not in done)) if done else graph


def _unused(name: str, taken: set[str]) -> str:
    wish, count = f"{name}_{_NAME}", 1
    while wish in taken:
        wish, count = f"{name}_{_NAME}_{count}", count + 1
    return wish


def _matrix(bag: Node, by_name: dict[str, Node], metas: dict[str, TensorMeta]) -> Ref | None:
    """The matrix of indices, one bag a row, or None where bags are not plainly of equal length."""
    if not bag.op.startswith("aten.embedding_bag.") or bag.kwargs or len(bag.args) < 5:
        return None
    table, flat, offsets, scaled, mode, *rest = bag.args
    if not all(isinstance(item, Ref) for item in (table, flat, offsets)) or scaled or mode not in _REDUCING:
        return None
    if any(item is not None and item is not False for item in rest) or metas[table.name].dtype not in FLOATS:
        return None
    view, walk = by_name.get(flat.name), by_name.get(offsets.name)
    if view is None or walk is None or view.bare_op not in {"reshape", "view"} or walk.bare_op != "arange":
        return None
    ids = view.args[0]
    shape = metas[ids.name].shape
    even = len(shape) == 2 and shape[1] > 1 and walk.args[:3] == (0, shape[0] * shape[1], shape[1])
    return ids if even and len(metas[table.name].shape) == 2 else None
