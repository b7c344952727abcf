"""Operators that compute in a type of their own: ``softmax(x, -1, dtype=torch.float32)`` and reductions alike.

PyTorch takes the operand in that type before it does anything. So does what is written here: a cast that joins a
kernel as any elementwise operator does, and behind it the operator in its own type, which the other rules know.

Left out: types that kernels do not compute in, and operators whose result has another type than the one asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from drk.assistant.synth.draft import Draft
from drk.assistant.synth.expression import FLOATS, FUSIBLE_DTYPES
from drk.gym.graph import Node, Ref, Symbol

_PLACES: Mapping[str, int | None] = {
    **dict.fromkeys(("softmax", "log_softmax"), 2),
    **dict.fromkeys(("sum", "mean", "prod", "nansum", "nanmean", "cumsum", "cumprod", "linalg_vector_norm"), None),
}
"""Operators with a ``dtype``, and where it stands among positional arguments."""


def in_asked_type(node: Node, draft: Draft) -> Node:
    """Return ``node`` without its ``dtype``, its operand cast before it; or as it is, where that is not the same."""
    if node.bare_op not in _PLACES or len(node.metas) != 1 or node.metas[0] is None or not node.args:
        return node
    place = _PLACES[node.bare_op]
    given = node.args[place] if place is not None and len(node.args) > place else node.kwargs.get("dtype")
    source = node.args[0]
    if not isinstance(given, Symbol) or not isinstance(source, Ref) or source.name not in draft.metas:
        return node
    before = draft.metas[source.name].dtype
    if given.name != node.meta.dtype or given.name not in FLOATS or before not in FUSIBLE_DTYPES:
        return node
    kwargs = {key: value for key, value in node.kwargs.items() if key != "dtype"}
    args = node.args if place is None else node.args[:place]
    if before != given.name:
        args = (draft.emit(node, "cast", "_to_copy.default", source, dtype=given), *args[1:])
    return replace(node, args=args, kwargs=kwargs)
