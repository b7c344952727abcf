"""A graph under rewriting: append nodes with derived metadata, rename what they replace.

Used by :mod:`drk.assistant.synth.rewrites` (the driver) and :mod:`drk.assistant.synth.decompositions` (the rules).
Shapes and dtypes of new nodes follow broadcasting and promotion for the few operators that rules emit; other operators
are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drk.gym.graph import Node, Pack, Ref, TensorMeta


def contiguous_meta(shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """Metadata of a row-major tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return TensorMeta(shape, dtype, tuple(reversed(strides)) if shape else ())


def fresh_name(wish: str, taken: set[str]) -> str:
    """Return ``wish``, numbered where it is one of ``taken``, and add it to them."""
    name, count = wish, 1
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    taken.add(name)
    return name


def plain_name(name: str) -> str:
    """A value's name without the prefix that ``torch.export`` gives to parameters, buffers and constants."""
    head, _, rest = name.partition("_")
    return rest if head in {"p", "b", "c"} and rest else name


@dataclass
class Draft:
    """A graph under rewriting: nodes so far, and which old names now mean which new ones."""

    metas: dict[str, TensorMeta]
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    made: dict[str, str] = field(default_factory=dict)
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Who read each value before the rewriting."""
    by_channel: bool = False
    """Norms over whole images may be written by channel, as kernels for inference want them."""
    channels_last: bool = False
    """Convolutions will have their channels innermost in memory."""

    def resolve(self, value: Any) -> Any:
        """Replace references by what they now mean."""
        if isinstance(value, Ref):
            return Ref(self.renamed.get(value.name, value.name))
        if isinstance(value, tuple):
            return tuple(self.resolve(item) for item in value)
        if isinstance(value, Pack):
            return replace(value, items=self.resolve(value.items))
        return value

    def emit(self, origin: Node, hint: str, op: str, *args: Any, **kwargs: Any) -> Ref:
        """Append ``aten.<op>`` with metadata derived from its operands, and return a reference to it."""
        operands = [self.metas[arg.name] for arg in args if isinstance(arg, Ref)]
        keep = kwargs.get("keepdim", args[2] if len(args) > 2 else True) is True
        meta = _result_meta(op, args, operands, keep=keep)
        if op.startswith("_to_copy"):
            meta = contiguous_meta(operands[0].shape, kwargs["dtype"].name)
        return self.append(replace(origin, op=f"aten.{op}", args=args, kwargs=kwargs, metas=(meta,)), hint)

    def append(self, node: Node, hint: str) -> Ref:
        """Append ``node`` under a name that begins with ``hint``, or return what already computes the same."""
        fingerprint = repr((node.op, node.args, sorted(node.kwargs.items())))
        if fingerprint in self.made:
            return Ref(self.made[fingerprint])
        name = fresh_name(hint, self.taken)
        self.metas[name] = node.meta
        self.nodes.append(replace(node, name=name))
        self.made[fingerprint] = name
        return Ref(name)


_REDUCING = frozenset({"sum", "mean", "amax", "amin", "var", "prod", "argmax", "argmin"})


def _result_meta(op: str, args: tuple[Any, ...], operands: list[TensorMeta], *, keep: bool) -> TensorMeta:
    name = op.split(".")[0]
    if name in _REDUCING:
        source = operands[0].shape
        dims = {dim % len(source) for dim in (args[1] if isinstance(args[1], tuple) else (args[1],))}
        kept = tuple(1 if axis in dims else n for axis, n in enumerate(source) if keep or axis not in dims)
        return contiguous_meta(kept, "int64" if name.startswith("arg") else operands[0].dtype)
    if name == "reshape":
        return contiguous_meta(tuple(args[1]), operands[0].dtype)
    if name == "slice":
        axis, start, end = args[1:]
        shape = tuple(end - start if index == axis else size for index, size in enumerate(operands[0].shape))
        return replace(operands[0], shape=shape)
    shape = ()
    for meta in operands:
        shape = _broadcast(shape, meta.shape)
    dtype = max((meta.dtype for meta in operands), key=lambda item: (item == "float32", item))
    if name in {"eq", "ne", "lt", "le", "gt", "ge"}:
        dtype = "bool"
    if name == "where":
        dtype = max((meta.dtype for meta in operands[1:]), key=lambda item: (item == "float32", item))
    same = next((meta for meta in operands if meta.shape == shape), None)
    return replace(same, dtype=dtype) if same else contiguous_meta(shape, dtype)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    width = max(len(left), len(right))
    pairs = zip((1,) * (width - len(left)) + left, (1,) * (width - len(right)) + right, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)
