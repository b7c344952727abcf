"""Reductions of stacks along the dimension in which they were stacked: elementwise, of the stacked tensors.

``torch.stack((a, b, c)).mean(0)`` is ``(a + b + c) / 3``: the stack is never written. Rules have the form that
:mod:`drk.assistant.synth.decompositions` describes.

Left out: stacks that something else reads, and kept dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref

MAX_STACKED = 8
_JOINING = {"sum": "add.Tensor", "mean": "add.Tensor", "amax": "maximum.default", "amin": "minimum.default"}


def reduced_stack(node: Node, draft: Draft) -> Ref | None:
    """``sum``, ``mean``, ``amax`` or ``amin`` of a stack over the stacked dimension."""
    source = node.args[0]
    made = next((item for item in reversed(draft.nodes) if item.name == source.name), None)
    if made is None or made.bare_op != "stack" or len(draft.users.get(made.name, ())) != 1 or node.kwargs:
        return None
    pieces, rank = made.args[0], len(made.meta.shape)
    dim = argument(made, 1, "dim", 0) % rank
    dims = node.args[1] if len(node.args) > 1 else ()
    wanted = dims if isinstance(dims, tuple) else (dims,)
    plain = all(isinstance(item, Ref) and draft.metas[item.name].dtype == node.meta.dtype for item in pieces)
    if not plain or node.meta.dtype not in FLOATS or not 2 <= len(pieces) <= MAX_STACKED:
        return None
    if len(wanted) != 1 or wanted[0] is None or wanted[0] % rank != dim or argument(node, 2, "keepdim", False) is True:
        return None
    found = pieces[0]
    for piece in pieces[1:]:
        found = draft.emit(node, "joined", _JOINING[node.bare_op], found, piece)
    return draft.emit(node, "average", "div.Tensor", found, len(pieces)) if node.bare_op == "mean" else found


STACK_RULES: Mapping[str, Rule] = dict.fromkeys(_JOINING, reduced_stack)
"""Rules by operator."""
