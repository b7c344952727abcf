"""Does a candidate return the same form as the reference: containers, tensor types, layout, and nothing left to do?

Descriptions are those of :mod:`drk.gym.runner.structure`. A candidate's is a claim of any shape.
"""

from __future__ import annotations

from typing import Any

EXTRAS = {"lazy": "waits to be negated or conjugated", "requires_grad": "requires gradients"}
PARAMETER = "torch.nn.parameter.Parameter"


def structure_difference(mine: Any, theirs: dict[str, Any]) -> str:
    """Return in words how two output descriptions differ in form and exact tensor type, or an empty string."""
    if not isinstance(mine, dict):
        return "the candidate's output has no description"
    if mine.get("form") != theirs.get("form"):
        return f"returns {mine.get('form')} instead of {theirs.get('form')}"
    if mine.get("form") == "tensor":
        return _tensor_difference(mine, theirs)
    if mine.get("form") in ("dict", "dataclass", "namedtuple") and mine.get("keys") != theirs.get("keys"):
        return f"returns keys {str(mine.get('keys'))[:200]} instead of {theirs.get('keys')}"
    listed = mine.get("items")
    my_items, their_items = listed if isinstance(listed, list) else [], theirs.get("items") or []
    if len(my_items) != len(their_items):
        return f"returns {len(my_items)} values instead of {len(their_items)}"
    for one, other in zip(my_items, their_items, strict=True):
        difference = structure_difference(one, other)
        if difference:
            return difference
    return ""


def _tensor_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    if mine.get("attributes"):
        return f"returns a tensor that carries attributes ({str(mine['attributes'])[:80]})"
    if mine.get("subclass") or (mine.get("type") == PARAMETER and theirs.get("type") != PARAMETER):
        return f"returns a tensor subclass ({str(mine.get('type'))[:80]})"
    if mine.get("layout") != theirs.get("layout"):
        return f"returns a tensor of layout {str(mine.get('layout'))[:80]} instead of {theirs.get('layout')}"
    for word, said in EXTRAS.items():
        if mine.get(word) and not theirs.get(word):
            return f"returns a tensor that {said}, the reference's does not"
    return ""
