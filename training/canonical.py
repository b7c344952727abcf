"""A graph's canonical form: what it computes, without names, shapes, constants and the order of independent nodes.

Two modules with equal forms compute the same composition, however they are spelled. The form is a hash over the graph
from its outputs back: each node by operator and the forms of its operands. Commuted operands of sums and products
count as equal. Views count, since they change what is reduced.

Left out: equality up to algebra (``x * x`` and ``x ** 2`` differ).
"""

from __future__ import annotations

import hashlib
from typing import Any

from drk.gym.graph import Graph, Pack, Ref

_COMMUTES = frozenset({"add", "mul", "maximum", "minimum"})


def canonical_graph(graph: Graph) -> str:
    """Return 16 hex digits that stand for the composition of ``graph``."""
    forms: dict[str, str] = {}
    for item in graph.placeholders:
        forms[item.name] = _digest("placeholder", item.kind, str(len(item.meta.shape)))
    for node in graph.nodes:
        operands = [_form(one, forms) for one in (*node.args, *node.kwargs.values())]
        if node.bare_op in _COMMUTES:
            operands.sort()
        forms[node.name] = _digest(node.bare_op, *operands)
    return _digest("output", _form(graph.output, forms))


def _form(value: Any, forms: dict[str, str]) -> str:
    if isinstance(value, Ref):
        return forms[value.name]
    if isinstance(value, Pack):
        return _digest("pack", *(_form(one, forms) for one in value.items))
    if isinstance(value, (tuple, list)):
        return _digest("list", *(_form(one, forms) for one in value))
    return type(value).__name__


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
