"""Maxima and sums of exponentials of one row in a single walk: the running maximum and the sum rescaled to it.

Softmax, its logarithm, logsumexp and cross-entropy take a row's maximum and then sum ``exp(x - maximum)``. Where a row
is walked in blocks both come from the same walk (Milakov and Gimelshein, *Online normalizer calculation for softmax*,
2018): when a block raises the maximum, what was summed so far is multiplied by ``exp(old - new)``.

Infinities and NaN end as in PyTorch. The walk subtracts 0 in place of an infinite maximum, so its sums hold a NaN only
where the row does. Where the graph subtracts the maximum whatever it is, infinite ones make the sum NaN afterwards;
where it subtracts 0 for infinite ones, as ``logsumexp`` does, the sum is right as it stands.

Left out: sums of exponentials that are scaled or multiplied before they are summed; they take a further walk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drk.assistant.synth.body import Body, tidy
from drk.assistant.synth.shortcuts import is_guarded
from drk.gym.graph import Node, Ref


@dataclass(frozen=True)
class Online:
    """A maximum and the sums of exponentials (or their means) that go with it, all from one running sum.

    ``guarded`` names those that subtract 0 where the maximum is infinite.
    """

    top: Node
    sums: tuple[Node, ...]
    guarded: frozenset[str]


def online_groups(nodes: Sequence[Node]) -> tuple[Online, ...]:
    """Find all maxima of a region whose sums of exponentials can be taken in the same walk."""
    by_name = {node.name: node for node in nodes}
    found: list[Online] = []
    for top in (node for node in nodes if node.bare_op == "amax"):
        guards = {node.name: _guard(node, top, by_name) for node in nodes}
        sums = tuple(node for node in nodes if guards[node.name] is not None)
        if sums:
            found.append(Online(top, sums, frozenset(node.name for node in sums if guards[node.name])))
    return tuple(found)


def _guard(node: Node, top: Node, by_name: dict[str, Node]) -> bool | None:
    """Whether ``node`` sums exponentials of ``top``'s row less its guarded (or bare) maximum; None for other nodes."""
    if node.bare_op not in {"sum", "mean"}:
        return None
    power = _made(node.args[0], by_name)
    if power is None or power.bare_op != "exp":
        return None
    centred = _made(power.args[0], by_name)
    if centred is None or centred.bare_op != "sub" or len(centred.args) != 2 or centred.kwargs:
        return None
    if centred.args[0] != top.args[0] or not isinstance(centred.args[1], Ref):
        return None
    if centred.args[1].name == top.name:
        return False
    return True if is_guarded(_made(centred.args[1], by_name), top, by_name) else None


def _made(value: object, by_name: dict[str, Node]) -> Node | None:
    return by_name.get(value.name) if isinstance(value, Ref) else None


# --- Kernel text ---------------------------------------------------------------------------------------------


def begin_lines(body: Body, group: Online) -> list[str]:
    """The running maximum of each row, and a sum for each lane."""
    top = body.names[group.top.name]
    return [
        f'{top} = tl.full((BLOCK_M, 1), float("-inf"), dtype=tl.float32)',
        f"{top}_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)",
    ]


def update_lines(body: Body, group: Online) -> list[str]:
    """Take one block of the row into the maximum and the sum."""
    top, source = body.names[group.top.name], body.text(group.top.args[0], "float")
    masked = tidy(f'tl.where(col_mask, {source}, float("-inf"))')
    power = tidy(f"exp_below({source} - {top}_shift)")
    return [
        f"{top}_before = {top}",
        f"{top} = tl.maximum({top}, tl.max({masked}, axis=1)[:, None])",
        f'{top}_shift = tl.where(tl.abs({top}) == float("inf"), 0.0, {top})',
        f"{top}_rescale = exp_below({top}_before - {top}_shift)",
        f"{top}_part = {top}_part * {top}_rescale + tl.where(col_mask, {power}, 0.0)",
    ]


def end_lines(body: Body, group: Online) -> list[str]:
    """Sum the lanes; NaN and infinities as PyTorch has them."""
    top = body.names[group.top.name]
    lines = [
        f"{top}_total = tl.sum({top}_part, axis=1)[:, None]",
        f"{top} = tl.where({top}_total == {top}_total, {top}, {top}_total)  # NaN wins, as in torch",
    ]
    for node in group.sums:
        infinite, value = (top, "inf") if node.name in group.guarded else (f"tl.abs({top})", "nan")
        share = " / n_cols" if node.bare_op == "mean" else ""
        text = f'tl.where({infinite} == float("inf"), float("{value}"), {top}_total)'
        lines.append(f"{body.names[node.name]} = {text}{share}")
    return lines
