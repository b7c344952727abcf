"""Scatters: values that integers send to places of a tensor, where they are added up (``index_add``, ``scatter_add``).

Several operators are read as one form. What is added to is ``base``; where the graph has made that for the purpose (a
tensor of zeros that nothing else reads), it is added to in place, else to a copy.

An index outside of the tensor is an error in PyTorch (an assertion on the device, results undefined after it). Kernels
never write there: such values are left out.

Left out: scatters that replace values, means, products and extremes, and several index tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.synth.domain import Operand
from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.reduction_rules import Rule, argument
from drk.gym.graph import Node, Ref, TensorMeta

INDEX_DTYPES = frozenset({"int64", "int32"})
SUMMED = FLOATS | {"int64", "int32"}
LEFT_OUT = "Values whose index is outside of the result are left out (PyTorch's are an error)."
NO_ORDER = "Sums are atomic: in which order their terms are added differs from run to run, as with PyTorch's own."
NOTE = "sums by atomics, in no fixed order"


@dataclass(frozen=True)
class Scatter:
    """One scatter: ``base`` plus ``scale`` times ``source``, sent along ``dim`` to where ``index`` says.

    The index has one entry for each place along ``dim`` where it ``walks`` that dimension alone, else one for each
    element of the source. With ``wraps`` negative integers count from the end.
    """

    node: Node
    base: str
    source: str
    index: str
    dim: int
    walks: bool = True
    wraps: bool = False
    scale: float = 1
    fresh: bool = False
    """The base was made for this and may be written to."""
    result: Operand | None = None
    """Where results lie for the source's dimensions, once there is a region."""

    @property
    def ordered(self) -> bool:
        """Whether the result does not depend on the order of its terms."""
        return self.node.meta.dtype not in FLOATS


def scatter_of(node: Node, metas: Mapping[str, TensorMeta]) -> Scatter | None:
    """Read ``index_add``, ``scatter_add``, ``scatter_reduce`` and ``index_put``, where they add, as one form."""
    if not node.op.startswith("aten.") or len(node.metas) != 1 or node.metas[0] is None or node.bare_op not in _READ:
        return None
    found = _READ[node.bare_op](node)
    if found is None:
        return None
    base, source, index = (metas.get(name) for name in (found.base, found.source, found.index))
    if base is None or source is None or index is None or {base.dtype, source.dtype} != {node.meta.dtype}:
        return None
    if node.meta.dtype not in SUMMED or index.dtype not in INDEX_DTYPES or not node.meta.contiguous:
        return None
    if not source.shape or not source.numel or not base.numel or base.shape != node.meta.shape:
        return None
    dim = found.dim % len(source.shape)
    others = [pair for place, pair in enumerate(zip(base.shape, source.shape, strict=False)) if place != dim]
    fits = len(base.shape) == len(source.shape) and all(there == here for there, here in others)
    own = index.shape == ((source.shape[dim],) if found.walks else source.shape)
    if not fits or not own:
        return None
    return Scatter(node, found.base, found.source, found.index, dim, found.walks, found.wraps, found.scale)


def _index_add(node: Node) -> Scatter | None:
    scale, extra = node.kwargs.get("alpha", 1), set(node.kwargs) - {"alpha"}
    if len(node.args) != 4 or extra or type(scale) not in (int, float):
        return None
    base, dim, index, source = node.args
    if type(scale) is float and node.meta.dtype not in FLOATS:
        return None
    return _between(node, base, dim, index, source, scale=scale)


def _scatter_add(node: Node) -> Scatter | None:
    if len(node.args) != 4 or node.kwargs:
        return None
    return _between(node, *node.args, walks=len(node.meta.shape) == 1)


def _scatter_reduce(node: Node) -> Scatter | None:
    """``sum`` that takes what was there in."""
    if len(node.args) < 5 or node.args[4] != "sum" or argument(node, 5, "include_self", True) is not True:
        return None
    return _between(node, *node.args[:4], walks=len(node.meta.shape) == 1)


def _index_put(node: Node) -> Scatter | None:
    """``base[index] += values``, of whole rows."""
    if len(node.args) < 4 or node.args[3] is not True or node.kwargs or not isinstance(node.args[1], tuple):
        return None
    if len(node.args[1]) != 1:
        return None
    return _between(node, node.args[0], 0, node.args[1][0], node.args[2], wraps=True)


def _between(
    node: Node,
    base: Any,
    dim: Any,
    index: Any,
    source: Any,
    *,
    walks: bool = True,
    wraps: bool = False,
    scale: float = 1,
) -> Scatter | None:
    if type(dim) is not int or not all(isinstance(item, Ref) for item in (base, index, source)):
        return None
    return Scatter(node, base.name, source.name, index.name, dim, walks, wraps, scale)


_READ = {
    "index_add": _index_add,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "index_put": _index_put,
}
ADDING = frozenset(_READ)
"""Operators that may be read so."""


# --- Rewrites ------------------------------------------------------------------------------------------------


def _along_one(node: Node, draft: Draft) -> Ref | None:
    """``scatter_add`` by an index that was expanded from one dimension is ``index_add``, which reads it once a row."""
    if len(node.args) < 4 or node.kwargs or not isinstance(node.args[2], Ref) or not isinstance(node.args[1], int):
        return None
    if node.bare_op == "scatter_reduce" and _scatter_reduce(node) is None:
        return None
    base, dim, index, source = node.args[:4]
    shape = draft.metas[index.name].shape
    if len(shape) < 2 or draft.metas[source.name].shape != shape:
        return None
    by_name = {item.name: item for item in draft.nodes}
    made = by_name.get(index.name)
    if made is None or made.bare_op not in {"expand", "expand_as"} or not isinstance(made.args[0], Ref):
        return None
    before, own = draft.metas[made.args[0].name], dim % len(shape)
    lead = len(shape) - len(before.shape)
    sizes = (1,) * lead + before.shape
    if any(size != 1 for place, size in enumerate(sizes) if place != own) or sizes[own] != shape[own]:
        return None
    flat = made.args[0]
    while len(draft.metas[flat.name].shape) > 1:
        maker = by_name.get(flat.name)
        if maker is None or maker.bare_op not in _LAYING or not isinstance(maker.args[0], Ref):
            break
        flat = maker.args[0]
    if draft.metas[flat.name].shape != (shape[own],):
        flat = draft.emit(node, "places", "reshape.default", made.args[0], (shape[own],))
    meta = contiguous_meta(node.meta.shape, node.meta.dtype)
    added = replace(node, op="aten.index_add.default", args=(base, own, flat, source), metas=(meta,))
    return draft.append(added, "index_add") if scatter_of(added, draft.metas) is not None else None


_LAYING = frozenset({"unsqueeze", "view", "reshape"})

SCATTER_RULES: Mapping[str, Rule] = {"scatter_add": _along_one, "scatter_reduce": _along_one}
"""Rules by operator."""
