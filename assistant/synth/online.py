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
    """A maximum, the sums of exponentials (or their means) that go with it, and whether it is guarded.

    ``guarded`` ones subtract 0 where the maximum is infinite.
    """

    top: Node
    sums: tuple[Node, ...]
    guarded: bool


def online_groups(nodes: Sequence[Node]) -> tuple[Online, ...]:
    """Find all maxima of a region whose sums of exponentials can be taken in the same walk."""
    by_name = {node.name: node for node in nodes}
    tops = [node for node in nodes if node.bare_op == "amax"]
    found: list[Online] = []
    for top in tops:
        sums: dict[bool, list[Node]] = {True: [], False: []}
        for node in nodes:
            guarded = _guard(node, top, by_name)
            if guarded is not None:
                sums[guarded].append(node)
        # The two kinds end differently where the maximum is infinite; a maximum goes with one of them.
        guarded = bool(sums[True])
        if sums[guarded]:
            found.append(Online(top, tuple(sums[guarded]), guarded))
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
        *(f"{body.names[node.name]}_part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)" for node in group.sums),
    ]


def update_lines(body: Body, group: Online) -> list[str]:
    """Take one block of the row into the maximum and the sums."""
    top, source = body.names[group.top.name], body.text(group.top.args[0], "float")
    masked = tidy(f'tl.where(col_mask, {source}, float("-inf"))')
    power = tidy(f"exp_below({source} - {top}_shift)")
    return [
        f"{top}_before = {top}",
        f"{top} = tl.maximum({top}, tl.max({masked}, axis=1)[:, None])",
        f'{top}_shift = tl.where(tl.abs({top}) == float("inf"), 0.0, {top})',
        f"{top}_rescale = exp_below({top}_before - {top}_shift)",
        *(
            f"{name}_part = {name}_part * {top}_rescale + tl.where(col_mask, {power}, 0.0)"
            for name in (body.names[node.name] for node in group.sums)
        ),
    ]


def end_lines(body: Body, group: Online) -> list[str]:
    """Sum the lanes; NaN and infinities as PyTorch has them."""
    top, sums = body.names[group.top.name], {body.names[node.name]: node for node in group.sums}
    lines = [f"{name} = tl.sum({name}_part, axis=1)[:, None]" for name in sums]
    first = next(iter(sums))
    lines.append(f"{top} = tl.where({first} == {first}, {top}, {first})  # NaN wins, as in torch")
    infinite, value = (f"{top}", "inf") if group.guarded else (f"tl.abs({top})", "nan")
    lines += [f'{name} = tl.where({infinite} == float("inf"), float("{value}"), {name})' for name in sums]
    return [*lines, *(f"{name} = {name} / n_cols" for name, node in sums.items() if node.bare_op == "mean")]
