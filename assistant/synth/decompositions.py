"""Operators written out as reductions and pointwise operators, so that they fuse with what stands around them.

Each rule takes a node and the draft, emits what replaces it and returns the reference to its value, or returns None
when it does not apply (other dimensions, dtypes that kernels do not take). Formulas are
those of the PyTorch documentation; variances stay variances (two passes), softmax subtracts the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from drk.assistant.synth.cell_rules import CELL_RULES
from drk.assistant.synth.channel_norms import by_channel, group_norm_by_channel, train_batch_norm
from drk.assistant.synth.class_rules import CLASS_RULES
from drk.assistant.synth.complex_rules import COMPLEX_RULES
from drk.assistant.synth.contraction_rules import CONTRACTION_RULES
from drk.assistant.synth.distance_rules import DISTANCE_RULES
from drk.assistant.synth.draft import Draft, contiguous_meta, fresh_name, plain_name
from drk.assistant.synth.expression import FLOATS, is_pointwise
from drk.assistant.synth.loss_rules import LOSS_RULES
from drk.assistant.synth.orders import ORDER_RULES
from drk.assistant.synth.pointwise_rules import POINTWISE_RULES
from drk.assistant.synth.product_rules import PRODUCT_RULES
from drk.assistant.synth.reduction_rules import REDUCTION_RULES, reducible
from drk.assistant.synth.row_totals import TOTAL_RULES
from drk.assistant.synth.running_places import RUNNING_RULES
from drk.assistant.synth.scatters import SCATTER_RULES
from drk.assistant.synth.shown_rules import SHOWN_RULES
from drk.assistant.synth.tally_rules import TALLY_RULES
from drk.assistant.synth.thin_rules import THIN_RULES
from drk.gym.graph import Node, Ref, TensorMeta

_FUSED = FLOATS
LEAST_TOTAL = 0.5
"""What a safe softmax divides by at least: the largest element adds 1 to the sum, unless the row holds nothing."""


def _reduced(meta: TensorMeta, dims: Any) -> tuple[int, ...] | None:
    """Return ``dims`` as negative indices when kernels can reduce over them, else None."""
    return None if dims == () or dims is None else reducible(meta, dims)


def lowest_shift(dtype: str) -> float:
    """What a safe softmax subtracts at least: lower than all but -inf."""
    return -65504.0 if dtype == "float16" else -3e38


def _softmax(node: Node, draft: Draft) -> Ref | None:
    """Softmax or its logarithm; a safe one gives zeros for rows of -inf, whose largest element it takes as finite."""
    x, safe = node.args[0], "safe" in node.bare_op
    dims = _reduced(draft.metas[x.name], node.args[1])
    if dims is None or node.meta.dtype not in _FUSED:
        return None
    top = draft.emit(node, "row_max", "amax.default", x, dims, True)
    if safe:
        top = draft.emit(node, "shift", "clamp_min.default", top, lowest_shift(node.meta.dtype))
    centred = draft.emit(node, "centred", "sub.Tensor", x, top)
    power = draft.emit(node, "exponential", "exp.default", centred)
    total = draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    if "log" in node.bare_op:
        log_total = draft.emit(node, "log_sum", "log.default", total)
        return draft.emit(node, "log_probability", "sub.Tensor", centred, log_total)
    if safe:
        total = draft.emit(node, "divisor", "clamp_min.default", total, LEAST_TOTAL)
    return draft.emit(node, "probability", "div.Tensor", power, total)


def _logsumexp(node: Node, draft: Draft) -> Ref | None:
    x = node.args[0]
    dims = _reduced(draft.metas[x.name], node.args[1])
    if dims is None:
        return None
    top = draft.emit(node, "row_max", "amax.default", x, dims, True)
    # As PyTorch has it: the sum of a row that is all -inf, or has an inf, is taken as it stands.
    infinite = draft.emit(node, "infinite", "eq.Scalar", draft.emit(node, "size", "abs.default", top), math.inf)
    shift = draft.emit(node, "row_shift", "masked_fill.Scalar", top, infinite, 0.0)
    power = draft.emit(node, "exponential", "exp.default", draft.emit(node, "centred", "sub.Tensor", x, shift))
    total = draft.emit(node, "row_sum", "sum.dim_IntList", power, dims, True)
    result = draft.emit(node, "log_of_sum", "add.Tensor", shift, draft.emit(node, "log_sum", "log.default", total))
    if len(node.args) > 2 and node.args[2] is True:
        return result
    return draft.emit(node, "squeezed", "reshape.default", result, node.meta.shape)


def _glu(node: Node, draft: Draft) -> Ref | None:
    x = node.args[0]
    meta = draft.metas[x.name]
    dim = (node.args[1] if len(node.args) > 1 else -1) % len(meta.shape)
    if meta.dtype not in _FUSED:
        return None
    value, gate = _halves(node, draft, x, dim)
    return draft.emit(node, "gated", "mul.Tensor", value, draft.emit(node, "opened", "sigmoid.default", gate))


def _halves(node: Node, draft: Draft, x: Ref, dim: int) -> tuple[Ref, Ref]:
    """``x`` in two along ``dim``, whatever its size will be; as slices where gradients are wanted."""
    meta = draft.metas[x.name]
    size = meta.shape[dim] // 2
    if not draft.by_channel:
        first = draft.emit(node, "value", "slice.Tensor", x, dim, 0, size)
        return first, draft.emit(node, "gate", "slice.Tensor", x, dim, size, 2 * size)
    half = replace(meta, shape=node.meta.shape)
    name = fresh_name("halves", draft.taken)
    draft.nodes.append(replace(node, name=name, op="aten.chunk.default", args=(x, 2, dim), metas=(half, half)))
    parts = [replace(node, op="getitem", args=(Ref(name), place), kwargs={}, metas=(half,)) for place in range(2)]
    return draft.append(parts[0], "value"), draft.append(parts[1], "gate")


def _layer_norm(node: Node, draft: Draft) -> Ref | None:
    x, shape = node.args[0], node.args[1]
    dims = _reduced(draft.metas[x.name], tuple(range(-len(shape), 0)))
    if dims is None:
        return None
    weight, bias, eps = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
    mean = draft.emit(node, "mean", "mean.dim", x, dims, True)
    variance = draft.emit(node, "variance", "var.correction", x, dims, correction=0, keepdim=True)
    centred = draft.emit(node, "centred", "sub.Tensor", x, mean)
    return _affine(node, draft, centred, variance, eps, (weight, bias))


def _affine(
    node: Node, draft: Draft, centred: Ref, variance: Ref, eps: float, scale_shift: tuple[Ref | None, Ref | None]
) -> Ref:
    shifted = draft.emit(node, "variance_eps", "add.Tensor", variance, eps)
    result = draft.emit(node, "normalised", "mul.Tensor", centred, draft.emit(node, "rstd", "rsqrt.default", shifted))
    weight, bias = scale_shift
    if weight is not None:
        result = draft.emit(node, "scaled", "mul.Tensor", result, weight)
    return result if bias is None else draft.emit(node, "shifted", "add.Tensor", result, bias)


def _rms_norm(node: Node, draft: Draft) -> Ref | None:
    x, shape = node.args[0], node.args[1]
    meta = draft.metas[x.name]
    dims = _reduced(meta, tuple(range(-len(shape), 0)))
    if dims is None:
        return None
    weight = node.args[2] if len(node.args) > 2 else None
    eps = node.args[3] if len(node.args) > 3 else None
    if eps is None:
        eps = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[meta.dtype]
    square = draft.emit(node, "square", "pow.Tensor_Scalar", x, 2)
    mean = draft.emit(node, "mean_square", "mean.dim", square, dims, True)
    return _affine(node, draft, x, mean, eps, (weight, None))


def _batch_norm(node: Node, draft: Draft) -> Ref | None:
    training, eps = (node.args[5], node.args[7]) if node.bare_op == "batch_norm" else (False, node.args[6])
    x, weight, bias, mean, variance = node.args[:5]
    meta = draft.metas[x.name]
    if training or mean is None or meta.dtype not in _FUSED or len(meta.shape) < 2:
        return None
    shape = (meta.shape[1],) + (1,) * (len(meta.shape) - 2)

    def channel(value: Ref | None) -> Ref | None:
        return value if len(shape) == 1 else _shaped(node, draft, value, shape)

    centred = draft.emit(node, "centred", "sub.Tensor", x, channel(mean))
    spread = channel(variance)
    assert spread is not None
    return _affine(node, draft, centred, spread, eps, (channel(weight), channel(bias)))


def _instance_norm(node: Node, draft: Draft) -> Ref | None:
    x, weight, bias, running_mean, variance, use_input, momentum, eps = node.args[:8]
    meta = draft.metas[x.name]
    rank = len(meta.shape)
    if use_input is False and running_mean is not None:
        args = (x, weight, bias, running_mean, variance, False, momentum, eps)
        return _batch_norm(replace(node, op="aten.batch_norm.default", args=args), draft)
    dims = _reduced(meta, tuple(range(2 - rank, 0))) if rank > 2 else None
    if dims is None or running_mean is not None or use_input is not True:
        return None
    shape = (meta.shape[1],) + (1,) * (rank - 2)
    mean = draft.emit(node, "mean", "mean.dim", x, dims, True)
    variance = draft.emit(node, "variance", "var.correction", x, dims, correction=0, keepdim=True)
    centred = draft.emit(node, "centred", "sub.Tensor", x, mean)
    scale_shift = (_shaped(node, draft, weight, shape), _shaped(node, draft, bias, shape))
    return _affine(node, draft, centred, variance, eps, scale_shift)


def _group_norm(node: Node, draft: Draft) -> Ref | None:
    """Channels are split into (groups, channels of a group); :func:`_through_split` takes followers along."""
    x, groups = node.args[:2]
    weight, bias, eps = (*node.args[2:5], *(None, None, 1e-5)[len(node.args) - 2 :])[:3]
    meta = draft.metas[x.name]
    if len(meta.shape) < 2 or meta.dtype not in _FUSED or not meta.contiguous:
        return None
    if draft.by_channel and by_channel(meta, groups, channels_last=draft.channels_last):
        return group_norm_by_channel(node, draft, (weight, bias, eps))
    batch, channels, *rest = meta.shape
    split = (batch, groups, channels // groups, *rest)
    dims = tuple(range(-len(rest) - 1, 0))
    if math.prod(split[2:]) < 2:
        return None
    grouped = _regrouped(node, draft, x, split)
    mean = draft.emit(node, "mean", "mean.dim", grouped, dims, True)
    variance = draft.emit(node, "variance", "var.correction", grouped, dims, correction=0, keepdim=True)
    centred = draft.emit(node, "centred", "sub.Tensor", grouped, mean)
    shape = (groups, channels // groups, *(1 for _ in rest))
    scale_shift = (_shaped(node, draft, weight, shape), _shaped(node, draft, bias, shape))
    normalised = _affine(node, draft, centred, variance, eps, scale_shift)
    return draft.emit(node, "ungrouped", "reshape.default", normalised, meta.shape)


def _regrouped(node: Node, draft: Draft, x: Ref, split: tuple[int, ...], depth: int = 8) -> Ref:
    """``x`` with its channels split; elementwise operators that only led to it are written on what they read."""
    made = next((item for item in draft.nodes if item.name == x.name), None)
    joined = draft.metas[x.name].shape
    alone = made is not None and len(draft.users.get(made.name, ())) < 2 and draft.by_channel
    if made is None or not alone or not depth or not is_pointwise(made, draft.metas) or not made.meta.contiguous:
        return draft.emit(node, "grouped", "reshape.default", x, split)
    replaced: dict[str, Ref] = {}
    for name in made.inputs():
        if draft.metas[name].shape == joined and draft.metas[name].contiguous:
            replaced[name] = _regrouped(made, draft, Ref(name), split, depth - 1)
            continue
        operand = _split_operand(made, draft, name, split)
        if operand is None:
            return draft.emit(node, "grouped", "reshape.default", x, split)
        replaced[name] = operand
    args = tuple(replaced.get(arg.name, arg) if isinstance(arg, Ref) else arg for arg in made.args)
    meta = contiguous_meta(split, made.meta.dtype)
    return draft.append(replace(made, args=args, metas=(meta,)), f"{made.name}_grouped")


def _split_operand(node: Node, draft: Draft, name: str, split: tuple[int, ...]) -> Ref | None:
    """An operand whose channels, if it has any, are split as those of the tensor that it broadcasts to."""
    shape, rank = draft.metas[name].shape, len(split) - 1
    if len(shape) < rank - 1:
        return Ref(name)
    if len(shape) > rank or not draft.metas[name].contiguous:
        return None
    channels = split[1:3] if shape[1 - rank] != 1 else (1, 1)
    wanted = (*shape[: len(shape) - rank + 1], *channels, *shape[len(shape) - rank + 2 :])
    return draft.emit(node, f"{name}_grouped", "reshape.default", Ref(name), wanted)


def _shaped(node: Node, draft: Draft, value: Ref | None, shape: tuple[int, ...]) -> Ref | None:
    """``value`` viewed with ``shape``; parameters only, so that the sizes are constants."""
    return (
        None if value is None else draft.emit(node, f"{plain_name(value.name)}_shaped", "reshape.default", value, shape)
    )


def through_split(node: Node, draft: Draft) -> Ref | None:
    """``f(view(y))`` is ``view(f(y))`` when the view only joins split channels and the others can be split alike."""
    made_by = {item.name: item for item in draft.nodes}
    views = [made_by[name] for name in node.inputs() if name in made_by and name.startswith("ungrouped")]
    if not views or views[0].bare_op != "reshape" or views[0].meta.shape != node.meta.shape:
        return None
    inner = views[0].args[0]
    split, joined = draft.metas[inner.name].shape, node.meta.shape
    replaced: dict[str, Ref] = {views[0].name: inner}
    for name in node.inputs():
        operand = Ref(name) if name in replaced else _split_operand(node, draft, name, split)
        if operand is None:
            return None
        replaced.setdefault(name, operand)
    args = tuple(replaced.get(arg.name, arg) if isinstance(arg, Ref) else arg for arg in node.args)
    meta = replace(draft.metas[inner.name], dtype=node.meta.dtype)
    made = draft.append(replace(node, args=args, metas=(meta,)), f"{node.name}_grouped")
    return draft.emit(node, "ungrouped", "reshape.default", made, joined)


def _native_first(rule: Callable[[Node, Draft], Ref | None]) -> Callable[[Node, Draft], Ref | None]:
    """Adapt a rule to operators that return tuples; see :func:`_getitem`."""

    def apply(node: Node, draft: Draft) -> Ref | None:
        first = node.metas[0]
        if first is None:
            return None
        result = rule(replace(node, metas=(first,)), draft)
        if result is not None:
            draft.renamed[f"{node.name}[0]"] = result.name
        return None

    return apply


def _getitem(node: Node, draft: Draft) -> Ref | None:
    source, index = node.args
    name = draft.renamed.get(f"{source.name}[{index}]")
    return Ref(name) if name else None


def _silu_parts(node: Node, draft: Draft) -> Ref | None:
    """x * sigmoid(x) written by hand is silu."""
    left, right = node.args[:2]
    made_by = {item.name: item for item in draft.nodes}
    for x, gate in ((left, right), (right, left)):
        if isinstance(gate, Ref) and isinstance(x, Ref) and gate.name in made_by:
            source = made_by[gate.name]
            if source.bare_op == "sigmoid" and source.args[0] == x:
                return draft.emit(node, "silu", "silu.default", x)
    return None


def _prelu(node: Node, draft: Draft) -> Ref | None:
    """``where(x > 0, x, weight * x)`` with the weight's channels along dimension 1, as PyTorch computes it."""
    x, weight = node.args[:2]
    meta = draft.metas[x.name]
    single = draft.metas[weight.name].numel == 1
    if meta.dtype not in _FUSED or not meta.shape or (len(meta.shape) < 2 and not single) or not draft.by_channel:
        return None
    shape = (draft.metas[weight.name].numel,) + (1,) * (len(meta.shape) - 2)
    slope = weight if single else _shaped(node, draft, weight, shape)
    positive = draft.emit(node, "positive", "gt.Scalar", x, 0)
    return draft.emit(node, "prelu", "where.self", positive, x, draft.emit(node, "sloped", "mul.Tensor", x, slope))


def _full_reduction(node: Node, draft: Draft) -> Ref | None:
    """``reduce(x, -1)`` followed by a reshape that only restores the dimension is ``keepdim=True``."""
    source, shape = node.args[0], node.metas[0].shape if node.metas[0] else None
    made_by = {item.name: item for item in draft.nodes}
    reduced = made_by.get(source.name) if isinstance(source, Ref) else None
    if reduced is None or reduced.bare_op not in {"sum", "mean", "amax", "amin"} or len(reduced.args) < 2:
        return None
    x, dims = reduced.args[0], reduced.args[1]
    trailing = _reduced(draft.metas[x.name], dims) if isinstance(dims, int | tuple) else None
    kept = len(reduced.args) > 2 and reduced.args[2] is True
    if trailing is None or kept or reduced.kwargs:
        return None
    full = draft.metas[x.name].shape
    expected = tuple(1 if axis - len(full) in trailing else size for axis, size in enumerate(full))
    if shape != expected or math.prod(full) == 0:
        return None
    return draft.emit(node, node.bare_op + "_kept", reduced.op.removeprefix("aten."), x, trailing, True)


DECOMPOSITIONS: Mapping[str, Callable[[Node, Draft], Ref | None]] = {
    "softmax": _softmax,
    "_softmax": _softmax,
    "_safe_softmax": _softmax,
    "log_softmax": _softmax,
    "_log_softmax": _softmax,
    "logsumexp": _logsumexp,
    "glu": _glu,
    "layer_norm": _layer_norm,
    "native_layer_norm": _native_first(_layer_norm),
    "rms_norm": _rms_norm,
    "batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _native_first(_batch_norm),
    "_native_batch_norm_legit": train_batch_norm,
    "_native_batch_norm_legit_functional": train_batch_norm,
    "instance_norm": _instance_norm,
    "group_norm": _group_norm,
    "mul": _silu_parts,
    "unsqueeze": _full_reduction,
    "view": _full_reduction,
    "getitem": _getitem,
    "prelu": _prelu,
    **POINTWISE_RULES,
    **REDUCTION_RULES,
    **TALLY_RULES,
    **TOTAL_RULES,
    **THIN_RULES,
    **COMPLEX_RULES,
    **CONTRACTION_RULES,
    **PRODUCT_RULES,
    **LOSS_RULES,
    **CLASS_RULES,
    **DISTANCE_RULES,
    **SCATTER_RULES,
    **ORDER_RULES,
    **RUNNING_RULES,
    **SHOWN_RULES,
    **CELL_RULES,
}
