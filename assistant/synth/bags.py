"""``embedding_bag``: bags of equal length as a gather and a reduction, others as lists of rows with their ends.

Bags given as a matrix reach the graph as a flat list with offsets ``0, L, 2 L, ...``; the matrix is taken again, so
that kernels fuse what follows. Bags of different lengths become an operator with one result, for which there is a
kernel of its own (:mod:`drk.assistant.synth.ragged`).

Left out: gradients (scaled, sparse), and extremes of equal bags with padding, which are taken as others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.draft import contiguous_meta, fresh_name
from drk.assistant.synth.expression import FLOATS
from drk.gym.graph import Graph, Node, Ref, Symbol, TensorMeta

SUM, MEAN, MAX = 0, 1, 2
"""``embedding_bag``'s modes."""
_REDUCING = {SUM: "sum.dim_IntList", MEAN: "mean.dim", MAX: "amax.default"}
VALUES = "aten.embedding_bag.values"
"""``embedding_bag`` with its first result only."""
INDEX_DTYPES = frozenset({"int64", "int32"})


@dataclass(frozen=True)
class Bags:
    """One operator: rows of ``table`` that ``ids`` pick, combined from each of ``offsets`` to the next.

    ``closed``: the last offset is the end of the last bag, which is else the end of ``ids``. Rows of number ``padding``
    count for nothing.
    """

    node: Node
    table: str
    ids: str
    offsets: str
    mode: int
    weights: str | None = None
    closed: bool = False
    padding: int | None = None


def bags_of(node: Node, metas: Mapping[str, TensorMeta]) -> Bags | None:
    """Read the operator :data:`VALUES`, or return None."""
    if node.op != VALUES or len(node.metas) != 1 or node.metas[0] is None:
        return None
    found = _read(node, metas)
    return found if found is not None and node.meta.numel and metas[found.table].numel else None


def _read(node: Node, metas: Mapping[str, TensorMeta]) -> Bags | None:
    if node.kwargs or len(node.args) < 5:
        return None
    table, ids, offsets, scaled, mode, *rest = node.args
    defaults: tuple[Any, ...] = (False, None, False, None)
    sparse, weights, closed, padding = [*rest, *defaults[len(rest) :]][:4]
    if not all(isinstance(item, Ref) and item.name in metas for item in (table, ids, offsets)) or scaled or sparse:
        return None
    named = {name: metas[name] for name in (table.name, ids.name, offsets.name)}
    if named[table.name].dtype not in FLOATS or len(named[table.name].shape) != 2 or mode not in _REDUCING:
        return None
    if any(named[item.name].dtype not in INDEX_DTYPES or len(named[item.name].shape) != 1 for item in (ids, offsets)):
        return None
    if padding is not None and (type(padding) is not int or padding < 0):
        padding = None if padding == -1 else padding
        if padding is not None:
            return None
    weighed = weights.name if isinstance(weights, Ref) else None
    if weighed is not None and (mode != SUM or metas[weighed].dtype != named[table.name].dtype):
        return None
    return Bags(node, table.name, ids.name, offsets.name, mode, weighed, closed is True, padding)


# --- Rewrites ------------------------------------------------------------------------------------------------


def equal_bags(graph: Graph) -> Graph:
    """Return the graph with bags written out or as an operator of one result; without any, the graph itself."""
    metas, users = graph.metas(), graph.users()
    by_name = {node.name: node for node in graph.nodes}
    writer = _Writer(metas, by_name, {*metas, *by_name})
    done: set[str] = set()
    for node in graph.nodes:
        bag = by_name.get(node.args[0].name) if node.op == "getitem" and isinstance(node.args[0], Ref) else None
        if bag is None or node.args[1] != 0 or not bag.op.startswith("aten.embedding_bag."):
            writer.nodes.append(node)
            continue
        others = users[bag.name]
        found = None if any(users[name] for name in others if name != node.name) else _read(bag, metas)
        if found is None:
            writer.nodes.append(node)
            continue
        writer.write(node, found)
        done |= {bag.name, *others} - {node.name}
    return replace(graph, nodes=tuple(item for item in writer.nodes if item.name not in done)) if done else graph


@dataclass
class _Writer:
    """Appends nodes with metadata to ``nodes``."""

    metas: dict[str, TensorMeta]
    by_name: Mapping[str, Node]
    taken: set[str]
    nodes: list[Node] = field(default_factory=list)

    def write(self, node: Node, bags: Bags) -> None:
        """Write what ``node`` takes of ``bags``: bags of equal length by operators that kernels know."""
        matrix = self._matrix(bags)
        if matrix is None or (bags.mode == MAX and bags.padding is not None):
            alone = (*bags.node.args[:5], False, _ref(bags.weights), bags.closed, bags.padding)
            self.nodes.append(replace(bags.node, name=node.name, op=VALUES, args=alone, kwargs={}, metas=node.metas))
            return
        table, shape = self.metas[bags.table], self.metas[matrix.name].shape
        rows = self._emit(node, "bag_rows", "embedding.default", (Ref(bags.table), matrix), (*shape, table.shape[1]))
        column = (*shape, 1)
        if bags.weights is not None:
            weights = self._emit(node, "weights", "reshape.default", (Ref(bags.weights), column), column)
            rows = self._emit(node, "weighed", "mul.Tensor", (rows, weights), (*shape, table.shape[1]))
        if bags.padding is None:
            self._result(node, _REDUCING[bags.mode], (rows, (1,)))
            return
        ids = self._emit(node, "bag_ids", "reshape.default", (matrix, column), column, self.metas[matrix.name].dtype)
        empty = self._emit(node, "is_padding", "eq.Scalar", (ids, bags.padding), column, "bool")
        kept = self._emit(node, "kept", "masked_fill.Scalar", (rows, empty, 0.0), (*shape, table.shape[1]))
        if bags.mode == SUM:
            self._result(node, "sum.dim_IntList", (kept, (1,)))
            return
        total = self._emit(node, "total", "sum.dim_IntList", (kept, (1,)), (shape[0], table.shape[1]))
        some = self._emit(node, "is_kept", "ne.Scalar", (matrix, bags.padding), shape, "bool")
        ones = self._emit(node, "one", "_to_copy.default", (some,), shape, to="float32")
        count = self._emit(node, "count", "sum.dim_IntList", (ones, (1,), True), (shape[0], 1), "float32")
        self._result(
            node,
            "div.Tensor",
            (total, self._emit(node, "count", "clamp_min.default", (count, 1.0), (shape[0], 1), "float32")),
        )

    def _emit(
        self,
        node: Node,
        hint: str,
        op: str,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        dtype: str = "",
        to: str = "",
    ) -> Ref:
        """Append an operator whose result has ``shape`` and the table's type, unless ``dtype`` says another."""
        name = fresh_name(f"{node.name}_{hint}", self.taken)
        meta = contiguous_meta(shape, to or dtype or node.meta.dtype)
        kwargs = {"dtype": Symbol("dtype", to)} if to else {}
        self.metas[name] = meta
        self.nodes.append(replace(node, name=name, op=f"aten.{op}", args=args, kwargs=kwargs, metas=(meta,)))
        return Ref(name)

    def _result(self, node: Node, op: str, args: tuple[Any, ...]) -> None:
        self.nodes.append(replace(node, op=f"aten.{op}", args=args, kwargs={}))

    def _matrix(self, bags: Bags) -> Ref | None:
        """The matrix of indices, one bag a row, or None where bags are not plainly of equal length."""
        view, walk = self.by_name.get(bags.ids), self.by_name.get(bags.offsets)
        if view is None or walk is None or view.bare_op not in {"reshape", "view"} or walk.bare_op != "arange":
            return None
        ids = view.args[0]
        shape = self.metas[ids.name].shape
        even = len(shape) == 2 and shape[1] > 1 and walk.args[:3] == (0, shape[0] * shape[1], shape[1])
        return ids if even and not bags.closed else None


def _ref(name: str | None) -> Ref | None:
    return None if name is None else Ref(name)
