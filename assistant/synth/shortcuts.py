"""Cheaper forms of operators where what surrounds them hides the difference.

- An exponential of a value less its row's maximum is at most 1, and so is its weight in the row's sum: an absolute
  error of 2**-24 is as good as a relative one. Its argument needs no splitting.
- Such an exponential divided by its row's sum, which is at least 1, is multiplied by the sum's inverse: one division
  for a row instead of one for each element.
- What is divided by one number for many elements (a row's norm, a channel's scale) is multiplied by its inverse, and
  a division by a constant is a multiplication, as in PyTorch's own kernels: one more rounding, where IEEE division
  takes a dozen instructions.
- The logarithm of a softmax is the value less its row's maximum and less the sum's logarithm, one for a row. It stays
  finite where the softmax itself is below float32's range.
- Results that torch rounds to 16 bits hide what the short forms of exponentials and quotients leave out.

Left out: forms that depend on the values' range otherwise. The inverse of a denormal divisor is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from drk.gym.graph import Node, Ref, TensorMeta

HALVES = frozenset({"float16", "bfloat16"})
_LEAST = 1.0e-30
"""Constants that are smaller, or larger than its inverse, divide as they are."""
_SHORT = {"exp": "short_exp", "sigmoid": "short_sigmoid", "silu": "short_silu", "tanh": "short_tanh"}


def shortcut(
    node: Node, nodes: Sequence[Node], metas: Mapping[str, TensorMeta], text: Callable[[Any, str], str]
) -> str | None:
    """Return the cheaper expression of ``node`` among a region's ``nodes``, or None where there is none.

    ``text`` gives the source of an argument in a compute kind.
    """
    made = {item.name: item for item in nodes}
    halves = {node.meta.dtype, *(metas[name].dtype for name in node.inputs())} <= HALVES
    if node.bare_op == "div":
        return _quotient(node, metas, text, halves=halves)
    if node.bare_op == "log":
        return _log_of_softmax(node, made, text)
    if is_weight(node, made):
        return f"short_exp({text(node.args[0], 'float')})"
    if halves and node.bare_op == "gelu" and "tanh" in {*node.args[1:], *node.kwargs.values()}:
        return f"short_gelu_tanh({text(node.args[0], 'float')})"
    if halves and node.bare_op in _SHORT:
        return f"{_SHORT[node.bare_op]}({text(node.args[0], 'float')})"
    return None


def _quotient(
    node: Node, metas: Mapping[str, TensorMeta], text: Callable[[Any, str], str], *, halves: bool
) -> str | None:
    """A division as a multiplication by a constant or by an inverse of fewer elements."""
    top, bottom = node.args[:2]
    if not isinstance(bottom, Ref):
        exact = math.frexp(bottom)[0] == 0.5 or not _LEAST < abs(bottom) < 1.0 / _LEAST
        return None if exact else f"{text(top, 'float')} * (1.0 / {text(bottom, 'float')})"
    fewer = math.prod(metas[bottom.name].shape) < math.prod(node.meta.shape)
    if fewer and isinstance(top, Ref) and math.prod(metas[top.name].shape) == math.prod(node.meta.shape):
        return f"{text(top, 'float')} * tl.div_rn(1.0, {text(bottom, 'float')})"
    return f"{text(top, 'float')} / {text(bottom, 'float')}" if halves else None


def _log_of_softmax(node: Node, made: Mapping[str, Node], text: Callable[[Any, str], str]) -> str | None:
    """``log(e / sum(e))`` with ``e = exp(y)``, ``y`` being values less their row's maximum: ``y - log(sum(e))``."""
    share = _made(node.args[0], made)
    if share is None or share.bare_op != "div" or share.kwargs or share.meta.dtype != "float32":
        return None
    power, total = _made(share.args[0], made), _made(share.args[1], made)
    if power is None or total is None or total.bare_op != "sum" or total.args[0] != Ref(power.name):
        return None
    if not is_weight(power, made) or len(total.meta.shape) != len(share.meta.shape):
        return None
    return f"{text(power.args[0], 'float')} - tl.log({text(share.args[1], 'float')})"


def is_weight(node: Node, made: Mapping[str, Node]) -> bool:
    """Whether ``node`` is an exponential of a value less its row's maximum (or less 0 where that is infinite)."""
    centred = _made(node.args[0], made) if node.bare_op == "exp" else None
    if centred is None or centred.bare_op != "sub" or len(centred.args) != 2 or centred.kwargs:
        return False
    shift = _made(centred.args[1], made)
    if shift is not None and shift.bare_op == "masked_fill":
        top = _made(shift.args[0], made)
        return top is not None and _tops(top, centred) and is_guarded(shift, top, made)
    return shift is not None and _tops(shift, centred)


def is_guarded(node: Node | None, top: Node, made: Mapping[str, Node]) -> bool:
    """Whether ``node`` is ``top`` with 0 in the place of infinities."""
    if node is None or node.bare_op != "masked_fill" or node.args[0] != Ref(top.name) or node.args[2] != 0:
        return False
    test = _made(node.args[1], made)
    if test is None or test.bare_op != "eq" or test.args[1] != math.inf:
        return False
    size = _made(test.args[0], made)
    return size is not None and size.bare_op == "abs" and size.args[0] == Ref(top.name)


def _tops(top: Node, centred: Node) -> bool:
    """Whether ``top`` is the maximum, dimensions kept, of what ``centred`` subtracts from."""
    same_rank = top.bare_op == "amax" and len(top.meta.shape) == len(centred.meta.shape)
    return same_rank and top.args[0] == centred.args[0]


def _made(value: object, made: Mapping[str, Node]) -> Node | None:
    return made.get(value.name) if isinstance(value, Ref) else None
