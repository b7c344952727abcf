"""The tape of a reverse pass: a draft of the backward graph, with the forward values that it may read.

Everything on it is float32, also where the forward's tensors are float16 or bfloat16: their values are widened once,
where they are read, and gradients are rounded once, where they leave. Forward values are read from what is saved
(inputs, results of matrix products, reductions of float32 rows, the segment's own outputs) and computed again
otherwise; in a kernel that reads a tensor anyway this costs no memory traffic.

A gradient may have a smaller shape than its value where it is the same along a dimension; it then broadcasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.draft import Draft, contiguous_meta
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.regions import reduced_dims
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

HALVES = frozenset({"float16", "bfloat16"})
VIEWS = frozenset(
    ("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand")
)
"""Operators that only look at a tensor differently (``reshape`` copies where it must)."""
SHARE = "share.default"
"""A division by sizes of a tensor: (value, their product, dimensions, the tensor's shape), until a tensor is known."""
_BLANK = Node("", "aten.add.Tensor", ())


@dataclass
class Tape:
    """A backward graph in the making. ``forward`` holds the segment's nodes, ``given`` what needs no computing."""

    forward: Mapping[str, Node]
    metas: Mapping[str, TensorMeta]
    names: Mapping[str, str]
    given: frozenset[str]
    cancelled: frozenset[str] = frozenset()
    """Row maxima that a softmax subtracts: its result does not depend on them, so no gradient flows there."""
    draft: Draft = field(init=False)
    hint: str = "gradient"
    _made: dict[str, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft(dict(self.metas), taken=set(self.metas))

    # -- forward values

    def value(self, arg: Any) -> Any:
        """A forward value (or plain number) as the backward pass takes it: floating point as float32."""
        if isinstance(arg, tuple):
            return tuple(self.value(item) for item in arg)
        if not isinstance(arg, Ref):
            return arg
        if arg.name not in self._made:
            self._made[arg.name] = self._again(arg.name) if self._cheap(arg.name) else self._wide(arg.name)
        return self._made[arg.name]

    def _wide(self, name: str) -> Ref:
        if self.metas[name].dtype not in HALVES:
            return Ref(name)
        wide = Symbol("dtype", "float32")
        return self.draft.emit(_BLANK, f"{self.names[name]}_wide", "_to_copy.default", Ref(name), dtype=wide)

    def _cheap(self, name: str) -> bool:
        """Whether a value is computed again rather than saved."""
        node = self.forward.get(name)
        if name in self.given or node is None:
            return False
        if node.bare_op in VIEWS or is_pointwise(node, self.metas):
            return True
        return reduced_dims(node, self.metas) is not None and self.metas[node.args[0].name].dtype in HALVES

    def _again(self, name: str) -> Ref:
        """Compute a forward value once more, in float32."""
        node = self.forward[name]
        if node.bare_op in {"to", "_to_copy", "contiguous", "clone"} and node.meta.dtype in FLOATS:
            return Ref(self.value(node.args[0]).name)
        args = tuple(self.value(arg) for arg in node.args)
        kwargs = {key: self.value(arg) for key, arg in node.kwargs.items()}
        dtype = "float32" if node.meta.dtype in FLOATS else node.meta.dtype
        again = replace(node, args=args, kwargs=kwargs, metas=(replace(node.meta, dtype=dtype),))
        key = repr((again.op, again.args, sorted(again.kwargs.items())))
        if key not in self.draft.made:
            self.draft.nodes.append(again)
            self.draft.metas[name] = again.meta
            self.draft.made[key] = name
        return Ref(self.draft.made[key])

    # -- backward values

    def emit(self, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Append ``aten.<op>``; shape and dtype follow from its operands."""
        return self.draft.emit(_BLANK, self.hint, op, *args, **kwargs)

    def node(self, op: str, args: tuple[Any, ...], shape: tuple[int, ...], dtype: str = "float32") -> Ref:
        """Append an operator whose result has the given shape."""
        meta = contiguous_meta(shape, dtype)
        return self.draft.append(replace(_BLANK, op=f"aten.{op}", args=args, metas=(meta,)), self.hint)

    def shape(self, value: Ref) -> tuple[int, ...]:
        """Shape of a forward or backward value."""
        return self.draft.metas[value.name].shape

    def narrow(self, value: Ref, dtype: str) -> Ref:
        """Round to ``dtype``, as products and results need it."""
        if self.draft.metas[value.name].dtype == dtype:
            return value
        made = self.maker(value)
        if made is not None and made.bare_op == "_to_copy" and self.draft.metas[made.args[0].name].dtype == dtype:
            return Ref(made.args[0].name)  # it was only widened
        return self.emit("_to_copy.default", value, dtype=Symbol("dtype", dtype))

    def widen(self, value: Ref) -> Ref:
        """A gradient as float32, as the tape has them all."""
        return self.narrow(value, "float32") if self.draft.metas[value.name].dtype in HALVES else value

    def full(self, value: Ref, shape: tuple[int, ...]) -> Ref:
        """A gradient with all of its dimensions."""
        if self.shape(value) == shape:
            return value
        return self.node("expand.default", (value, shape), shape, self.draft.metas[value.name].dtype)

    def zeroed(self, value: Ref, where: Ref) -> Ref:
        """``value``, 0 where the condition holds."""
        return self.emit("masked_fill.Scalar", value, where, 0.0)

    def summed(self, value: Ref, seen: tuple[int, ...], wanted: tuple[int, ...]) -> Ref:
        """Sum a gradient of a result of shape ``seen`` over what an operand of shape ``wanted`` was repeated along."""
        rank, own = len(seen), self.shape(value)
        operand, present = (1,) * (rank - len(wanted)) + wanted, (1,) * (rank - len(own)) + own
        repeated = [dim for dim in range(rank) if seen[dim] != 1 and operand[dim] == 1]
        count = math.prod(seen[dim] for dim in repeated if present[dim] == 1)
        if count > 1:  # the gradient does not vary along a dimension that is summed
            value = self.emit("mul.Tensor", value, count)
        axes = tuple(dim - rank for dim in repeated if present[dim] != 1)
        if axes:
            leading = axes == tuple(range(-len(own), -len(wanted)))
            value = self.emit("sum.dim_IntList", value, axes, not leading)
        left = self.shape(value)
        return self.spread(value, left[len(left) - len(wanted) :]) if len(left) > len(wanted) else value

    def spread(self, value: Ref, shape: tuple[int, ...]) -> Ref:
        """View a value with more or fewer dimensions of size 1; done to what is read rather than to what is made."""
        if self.shape(value) == shape:
            return value
        made = self.maker(value)
        if made is not None and made.bare_op == "reshape":
            return self.spread(made.args[0], shape)
        if made is not None and made.bare_op in {"sum", "mean"} and made.args[2] is False:
            kept = self.emit(made.op.removeprefix("aten."), *made.args[:2], True)
            if self.shape(kept) == shape:
                return kept
        if made is not None and self._uniform(made):
            args = tuple(self.spread(arg, shape) if _has_shape(self, arg) else arg for arg in made.args)
            again = replace(made, args=args, metas=(contiguous_meta(shape, made.meta.dtype),))
            return self.draft.append(again, made.name)
        return self.node("reshape.default", (value, shape), shape, self.draft.metas[value.name].dtype)

    def _uniform(self, node: Node) -> bool:
        """Whether a node is elementwise and all of its operands have its shape."""
        shapes = {self.shape(Ref(name)) for name in node.inputs()} - {()}
        return is_pointwise(node, self.draft.metas) and shapes == {node.meta.shape}

    def divided(self, value: Ref, source: tuple[int, ...], dims: tuple[int, ...]) -> Ref:
        """Divide by the number of elements along ``dims`` of the shape ``source``.

        A sum over just these dimensions becomes a mean, which knows their size by itself.
        """
        count = math.prod(source[dim] for dim in dims)
        averaged = self._averaged(value, dims)
        if averaged is not None:
            return averaged
        dtype = self.draft.metas[value.name].dtype
        return self.node(SHARE, (value, count, dims, source), self.shape(value), dtype)

    def _averaged(self, value: Ref, dims: tuple[int, ...]) -> Ref | None:
        made = self.maker(value)
        if made is None or not made.args or not isinstance(made.args[0], Ref):
            return None
        if made.bare_op == "sum":
            rank = len(self.shape(made.args[0]))
            same = {dim % rank for dim in made.args[1]} == {dim % rank for dim in dims}
            return self.emit("mean.dim", *made.args) if same else None
        if made.bare_op not in {"mul", "neg"}:
            return None
        inner = self._averaged(made.args[0], dims)
        return None if inner is None else self.emit(made.op.removeprefix("aten."), inner, *made.args[1:])

    def maker(self, value: Ref) -> Node | None:
        """The node of this draft that computes a value."""
        return next((node for node in reversed(self.draft.nodes) if node.name == value.name), None)


def _has_shape(tape: Tape, arg: Any) -> bool:
    return isinstance(arg, Ref) and tape.shape(arg) != ()


Gradients = list[tuple[Ref, Ref]]
"""Pairs of a forward value and a part of its gradient."""
Rule = Callable[[Tape, Node, Ref], Gradients]
