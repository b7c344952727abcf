"""Source text of each reduction: over a row in registers, over a row in pieces, and how pieces are put together.

A *whole* reduction sees all columns of a row at once. A *piecewise* one keeps an accumulator per lane while it walks
over tiles (``begin``, ``update``), reduces the lanes to one part per row and piece (``end``), and later combines the
parts (``combine``). Variances are two-pass where the row is in registers. In pieces they are sums of deviations from
the mean of the piece's first tile and of their squares (a shift near the mean leaves nothing to cancel), with the parts
combined as Chan, Golub and LeVeque have it; sums are trees. A maximum with a NaN is NaN, as in PyTorch.

Honest limit: for ``argmax`` and ``argmin`` of rows in registers a NaN counts as an infinity, so a row that holds both
gives the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from drk.assistant.synth.body import Body, tidy
from drk.gym.graph import Node

_EDGES = {"amax": 'float("-inf")', "amin": 'float("inf")', "argmax": 'float("-inf")', "argmin": 'float("inf")'}
_TWINS = {"mean": "var", "var": "var", "amax": "argmax", "amin": "argmin"}
_FAR = 2**31 - 1


def twin_of(node: Node, nodes: Sequence[Node]) -> Node | None:
    """The node among ``nodes`` whose parts ``node`` shares.

    For a mean or variance that is the (first) variance of the same values, for a maximum their ``argmax``.
    """
    if node.bare_op not in _TWINS:
        return None
    wanted = _TWINS[node.bare_op]
    found = next((other for other in nodes if other.bare_op == wanted and other.args[0] == node.args[0]), None)
    return found if found is not None and found.name != node.name else None


def parts_of(node: Node, nodes: Sequence[Node]) -> tuple[tuple[str, str], ...]:
    """(suffix, dtype) of the parts that a piecewise reduction leaves per row and piece."""
    if twin_of(node, nodes) is not None:
        return ()
    if node.bare_op == "var":
        return ("mean", "float32"), ("spread", "float32")
    if node.bare_op in {"argmax", "argmin"}:
        return ("best", "float32"), ("place", "int32")
    return (("part", "float32"),)


def correction_of(node: Node) -> int:
    """0 or 1: what a variance subtracts from the count."""
    return 0 if node.kwargs.get("correction", 1) == 0 else 1


def _count(node: Node) -> str:
    return "(n_cols - 1)" if correction_of(node) else "n_cols"


# --- Whole rows ----------------------------------------------------------------------------------------------


def whole_lines(body: Body, node: Node) -> list[str]:
    """Statements that reduce the columns of the tile; the result has the node's name and shape ``(BLOCK_M, 1)``."""
    source, name = body.text(node.args[0], "float"), body.names[node.name]
    if node.bare_op in {"amax", "amin"}:
        return _extreme_lines(body, node, name, source)
    if node.bare_op in {"argmax", "argmin"}:
        key = f"{name}_key"
        return [f"{key} = {_masked(node, _ordered(node, source))}", *_place_lines(node, name, key)]
    if node.bare_op == "prod":
        return [f"{name} = tl.reduce(tl.where(col_mask, {tidy(source)}, 1.0), 1, multiplied)[:, None]"]
    total = f"tl.sum(tl.where(col_mask, {tidy(source)}, 0.0), axis=1)[:, None]"
    if node.bare_op == "sum":
        return [f"{name} = {total}"]
    if node.bare_op == "mean":
        return [f"{name} = {total} / n_cols"]
    return _variance_lines(body, node, source, total)


def _masked(node: Node, source: str) -> str:
    return f"tl.where(col_mask, {tidy(source)}, {_EDGES[node.bare_op]})"


def _ordered(node: Node, source: str) -> str:
    """NaN as the infinity that wins."""
    return f'tl.where({source} != {source}, float("{"inf" if node.bare_op == "argmax" else "-inf"}"), {source})'


def _place_lines(node: Node, name: str, key: str) -> list[str]:
    """First column whose key is the row's best."""
    reduce = "max" if node.bare_op == "argmax" else "min"
    return [
        f"{name}_top = tl.{reduce}({key}, axis=1)[:, None]",
        f"{name} = tl.min(tl.where(({key} == {name}_top) & col_mask, cols[None, :], {_FAR}), axis=1)[:, None]",
    ]


def _extreme_lines(body: Body, node: Node, name: str, source: str) -> list[str]:
    reduce = "max" if node.bare_op == "amax" else "min"
    lines = [f"{name} = tl.{reduce}({_masked(node, source)}, axis=1)[:, None]"]
    if only_centres(body, node):
        return lines
    unordered = f"tl.max((col_mask & ({source} != {source})).to(tl.int32), axis=1)[:, None]"
    return [*lines, f'{name} = tl.where({unordered} > 0, float("nan"), {name})  # NaN wins, as in torch']


def only_centres(body: Body, node: Node) -> bool:
    """Whether a maximum only centres its own row, as softmax does: NaN then comes through by itself."""
    stored = {operand.value for operand in body.region.outputs}
    readers = [other for other in body.region.nodes if node.name in other.inputs()]
    centred = [other for other in readers if other.bare_op == "sub" and other.args[0] == node.args[0]]
    return node.name not in stored and bool(centred)


def _variance_lines(body: Body, node: Node, source: str, total: str) -> list[str]:
    name = body.names[node.name]
    earlier = takewhile(lambda other: other.name != node.name, body.region.nodes)
    means = (other for other in earlier if other.bare_op == "mean" and other.args[0] == node.args[0])
    mean = next((body.names[other.name] for other in means), None)
    centre = mean or f"{name}_mean"
    lines = [] if mean else [f"{name}_mean = {total} / n_cols"]
    lines.append(f"{name}_deviation = tl.where(col_mask, {tidy(f'{source} - {centre}')}, 0.0)")
    lines.append(f"{name} = tl.sum({name}_deviation * {name}_deviation, axis=1)[:, None] / {_count(node)}")
    return lines


# --- Rows in pieces ------------------------------------------------------------------------------------------


def begin_lines(body: Body, node: Node) -> list[str]:
    """Accumulators of one lane each."""
    if twin_of(node, body.region.nodes) is not None:
        return []
    name, shape = body.names[node.name], "(BLOCK_M, BLOCK_N)"
    zeros = f"tl.zeros({shape}, dtype=tl.float32)"
    if node.bare_op == "var":
        base = f"{name}_base = tl.zeros((BLOCK_M, 1), dtype=tl.float32)"
        return [base, f"{name}_sum = {zeros}", f"{name}_squares = {zeros}"]
    if node.bare_op in {"argmax", "argmin"}:
        edge = _EDGES[node.bare_op]
        return [
            f"{name}_best = tl.full({shape}, {edge}, dtype=tl.float32)",
            f"{name}_place = tl.full({shape}, {_FAR}, dtype=tl.int32)",
        ]
    if node.bare_op in {"amax", "amin"}:
        return [f"{name}_part = tl.full({shape}, {_EDGES[node.bare_op]}, dtype=tl.float32)"]
    return [f"{name}_part = {zeros}{' + 1.0' if node.bare_op == 'prod' else ''}"]


def update_lines(body: Body, node: Node, first: str) -> list[str]:
    """Take one tile into the accumulators; ``first`` says in the kernel's terms whether it is the piece's first."""
    if twin_of(node, body.region.nodes) is not None:
        return []
    source, name = body.text(node.args[0], "float"), body.names[node.name]
    if node.bare_op == "var":
        return [
            f"if {first}:",
            f"    {name}_head = tl.sum(tl.where(col_mask, {tidy(source)}, 0.0), axis=1)[:, None]",
            f"    {name}_base = {name}_head / tl.sum(col_mask.to(tl.float32), axis=1)[:, None]",
            f"{name}_apart = tl.where(col_mask, {tidy(f'{source} - {name}_base')}, 0.0)",
            f"{name}_sum += {name}_apart",
            f"{name}_squares += {name}_apart * {name}_apart",
        ]
    if node.bare_op in {"argmax", "argmin"}:
        sign = "<=" if node.bare_op == "argmax" else ">="
        better = f"(({name}_key {sign} {name}_best) == 0) & ({name}_best == {name}_best) & col_mask"
        return [
            f"{name}_key = {tidy(source)}",
            f"{name}_better = {better}  # NaN wins",
            f"{name}_best = tl.where({name}_better, {name}_key, {name}_best)",
            f"{name}_place = tl.where({name}_better, cols[None, :].to(tl.int32), {name}_place)",
        ]
    if node.bare_op in {"amax", "amin"}:
        pick = "maximum" if node.bare_op == "amax" else "minimum"
        taken = _masked(node, source)
        return [f"{name}_part = tl.{pick}({name}_part, {taken}, propagate_nan=tl.PropagateNan.ALL)"]
    if node.bare_op == "prod":
        return [f"{name}_part *= tl.where(col_mask, {tidy(source)}, 1.0)"]
    return [f"{name}_part += tl.where(col_mask, {tidy(source)}, 0.0)"]


def end_lines(body: Body, node: Node, slot: str) -> list[str]:
    """Reduce the lanes and store the parts at ``slot`` (row times pieces plus piece); ``seen`` columns were there."""
    name = body.names[node.name]
    if twin_of(node, body.region.nodes) is not None:
        return []
    return [
        *_lanes_lines(node, name),
        *(
            f"tl.store({name}_{suffix}_ptr + {slot}, {name}_{suffix}_row, mask=row_mask)"
            for suffix, _ in parts_of(node, body.region.nodes)
        ),
    ]


def _lanes_lines(node: Node, name: str) -> list[str]:
    if node.bare_op == "var":
        return [
            f"{name}_offset = tl.sum({name}_sum, axis=1)[:, None] / seen",
            f"{name}_mean_row = {name}_base + {name}_offset",
            f"{name}_spread_row = tl.sum({name}_squares, axis=1)[:, None] - {name}_offset * {name}_offset * seen",
            f"{name}_spread_row = tl.maximum({name}_spread_row, 0.0, propagate_nan=tl.PropagateNan.ALL)",
        ]
    if node.bare_op in {"argmax", "argmin"}:
        return _first_best_lines(node, name)
    return _reduced_lines(node, f"{name}_part_row", f"{name}_part")


def _first_best_lines(node: Node, name: str) -> list[str]:
    """The best of lanes or parts and its first place, which stays far away where nothing is better than an infinity."""
    reduce = "max" if node.bare_op == "argmax" else "min"
    here = f"tl.where({name}_unordered > 0, {name}_best != {name}_best, {name}_best == {name}_best_row)"
    return [
        f"{name}_unordered = tl.max(({name}_best != {name}_best).to(tl.int32), axis=1)[:, None]",
        f"{name}_best_row = tl.{reduce}({name}_best, axis=1)[:, None]",
        f"{name}_place_row = tl.min(tl.where({here}, {name}_place, {_FAR}), axis=1)[:, None]",
        f'{name}_best_row = tl.where({name}_unordered > 0, float("nan"), {name}_best_row)',
    ]


def _place_text(name: str) -> str:
    """The first place of a row's best; all of a row of infinities are equal."""
    return f"tl.where({name}_place_row == {_FAR}, 0, {name}_place_row)"


def _reduced_lines(node: Node, result: str, parts: str) -> list[str]:
    """Reduce lanes or parts of sums, products and extremes."""
    if node.bare_op == "prod":
        return [f"{result} = tl.reduce({parts}, 1, multiplied)[:, None]"]
    if node.bare_op in {"sum", "mean"}:
        return [f"{result} = tl.sum({parts}, axis=1)[:, None]"]
    reduce = "max" if node.bare_op == "amax" else "min"
    unordered = f"tl.max(({parts} != {parts}).to(tl.int32), axis=1)[:, None]"
    return [
        f"{result} = tl.{reduce}({parts}, axis=1)[:, None]",
        f'{result} = tl.where({unordered} > 0, float("nan"), {result})  # NaN wins, as in torch',
    ]


def row_lines(body: Body, node: Node) -> list[str]:
    """Reduce the lanes of a row that one program has walked over; the result has the node's name.

    A node with a twin takes what the twin's own lines, which must stand before, have made.
    """
    name, twin = body.names[node.name], twin_of(node, body.region.nodes)
    if twin is not None and node.bare_op != "var":
        kept = "mean" if node.bare_op == "mean" else "best"
        return [f"{name} = {body.names[twin.name]}_{kept}_row"]
    if node.bare_op == "var":
        made = [] if twin is not None else ["seen = tl.zeros((BLOCK_M, 1), dtype=tl.float32) + n_cols"]
        made += [] if twin is not None else _lanes_lines(node, name)
        return [*made, f"{name} = {body.names[(twin or node).name]}_spread_row / {_count(node)}"]
    if node.bare_op in {"argmax", "argmin"}:
        return [*_lanes_lines(node, name), f"{name} = {_place_text(name)}"]
    lines = _reduced_lines(node, name, f"{name}_part")
    return [*lines, f"{name} = {name} / n_cols"] if node.bare_op == "mean" else lines


def combine_lines(body: Body, node: Node) -> list[str]:
    """Load the parts of the program's rows and combine them; the result has the node's name.

    A node with a twin takes what the twin's own lines, which must stand before, have combined.
    """
    name, op = body.names[node.name], node.bare_op
    twin = twin_of(node, body.region.nodes)
    if twin is not None and op == "mean":
        return [f"{name} = {body.names[twin.name]}_centre"]
    if twin is not None and op != "var":
        return [f"{name} = {body.names[twin.name]}_best_row"]
    if twin is not None:
        return [f"{name} = tl.sum({body.names[twin.name]}_spread, axis=1)[:, None] / {_count(node)}"]
    edge = _EDGES.get(op, "1.0" if op == "prod" else "0.0")
    lines = [
        f"{name}_{suffix} = tl.load({name}_{suffix}_ptr + slots, mask=slot_mask, other="
        f"{str(_FAR) if suffix == 'place' else edge})"
        for suffix, _ in parts_of(node, body.region.nodes)
    ]
    if op == "var":
        return [
            *lines,
            f'{name}_made = tl.where(slot_mask, {name}_mean, float("-inf"))',
            f"{name}_base = tl.max({name}_made, axis=1)[:, None]  # small numbers are averaged, not large ones",
            f"{name}_centre = {name}_base + tl.sum(({name}_mean - {name}_base) * counts, axis=1)[:, None] / n_cols",
            f"{name}_apart = {name}_mean - {name}_centre",
            f"{name}_spread += counts * {name}_apart * {name}_apart",
            f"{name} = tl.sum({name}_spread, axis=1)[:, None] / {_count(node)}",
        ]
    if op in {"argmax", "argmin"}:
        return [*lines, *_first_best_lines(node, name), f"{name} = {_place_text(name)}"]
    lines += _reduced_lines(node, name, f"{name}_part")
    return [*lines, f"{name} = {name} / n_cols"] if op == "mean" else lines
