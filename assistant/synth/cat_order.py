"""Concatenations of concatenations as one, and cheap pieces that several of them read made for each.

In densely connected blocks each layer reads all that the layers before it made. Written as they stand, every
concatenation is a tensor that the next one copies. Taken flat, no kernel that reads one needs another to be written;
and where a piece is a bias and an activation of one tensor, each kernel reads that tensor instead.

Left out: what something other than elementwise operators and concatenations reads. It is in memory in any case, and
reading it costs what reading its pieces does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.cat_maps import is_join, join_dim
from drk.assistant.synth.draft import fresh_name
from drk.assistant.synth.expression import is_pointwise, scalar_flops
from drk.assistant.synth.rewrites import without_dead
from drk.gym.graph import Graph, Node, Ref, TensorMeta

_CATS = frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "dstack"})
MAX_PIECES = 16
"""Most pieces of a concatenation."""
MAX_FLOPS = 48
"""Most arithmetic instructions for an element of a piece that is made once more."""


def flat_cats(graph: Graph) -> Graph:
    """Return the graph with pieces of concatenations in place of those, where that leaves them unread or unwritten."""
    metas, users = graph.metas(), graph.users()
    every = {node.name: node for node in graph.nodes}
    by_name: dict[str, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        own = _flat(node, by_name, every, metas, users) if _is_cat(node) else node
        by_name[own.name] = own
        nodes.append(own)
    return without_dead(replace(graph, nodes=tuple(nodes)))


def pieces_for_each(graph: Graph) -> Graph:
    """Return the graph with cheap pieces that several joins read, and nothing else, made once for each."""
    metas, users = graph.metas(), graph.users()
    by_name = {node.name: node for node in graph.nodes}
    taken = set(graph.names())
    copies: dict[str, list[Node]] = {}
    tables: dict[str, dict[str, str]] = {}
    for node in graph.nodes:
        chain = _chain(node, by_name, metas, users)
        for reader in dict.fromkeys(users[node.name][1:]) if chain else ():
            table: dict[str, str] = {}
            for item in chain:
                table[item.name] = fresh_name(f"{item.name}_again", taken)
                copies.setdefault(node.name, []).append(_renamed(replace(item, name=table[item.name]), table))
            tables.setdefault(reader, {})[node.name] = table[node.name]
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes += [_renamed(node, tables.get(node.name, {})), *copies.get(node.name, ())]
    return replace(graph, nodes=tuple(nodes))


def _chain(
    node: Node, by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta], users: Mapping[str, tuple[str, ...]]
) -> list[Node]:
    """The elementwise operators that make ``node`` of one tensor and vectors, if joins alone read it, two or more."""
    readers = [by_name.get(name) for name in users[node.name]]
    if len({*users[node.name]}) < 2 or not all(item is not None and is_join(item) for item in readers):
        return []
    if not is_pointwise(node, metas):
        return []
    chain, read, pending = [node], set[str](), list(node.inputs())
    while pending:
        name = pending.pop()
        maker = by_name.get(name)
        if maker is not None and is_pointwise(maker, metas) and len({*users[name]}) == 1:
            chain.append(maker)
            pending += maker.inputs()
        else:
            read.add(name)
    full = sum(metas[name].numel for name in read if metas[name].numel * 8 > node.meta.numel)
    cheap = scalar_flops(chain) <= MAX_FLOPS and full <= node.meta.numel
    return sorted(chain, key=list(by_name.values()).index) if cheap else []


def _renamed(node: Node, table: Mapping[str, str]) -> Node:
    return replace(
        node, args=_with(node.args, table), kwargs={key: _with(arg, table) for key, arg in node.kwargs.items()}
    )


def _with(value: Any, table: Mapping[str, str]) -> Any:
    if isinstance(value, Ref):
        return Ref(table.get(value.name, value.name))
    return tuple(_with(item, table) for item in value) if isinstance(value, tuple) else value


def _is_cat(node: Node) -> bool:
    return is_join(node) and node.bare_op in _CATS


def _flat(
    node: Node,
    done: Mapping[str, Node],
    every: Mapping[str, Node],
    metas: Mapping[str, TensorMeta],
    users: Mapping[str, tuple[str, ...]],
) -> Node:
    """The concatenation ``node`` of what concatenations among its pieces are made of."""
    dim, rank = join_dim(node), len(node.meta.shape)
    pieces: list[Ref] = []
    for item in node.args[0]:
        inner = done.get(item.name)
        light = all(name in every and (_is_cat(every[name]) or is_pointwise(every[name], metas))
                    for name in users[item.name])  # fmt: skip
        if inner is not None and light and _is_cat(inner) and len(inner.meta.shape) == rank and join_dim(inner) == dim:
            pieces += inner.args[0]
        else:
            pieces.append(item)
    if len(pieces) == len(node.args[0]) or len(pieces) > MAX_PIECES:
        return node
    return replace(node, op="aten.cat.default", args=(tuple(pieces), dim), kwargs={})
