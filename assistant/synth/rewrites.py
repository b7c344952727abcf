"""Graph rewrites that hold for all inputs: the algebra before fusion.

In order: operators that do nothing are dropped (dropout in eval mode, detach, same-dtype casts, same-shape views);
normalisations and softmax over trailing dimensions are written out as reductions and pointwise operators, so that they
fuse with what stands around them; eval-mode batch norm becomes a scale and a shift per channel; equal subexpressions
are computed once; dead nodes go.

Left out: anything that reorders floating-point sums (folding a norm into the next matrix product, say). Nodes that are
made here use ordinary ATen operators, so that they can still be emitted as torch code when no kernel takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from drk.assistant.synth.expression import is_pointwise
from drk.gym.graph import Graph, Node, Pack, Ref, TensorMeta


def contiguous_meta(shape: tuple[int, ...], dtype: str) -> TensorMeta:
    """Metadata of a row-major tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return TensorMeta(shape, dtype, tuple(reversed(strides)) if shape else ())


@dataclass
class _Draft:
    """A graph under rewriting: nodes so far, and which old names now mean which new ones."""

    metas: dict[str, TensorMeta]
    nodes: list[Node] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

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
        name, count = hint, 1
        while name in self.taken:
            name, count = f"{hint}_{count}", count + 1
        self.taken.add(name)
        operands = [self.metas[arg.name] for arg in args if isinstance(arg, Ref)]
        meta = _result_meta(op, args, operands)
        if op.startswith("_to_copy"):
            meta = contiguous_meta(operands[0].shape, kwargs["dtype"].name)
        self.metas[name] = meta
        self.nodes.append(replace(origin, name=name, op=f"aten.{op}", args=args, kwargs=kwargs, metas=(meta,)))
        return Ref(name)


def _result_meta(op: str, args: tuple[Any, ...], operands: list[TensorMeta]) -> TensorMeta:
    name = op.split(".")[0]
    if name in {"sum", "mean", "amax", "amin", "var"}:
        shape = tuple(1 if axis - len(operands[0].shape) in args[1] else n for axis, n in enumerate(operands[0].shape))
        return contiguous_meta(shape, operands[0].dtype)
    if name == "view":
        return contiguous_meta(tuple(args[1]), operands[0].dtype)
    if name == "slice":
        axis, start, end = args[1:]
        shape = tuple(end - start if index == axis else size for index, size in enumerate(operands[0].shape))
        return replace(operands[0], shape=shape)
    shape = ()
    for meta in operands:
        shape = _broadcast(shape, meta.shape)
    dtype = max((meta.dtype for meta in operands), key=lambda item: (item == "float32", item))
    same = next((meta for meta in operands if meta.shape == shape), None)
    return replace(same, dtype=dtype) if same else contiguous_meta(shape, dtype)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    width = max(len(left), len(right))
    pairs = zip((1,) * (width - len(left)) + left, (1,) * (width - len(right)) + right, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


def rewrite(graph: Graph) -> Graph:
    """Return an equivalent graph that fuses better. See the module's docstring for the rules."""
    users = graph.users()
    inputs = {item.name for item in graph.placeholders}
    draft = _Draft(graph.metas(), taken=inputs | {node.name for node in graph.nodes})
    by_name = {node.name: node for node in graph.nodes}
    seen: dict[str, str] = {}
    for original in graph.nodes:
        node = replace(
            original,
            args=draft.resolve(original.args),
            kwargs={key: draft.resolve(value) for key, value in original.kwargs.items()},
        )
        same = _identity_source(node, draft.metas) or _needless_expand(node, users[node.name], by_name, draft.metas)
        if same is not None and not ("output" in users[node.name] and same in inputs):
            draft.renamed[node.name] = same
            continue
        fingerprint = repr((node.op, node.args, sorted(node.kwargs.items())))
        if fingerprint in seen and not any(word in node.op for word in _RANDOM):
            draft.renamed[node.name] = seen[fingerprint]
            continue
        rule = _DECOMPOSITIONS.get(node.bare_op)
        written_out = rule(node, draft) if rule else None
        if written_out is not None:
            draft.renamed[node.name] = seen[fingerprint] = written_out.name
            continue
        seen[fingerprint] = node.name
        draft.nodes.append(node)
    output = draft.resolve(graph.output)
    mutations = {key: draft.renamed.get(name, name) for key, name in graph.mutations.items()}
    return _without_dead(replace(graph, nodes=tuple(draft.nodes), output=output, mutations=mutations))


_RANDOM = ("rand", "drop", "bernoulli", "normal", "multinomial", "uniform", "exponential", "geometric", "poisson")


def _without_dead(graph: Graph) -> Graph:
    users = {name: set(names) for name, names in graph.users().items()}
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if users[node.name]:
            kept.append(node)
            continue
        for name in node.inputs():
            users[name].discard(node.name)
    return replace(graph, nodes=tuple(reversed(kept)))


# --- Operators that do nothing -------------------------------------------------------------------------------


def _identity_source(node: Node, metas: Mapping[str, TensorMeta]) -> str | None:
    """Name of the value that ``node`` merely repeats, or None."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source, name = node.args[0], node.bare_op
    if node.op == "getitem" or len(node.metas) != 1 or node.metas[0] is None or source.name not in metas:
        return None
    before, after = metas[source.name], node.metas[0]
    if name in {"detach", "detach_", "alias", "lift_fresh", "lift_fresh_copy"}:
        return source.name
    if name == "dropout" or name.endswith("_dropout"):
        return source.name if len(node.args) > 2 and (node.args[2] is False or node.args[1] == 0) else None
    unchanged = before.shape == after.shape and before.dtype == after.dtype
    if name in {"clone", "to", "_to_copy", "contiguous", "type_as"}:
        return source.name if unchanged and before.strides == after.strides else None
    if name in {"view", "reshape", "expand", "_unsafe_view", "flatten", "squeeze"}:
        return source.name if unchanged else None
    return None


def _needless_expand(
    node: Node, users: tuple[str, ...], by_name: Mapping[str, Node], metas: Mapping[str, TensorMeta]
) -> str | None:
    """Source of an ``expand`` that pointwise users do by themselves, since another operand has the full shape."""
    if node.bare_op not in {"expand", "expand_as"} or not isinstance(node.args[0], Ref):
        return None
    for user in users:
        other = by_name.get(user)
        if other is None or not is_pointwise(other, metas):
            return None
        shapes = [metas[name].shape for name in other.inputs() if name != node.name]
        if other.meta.shape not in shapes:
            return None
    return node.args[0].name


# --- Written-out operators -----------------------------------------------------------------------------------


def _trailing(meta: TensorMeta, dims: Any) -> tuple[int, ...] | None:
    """Return ``dims`` as negative indices when they are exactly the last ones, else None."""
    rank = len(meta.shape)
    items = dims if isinstance(dims, tuple) else (dims,)
    wanted = sorted(dim - rank if dim >= 0 else dim for dim in items)
    return tuple(wanted) if wanted and wanted == list(range(-len(wanted), 0)) and meta.dtype in _FUSED else None


_FUSED = frozenset({"float32", "float16", "bfloat16"})


def _softmax(node: Node, draft: _Draft) -> Ref | None:
    x = node.args[0]
    dims = _trailing(draft.metas[x.name], node.args[1])
    if dims is None or node.meta.dtype not in _FUSED:
        return None
    top = draft.emit(node, "row_max", "amax.default", x, dims, True)
    centred = draft.emit(node, "centred", "sub.Tensor", x, top)
    power = draft.emit(node, "exponential", "exp.default", centred)
    total = draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    if "log" in node.bare_op:
        log_total = draft.emit(node, "log_sum", "log.default", total)
        return draft.emit(node, "log_probability", "sub.Tensor", centred, log_total)
    return draft.emit(node, "probability", "div.Tensor", power, total)


def _logsumexp(node: Node, draft: _Draft) -> Ref | None:
    x = node.args[0]
    dims = _trailing(draft.metas[x.name], node.args[1])
    if dims is None:
        return None
    top = draft.emit(node, "row_max", "amax.default", x, dims, True)
    power = draft.emit(node, "exponential", "exp.default", draft.emit(node, "centred", "sub.Tensor", x, top))
    total = draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    result = draft.emit(node, "log_of_sum", "add.Tensor", top, draft.emit(node, "log_sum", "log.default", total))
    if len(node.args) > 2 and node.args[2] is True:
        return result
    return draft.emit(node, "squeezed", "view.default", result, node.meta.shape)


def _vector_norm(node: Node, draft: _Draft) -> Ref | None:
    order = node.args[1] if len(node.args) > 1 else 2
    dims = _trailing(draft.metas[node.args[0].name], node.args[2]) if len(node.args) > 2 and node.args[2] else None
    if order != 2 or dims is None or not (len(node.args) > 3 and node.args[3] is True) or node.kwargs.get("dtype"):
        return None
    square = draft.emit(node, "square", "pow.Tensor_Scalar", node.args[0], 2)
    return draft.emit(node, "norm", "sqrt.default", draft.emit(node, "row_sum", "sum.dim_IntList", square, dims, True))


def _glu(node: Node, draft: _Draft) -> Ref | None:
    x = node.args[0]
    meta = draft.metas[x.name]
    dim = (node.args[1] if len(node.args) > 1 else -1) % len(meta.shape)
    half = meta.shape[dim] // 2
    if meta.dtype not in _FUSED or dim != len(meta.shape) - 1:
        return None
    value = draft.emit(node, "value", "slice.Tensor", x, dim, 0, half)
    gate = draft.emit(node, "gate", "slice.Tensor", x, dim, half, 2 * half)
    return draft.emit(node, "gated", "mul.Tensor", value, draft.emit(node, "opened", "sigmoid.default", gate))


def _layer_norm(node: Node, draft: _Draft) -> Ref | None:
    x, shape = node.args[0], node.args[1]
    dims = _trailing(draft.metas[x.name], tuple(range(-len(shape), 0)))
    if dims is None:
        return None
    weight, bias, eps = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
    mean = draft.emit(node, "mean", "mean.dim", x, dims, True)
    variance = draft.emit(node, "variance", "var.correction", x, dims, correction=0, keepdim=True)
    centred = draft.emit(node, "centred", "sub.Tensor", x, mean)
    return _affine(node, draft, centred, variance, eps, (weight, bias))


def _affine(
    node: Node, draft: _Draft, centred: Ref, variance: Ref, eps: float, scale_shift: tuple[Ref | None, Ref | None]
) -> Ref:
    shifted = draft.emit(node, "variance_eps", "add.Tensor", variance, eps)
    result = draft.emit(node, "normalised", "mul.Tensor", centred, draft.emit(node, "rstd", "rsqrt.default", shifted))
    weight, bias = scale_shift
    if weight is not None:
        result = draft.emit(node, "scaled", "mul.Tensor", result, weight)
    return result if bias is None else draft.emit(node, "shifted", "add.Tensor", result, bias)


def _rms_norm(node: Node, draft: _Draft) -> Ref | None:
    x, shape = node.args[0], node.args[1]
    meta = draft.metas[x.name]
    dims = _trailing(meta, tuple(range(-len(shape), 0)))
    if dims is None:
        return None
    weight = node.args[2] if len(node.args) > 2 else None
    eps = node.args[3] if len(node.args) > 3 else None
    if eps is None:
        eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[meta.dtype]
    square = draft.emit(node, "square", "pow.Tensor_Scalar", x, 2)
    mean = draft.emit(node, "mean_square", "mean.dim", square, dims, True)
    return _affine(node, draft, x, mean, eps, (weight, None))


def _batch_norm(node: Node, draft: _Draft) -> Ref | None:
    training, eps = (node.args[5], node.args[7]) if node.bare_op == "batch_norm" else (False, node.args[6])
    x, weight, bias, mean, variance = node.args[:5]
    meta = draft.metas[x.name]
    if training or mean is None or meta.dtype not in _FUSED or len(meta.shape) < 2:
        return None
    shape = (meta.shape[1],) + (1,) * (len(meta.shape) - 2)

    def channel(value: Ref | None) -> Ref | None:
        if value is None or len(shape) == 1:
            return value
        return draft.emit(node, f"{value.name}_channels", "view.default", value, shape)

    centred = draft.emit(node, "centred", "sub.Tensor", x, channel(mean))
    spread = channel(variance)
    assert spread is not None
    return _affine(node, draft, centred, spread, eps, (channel(weight), channel(bias)))


def _native_first(rule: Callable[[Node, _Draft], Ref | None]) -> Callable[[Node, _Draft], Ref | None]:
    """Adapt a rule to operators that return tuples; see :func:`_getitem`."""

    def apply(node: Node, draft: _Draft) -> Ref | None:
        first = node.metas[0]
        if first is None:
            return None
        result = rule(replace(node, metas=(first,)), draft)
        if result is not None:
            draft.renamed[f"{node.name}[0]"] = result.name
        return None

    return apply


def _getitem(node: Node, draft: _Draft) -> Ref | None:
    source, index = node.args
    name = draft.renamed.get(f"{source.name}[{index}]")
    return Ref(name) if name else None


def _silu_parts(node: Node, draft: _Draft) -> Ref | None:
    """x * sigmoid(x) written by hand is silu."""
    left, right = node.args[:2]
    made_by = {item.name: item for item in draft.nodes}
    for x, gate in ((left, right), (right, left)):
        if isinstance(gate, Ref) and isinstance(x, Ref) and gate.name in made_by:
            source = made_by[gate.name]
            if source.bare_op == "sigmoid" and source.args[0] == x:
                return draft.emit(node, "silu", "silu.default", x)
    return None


def _full_reduction(node: Node, draft: _Draft) -> Ref | None:
    """``reduce(x, -1)`` followed by a reshape that only restores the dimension is ``keepdim=True``."""
    source, shape = node.args[0], node.metas[0].shape if node.metas[0] else None
    made_by = {item.name: item for item in draft.nodes}
    reduced = made_by.get(source.name) if isinstance(source, Ref) else None
    if reduced is None or reduced.bare_op not in {"sum", "mean", "amax", "amin"} or len(reduced.args) < 2:
        return None
    x, dims = reduced.args[0], reduced.args[1]
    trailing = _trailing(draft.metas[x.name], dims) if isinstance(dims, int | tuple) else None
    kept = len(reduced.args) > 2 and reduced.args[2] is True
    if trailing is None or kept or reduced.kwargs:
        return None
    full = draft.metas[x.name].shape
    if shape != full[: -len(trailing)] + (1,) * len(trailing) or math.prod(full) == 0:
        return None
    return draft.emit(node, node.bare_op + "_kept", reduced.op.removeprefix("aten."), x, trailing, True)


_DECOMPOSITIONS: Mapping[str, Callable[[Node, _Draft], Ref | None]] = {
    "softmax": _softmax,
    "_softmax": _softmax,
    "log_softmax": _softmax,
    "_log_softmax": _softmax,
    "logsumexp": _logsumexp,
    "linalg_vector_norm": _vector_norm,
    "glu": _glu,
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_first(_layer_norm),
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _native_first(_batch_norm),
    "mul": _silu_parts,
    "unsqueeze": _full_reduction,
    "view": _full_reduction,
    "getitem": _getitem,
}
