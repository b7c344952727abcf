"""Views before elementwise operators, so that reductions behind a view take those operators along.

``softmax(flatten(conv + bias))`` becomes ``softmax(flatten(conv) + bias)``: a view of what the library's kernel wrote
costs nothing, and the addition joins the reduction's kernel, which has the view's shape. Elementwise kernels need no
such order, they read through views (:mod:`drk.assistant.synth.mapped_region`).

Left out: views that move data, values that something else reads too, operands that have some of the dimensions which
the view joins and not others, and tensors that do not lie in row-major order (their views may be copies).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from drk.assistant.synth.draft import contiguous_meta, fresh_name
from drk.assistant.synth.expression import is_pointwise
from drk.assistant.synth.index_maps import blocks
from drk.assistant.synth.index_rules import is_view
from drk.assistant.synth.regions import reduced_dims
from drk.gym.graph import Graph, Node, Ref, TensorMeta

_RESHAPES = frozenset({"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "_unsafe_view"})
_PERMUTES = frozenset({"permute", "transpose"})


def views_first(graph: Graph) -> Graph:
    """Return the graph with views that lead to reductions moved before the elementwise operators that they show."""
    return _Order(graph, graph.metas()).run()


@dataclass
class _Order:
    graph: Graph
    metas: dict[str, TensorMeta]
    nodes: list[Node] = field(default_factory=list)
    by_name: dict[str, Node] = field(default_factory=dict)
    users: dict[str, set[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def run(self) -> Graph:
        self.taken = set(self.graph.names())
        self.users = {name: set(readers) for name, readers in self.graph.users().items()}
        wanted = self._before_reductions()
        changed = False
        for node in self.graph.nodes:
            source = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
            if node.name in wanted and self._movable(source) and self._takes(source, node):
                self._show(source, node, node.name)
                changed = True
            else:
                self._append(node)
        return replace(self.graph, nodes=tuple(self.nodes)) if changed else self.graph

    def _before_reductions(self) -> set[str]:
        """Names of views whose readers, or elementwise operators and views behind them, are reductions."""
        leading: set[str] = set()
        views: set[str] = set()
        for node in reversed(self.graph.nodes):
            if reduced_dims(node, self.metas) is not None:
                leading.add(node.name)
            elif self.users[node.name] & leading and (is_pointwise(node, self.metas) or is_view(node)):
                leading.add(node.name)
                if node.bare_op in _RESHAPES | _PERMUTES and node.op.startswith("aten."):
                    views.add(node.name)
        return views

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self.by_name[node.name] = node

    def _movable(self, name: str) -> bool:
        """Whether the value ``name`` is elementwise and read by one node only."""
        node = self.by_name.get(name)
        if node is None or not is_pointwise(node, self.metas) or node.bare_op in {"contiguous", "expand_as"}:
            return False
        return len(self.users[name]) == 1 and node.meta.contiguous

    def _takes(self, name: str, view: Node) -> bool:
        """Whether all that the elementwise operator ``name`` reads can be shown as the view shows its result."""
        node = self.by_name[name]
        for operand in node.inputs():
            meta = self.metas[operand]
            if meta.shape == node.meta.shape:
                if self._movable(operand) and not self._takes(operand, view):
                    return False
                if not meta.contiguous:
                    return False
            elif meta.shape and _narrow(meta, node.meta.shape, view) is None:
                return False
        return True

    def _show(self, name: str, view: Node, wish: str) -> str:
        """Append what computes the view of ``name``, and return its name."""
        node = self.by_name[name]
        shown: dict[str, str] = {}
        for operand in node.inputs():
            meta = self.metas[operand]
            if not meta.shape:
                continue
            if meta.shape != node.meta.shape:
                shape = _narrow(meta, node.meta.shape, view)
                assert shape is not None
                shown[operand] = self._viewed(operand, view, "aten.reshape.default", (shape,), shape)
            elif self._movable(operand):
                shown[operand] = self._show(operand, view, fresh_name(f"{operand}_{view.bare_op}", self.taken))
            else:
                shown[operand] = self._viewed(operand, view, view.op, view.args[1:], view.meta.shape)
        self.nodes.remove(node)
        args = tuple(Ref(shown.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg for arg in node.args)
        kwargs = {
            key: Ref(shown.get(arg.name, arg.name)) if isinstance(arg, Ref) else arg for key, arg in node.kwargs.items()
        }
        meta = replace(view.meta, dtype=node.meta.dtype)
        self._append(replace(node, name=wish, args=args, kwargs=kwargs, metas=(meta,)))
        self.metas[wish] = meta
        self.users.setdefault(wish, {view.name})
        for operand in shown.values():
            self.users.setdefault(operand, set()).add(wish)
        return wish

    def _viewed(self, operand: str, view: Node, op: str, args: tuple[object, ...], shape: tuple[int, ...]) -> str:
        dtype = self.metas[operand].dtype
        reshapes = view.bare_op in _RESHAPES or op != view.op
        meta = contiguous_meta(shape, dtype) if reshapes else replace(view.meta, dtype=dtype)
        name = fresh_name(f"{operand}_{view.bare_op}", self.taken)
        self._append(replace(view, name=name, op=op, args=(Ref(operand), *args), metas=(meta,)))
        self.metas[name] = meta
        return name


def _narrow(meta: TensorMeta, full: tuple[int, ...], view: Node) -> tuple[int, ...] | None:
    """The shape of an operand that broadcasts to ``full`` once it is shown by the view, or None."""
    shape = (1,) * (len(full) - len(meta.shape)) + meta.shape
    if not meta.contiguous:
        return None
    if view.bare_op in _PERMUTES:
        rank = len(full)
        order = list(view.args[1]) if view.bare_op == "permute" else list(range(rank))
        if view.bare_op == "transpose":
            first, second = view.args[1] % rank, view.args[2] % rank
            order[first], order[second] = order[second], order[first]
        moved = [dim % rank for dim in order if shape[dim % rank] != 1]
        return tuple(shape[dim] for dim in order) if moved == sorted(moved) else None
    result = [1] * len(view.meta.shape)
    for here, there in blocks(full, view.meta.shape):
        own = [shape[dim] for dim in here]
        if own == [full[dim] for dim in here]:
            for dim in there:
                result[dim] = view.meta.shape[dim]
        elif any(size != 1 for size in own):
            return None
    return tuple(result)
