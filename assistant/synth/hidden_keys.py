"""Which keys an attention kernel need not read: those that a mask hides from all queries of a block.

A causal mask is recognised where the graph makes it (``triu`` or ``tril`` of ones): keys behind the block's last query
are skipped without a look. Masks and biases that come as values (a buffer, padding, an input) are looked at: from the
last key backwards as long as they hide everything, which costs a fraction of what products with those keys would.

Nothing is skipped where a later step could make another value of minus infinity. Left out: hidden keys in front of or
between visible ones (a sliding window), and masks that hide by a large negative number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from drk.gym.graph import Node, Ref

_LOWEST = float("-inf")


@dataclass(frozen=True)
class Attention:
    """What an attention kernel needs to know: the scores' name before the softmax, and whether they are causal."""

    scores: str
    causal: bool
    safe: bool = False
    """Queries that see no key give zeros, as the library's attention has it, not NaN."""
    seen_where: Mapping[str, str] = field(default_factory=dict)
    """Operands that may hide keys, with the test of those that they do not hide."""


def hides_future(chain: Sequence[Node], by_name: Mapping[str, Node]) -> bool:
    """Whether one of the steps from product to scores sets all above the diagonal to minus infinity for good."""
    return any(_hides_future(node, by_name) and _kept(chain[place + 1 :]) for place, node in enumerate(chain))


def seen_where(chain: Sequence[Node], by_name: Mapping[str, Node], operands: Set[str]) -> dict[str, str]:
    """Masks and biases among ``operands`` that may hide keys: how the kernel tests that one is seen, by operand."""
    found = {}
    for place, node in enumerate(chain):
        value, test = _mask(node, chain[place - 1].name if place else "")
        if value in operands and _kept(chain[place + 1 :]) and not _hides_future(node, by_name):
            found[value] = test
    return found


def _mask(node: Node, source: str) -> tuple[str, str]:
    """The operand by which ``node`` hides elements of ``source``, and the test of those that it does not hide."""
    refs = [arg.name if isinstance(arg, Ref) else "" for arg in node.args]
    if node.bare_op == "masked_fill" and refs[0] == source and node.args[2] == _LOWEST:
        return refs[1], "== 0"
    if node.bare_op == "where" and len(refs) == 3 and refs[1] == source and node.args[2] == _LOWEST:
        return refs[0], "!= 0"
    if node.bare_op == "where" and len(refs) == 3 and refs[2] == source and node.args[1] == _LOWEST:
        return refs[0], "== 0"
    if node.bare_op == "add" and len(refs) == 2 and not node.kwargs and source in refs:
        return refs[1 - refs.index(source)], '!= float("-inf")'
    return "", ""


def _kept(steps: Sequence[Node]) -> bool:
    """Whether minus infinity goes through ``steps`` as it is (or becomes NaN with an infinite operand)."""
    return all(_keeps(node) for node in steps)


def _keeps(node: Node) -> bool:
    scalar = node.args[1] if len(node.args) > 1 and not isinstance(node.args[1], Ref) else None
    if node.bare_op in {"mul", "div"}:
        return isinstance(scalar, int | float) and scalar > 0
    if node.bare_op == "masked_fill":
        return bool(node.args[2] == _LOWEST)
    if node.bare_op == "where":
        return _LOWEST in node.args[1:]
    return (node.bare_op == "add" and not node.kwargs) or node.bare_op in {"to", "_to_copy"}


def _hides_future(node: Node, by_name: Mapping[str, Node]) -> bool:
    if node.bare_op == "masked_fill" and node.args[2] == _LOWEST:
        return _is_future(node.args[1], by_name)
    if node.bare_op == "add":
        mask = _behind_casts(node.args[1], by_name)
        return mask is not None and mask.bare_op == "triu" and _offset(mask) == 1 and _filled(mask, by_name, _LOWEST)
    return False


def _behind_casts(value: object, by_name: Mapping[str, Node]) -> Node | None:
    """The node that makes a mask, before casts and leading dimensions of size 1."""
    node = by_name.get(value.name) if isinstance(value, Ref) else None
    while node is not None and isinstance(node.args[0], Ref):
        leading = node.bare_op == "unsqueeze" and 0 <= node.args[1] < len(node.meta.shape) - 2
        if node.bare_op not in {"to", "_to_copy"} and not leading:
            break
        node = by_name.get(node.args[0].name)
    return node


def _is_future(mask: object, by_name: Mapping[str, Node]) -> bool:
    node = _behind_casts(mask, by_name)
    if node is None:
        return False
    if node.bare_op == "triu":
        return _offset(node) == 1 and _filled(node, by_name, 1)
    negated = node.bare_op in {"logical_not", "bitwise_not"} or (node.bare_op == "eq" and node.args[1] == 0)
    if not negated:
        return False
    past = _behind_casts(node.args[0], by_name)
    return past is not None and past.bare_op == "tril" and _offset(past) == 0 and _filled(past, by_name, 1)


def _offset(node: Node) -> int:
    return int(node.args[1]) if len(node.args) > 1 else 0


def _filled(node: Node, by_name: Mapping[str, Node], value: float) -> bool:
    """Whether ``triu`` or ``tril`` is applied to a tensor that holds nothing but ``value``."""
    source = by_name.get(node.args[0].name)
    if source is None:
        return False
    if source.bare_op in {"ones", "ones_like"}:
        return value == 1
    return source.bare_op in {"full", "full_like"} and source.args[1] == value
