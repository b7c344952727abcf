"""The tree of host events of a profiler trace: who is inside whom, and which module and line each belongs to.

Events of a thread nest by time. Marks (:mod:`drk.assistant.profile_marks`) among them say module and line, which
everything inside inherits. Backward operators run without Python, on a GPU in a thread of their own: they take module
and line of the forward operator with the same sequence number; gradient accumulation takes those of the operator before
it; what has neither takes the line that called ``backward`` meanwhile.

Limits: autograd's sequence numbers are per thread, so threads that run forward side by side can be confused.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drk.assistant.profile_marks import MARK
from drk.gym.graph_cost import VIEWS

Phase = Literal["forward", "backward", "other"]


FREE = VIEWS | frozenset((
    "as_strided", "as_strided_", "resolve_conj", "resolve_neg", "empty", "empty_like", "empty_strided", "resize_",
    "result_type", "is_nonzero", "item", "_local_scalar_dense", "lift", "size", "stride", "set_", "unfold",
))  # fmt: skip
"""Operators that move no data."""
HELPING = frozenset(("copy_", "fill_", "zero_", "zeros", "zeros_like", "ones_like", "clone", "to", "_to_copy"))
"""Operators that others call to prepare their own work, which is counted there."""
EVALUATE = "autograd::engine::evaluate_function: "
OPTIMIZER = "Optimizer."
"""What torch calls its ranges of optimizers: ``Optimizer.step#AdamW.step``."""


@dataclass(frozen=True)
class OpCall:
    """One operator call as the profiler saw it: name, and per input shapes, strides, types and printed values."""

    name: str
    dims: tuple[Any, ...] = ()
    strides: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


@dataclass
class Node:
    """One host event in the tree of its thread."""

    name: str
    kind: str
    start: float
    end: float
    args: Mapping[str, Any]
    parent: Node | None = None
    line: int | None = None
    calls: tuple[tuple[int, int], ...] = ()
    phase: Phase = "forward"
    own: bool = False
    mark: bool = False
    inner_us: float = 0.0
    inner_work: bool = False
    thread: Any = None
    linked: bool = False
    part: str = ""
    """The optimizer's step that it belongs to, as ``AdamW.step``; empty elsewhere."""

    @property
    def is_op(self) -> bool:
        """Whether it is an operator, not a mark, an annotation or a call of the driver."""
        return self.kind == "cpu_op" and not self.mark

    @property
    def self_us(self) -> float:
        """Its time without what is inside."""
        return max(self.end - self.start - self.inner_us, 0.0)


def nest(rows: Sequence[Mapping[str, Any]], thread: Any) -> Iterator[Node]:
    """Yield the events of one thread, outer before inner, each with its parent."""
    stack: list[Node] = []
    for row in sorted(rows, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        start = float(row["ts"])
        node = Node(str(row["name"]), str(row["cat"]), start, start + float(row.get("dur", 0.0)), row.get("args") or {})
        while stack and stack[-1].end <= start:
            stack.pop()
        node.thread = thread
        node.mark = node.name.startswith(MARK)
        node.parent = stack[-1] if stack else None
        if node.parent is not None and (node.is_op or node.mark):
            node.parent.inner_us += node.end - node.start
        stack.append(node)
        yield node


def step_starts(nodes: Sequence[Node], root: int | None) -> list[tuple[int, float]]:
    """Return (step number, microseconds) of the marks where steps begin; of one root module where it is given."""
    found = []
    for node in nodes:
        if node.name.startswith(f"{MARK}s|"):
            _, _, number, step = node.name.split("|")
            if root is None or int(number) == root:
                found.append((int(step), node.start))
    return sorted(found, key=lambda item: item[1])


def inherit(nodes: Sequence[Node]) -> None:
    """Hand module and line down the trees; forward first, since backward refers to it."""
    forward: dict[int, list[Node]] = {}
    for number, node in enumerate(nodes):
        above = node.parent
        if above is not None:
            node.line, node.calls, node.own, node.phase = above.line, above.calls, above.own, above.phase
            node.part = above.part
        if node.mark:
            _apply_mark(node, number)
        elif node.kind == "user_annotation" and node.name.startswith(OPTIMIZER):
            node.phase, node.part = "other", node.name.rpartition("#")[2]
        elif node.name.startswith(EVALUATE):
            node.phase = "backward"
        sequence = node.args.get("Sequence number")
        if node.is_op and node.phase != "backward" and isinstance(sequence, int) and sequence >= 0:
            forward.setdefault(sequence, []).append(node)
    _link_backward(nodes, forward)


def _apply_mark(node: Node, number: int) -> None:
    parts = node.name.split("|")
    if parts[1] == "m":
        node.calls = (*node.calls, (int(parts[2]), number))
    elif parts[1] == "l":
        node.line = int(parts[2])
    elif parts[1] == "own":
        node.own = True


def _link_backward(nodes: Sequence[Node], forward: Mapping[int, Sequence[Node]]) -> None:
    last: dict[Any, Node] = {}
    callers = _outer_line_marks(nodes)
    for node in nodes:
        above = node.parent
        if above is not None and above.linked and not node.mark:
            node.line, node.calls, node.linked = above.line, above.calls, True
        if not node.name.startswith(EVALUATE):
            continue
        sequence = node.args.get("Sequence number")
        before = [one for one in forward.get(sequence, ()) if one.start < node.start] if sequence is not None else []
        source = max(before, key=lambda one: one.start) if before else None
        if source is None and "AccumulateGrad" in node.name:
            source = last.get(node.thread)
        if source is not None:
            last[node.thread] = node
        elif above is None:  # alone in its thread: torch's for the device
            source = _around(node, callers)
        if source is not None:
            node.line, node.calls, node.linked = source.line, source.calls, True


def _outer_line_marks(nodes: Sequence[Node]) -> list[Node]:
    """Return the marks of lines that lie in no other one, by start."""
    found = [node for node in nodes if _is_line_mark(node) and not _is_line_mark(node.parent)]
    return sorted(found, key=lambda node: node.start)


def _is_line_mark(node: Node | None) -> bool:
    return node is not None and node.name.startswith(f"{MARK}l|")


def _around(node: Node, marks: Sequence[Node]) -> Node | None:
    """Return the mark of another thread that lasts while ``node`` does."""
    index = bisect.bisect_right(marks, node.start, key=lambda mark: mark.start) - 1
    return marks[index] if index >= 0 and marks[index].end >= node.end else None


def plain_name(name: str) -> str:
    """Return an operator's name without autograd's wrapping."""
    return name.removeprefix(EVALUATE).removeprefix("torch::autograd::")


def _call(node: Node) -> OpCall:
    args = node.args
    return OpCall(
        node.name,
        tuple(args.get("Input Dims") or ()),
        tuple(args.get("Input Strides") or ()),
        tuple(str(kind) for kind in args.get("Input type") or ()),
        tuple(str(value) for value in args.get("Concrete Inputs") or ()),
    )


def unit_of(node: Node) -> Node:
    """Return the outermost operator around ``node`` below the next mark or annotation."""
    while node.parent is not None and node.parent.is_op:
        node = node.parent
    return node


def is_trivial(node: Node) -> bool:
    """Whether an operator does nothing of its own, or only helps the one around it."""
    name = node.name.rpartition("::")[2]
    return name in FREE or name in HELPING


def does_the_work(node: Node) -> bool:
    """Whether the work of an operator is counted here: nothing inside does any, and nothing around it has done so."""
    if node.inner_work or node.name.rpartition("::")[2] in FREE:
        return False
    above = node.parent
    while above is not None and above.is_op:
        if not above.inner_work and not is_trivial(above):
            return False
        above = above.parent
    return True


def work_of_node(node: Node) -> OpCall:
    """Return the call that tells most about a leaf's work: for convolutions and attention the general form further up.

    What launches attention's kernels has its tensors in an order of its own.
    """
    if "convolution" in node.name and "backward" not in node.name:
        return _call(_above(node, "aten::convolution") or node)
    if "attention" in node.name:
        return _call(_above(node, "aten::_scaled_dot_product") or node)
    return _call(node)


def _above(node: Node, name: str) -> Node | None:
    """Return the nearest operator, the node or around it, whose name begins so."""
    found: Node | None = node
    while found is not None and found.is_op:
        if found.name.startswith(name):
            return found
        found = found.parent
    return None
