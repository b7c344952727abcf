"""Norms over whole images written by channel: statistics first, then one scale and one shift for each channel.

A group of channels lies together in row-major memory but not in channels-last memory, and its weights change within
it. Statistics of single channels suit both layouts; those of a group follow from them, exactly: the mean of the
channels' means, and the mean of their variances plus the variance of their means (all have as many elements). What
remains is elementwise over the tensor in whatever order it lies in memory, with small operands of shape (N, C, 1, 1),
so it joins what follows: activations, residuals, pooling, a mean over the image.

Batch norms in training are written so too, with the new values of their running statistics beside the batch's.
Statistics are float32 whatever the tensor's dtype, as in PyTorch. Left out: norms whose groups fit in registers, which
one kernel reads once (:mod:`drk.assistant.synth.decompositions`), and running statistics of an instance norm.
"""

from __future__ import annotations

import math
from typing import Any

from drk.assistant.synth.draft import Draft, plain_name
from drk.assistant.synth.expression import FLOATS
from drk.assistant.synth.frames import MAX_COLUMNS
from drk.assistant.synth.regions import FEW_ROWS, FEW_ROWS_COLUMNS
from drk.gym.graph import Node, Ref, Symbol, TensorMeta

LEAST_IMAGE = 64
"""Smallest image whose channels are reduced one by one in row-major memory."""


def by_channel(meta: TensorMeta, groups: int, *, channels_last: bool) -> bool:
    """Whether a group norm is better written by channel than with a group as one row in registers."""
    batch, channels, *rest = meta.shape
    image, row = math.prod(rest), math.prod(rest) * channels // groups
    if len(rest) not in (1, 2, 3) or image < 2:
        return False
    if channels_last and len(rest) > 1:
        return True
    few = batch * groups <= FEW_ROWS and row >= FEW_ROWS_COLUMNS
    return image >= LEAST_IMAGE and (row > MAX_COLUMNS or few)


def group_norm_by_channel(node: Node, draft: Draft, parameters: tuple[Any, Any, float]) -> Ref:
    """Group norm of ``node.args[0]`` over ``node.args[1]`` groups; ``parameters`` are weight, bias and epsilon."""
    weight, bias, eps = parameters
    groups = node.args[1]
    x = _widened(node, draft, node.args[0])
    batch, channels, *rest = draft.metas[x.name].shape
    width, dims = channels // groups, tuple(range(-len(rest), 0))
    mean = draft.emit(node, "mean", "mean.dim", x, dims, True)
    variance = draft.emit(node, "variance", "var.correction", x, dims, correction=0, keepdim=True)
    column = (channels, *(1 for _ in rest))
    if width == 1:
        scale = _rstd(node, draft, variance, eps)
        if weight is not None:
            scale = draft.emit(node, "scale", "mul.Tensor", scale, _view(node, weight, column, draft))
    else:
        split = (batch, groups, width)
        means = draft.emit(node, "channel_means", "reshape.default", mean, split)
        spreads = draft.emit(node, "channel_variances", "reshape.default", variance, split)
        centre = draft.emit(node, "group_mean", "mean.dim", means, (-1,), True)
        between = draft.emit(node, "between", "var.correction", means, (-1,), correction=0, keepdim=True)
        within = draft.emit(node, "within", "mean.dim", spreads, (-1,), True)
        rstd = _rstd(node, draft, draft.emit(node, "group_variance", "add.Tensor", within, between), eps)
        if weight is None:
            scale = draft.emit(node, "scale", "expand_as.default", rstd, means)
        else:
            scale = draft.emit(node, "scale", "mul.Tensor", rstd, _view(node, weight, (groups, width), draft))
        each = (batch, *column)
        centres = draft.emit(node, "centre", "expand_as.default", centre, means)
        mean = draft.emit(node, "channel_centre", "reshape.default", centres, each)
        scale = draft.emit(node, "channel_scale", "reshape.default", scale, each)
    shift = None if bias is None else _view(node, bias, column, draft)
    return _normalised(node, draft, x, (mean, scale, shift))


def train_batch_norm(node: Node, draft: Draft) -> Ref | None:
    """Batch norm by the batch's own statistics, from the forms that export makes of it; results go by ``getitem``."""
    updates = node.bare_op == "_native_batch_norm_legit_functional"
    if updates:
        x, weight, bias, *running, training, momentum, eps = node.args
    else:
        (x, weight, bias, training, momentum, eps), running = node.args, []
    meta = draft.metas[x.name]
    if not draft.by_channel or training is not True or meta.dtype not in FLOATS or len(meta.shape) < 2:
        return None
    if meta.numel // max(1, meta.shape[1]) < 2 or {draft.metas[item.name].dtype for item in running} - FLOATS:
        return None
    source = _widened(node, draft, x)
    rank = len(meta.shape)
    dims = tuple(dim - rank for dim in range(rank) if dim != 1)
    column = (meta.shape[1],) + (1,) * (rank - 2)
    mean = draft.emit(node, "mean", "mean.dim", source, dims, True)
    variance = draft.emit(node, "variance", "var.correction", source, dims, correction=0, keepdim=True)
    scale = _rstd(node, draft, variance, eps)
    if weight is not None:
        scale = draft.emit(node, "scale", "mul.Tensor", scale, _view(node, weight, column, draft))
    shift = None if bias is None else _view(node, bias, column, draft)
    if running:
        unbiased = draft.emit(node, "unbiased", "var.correction", source, dims, correction=1, keepdim=True)
        for index, old, new in zip((3, 4), running, (mean, unbiased), strict=True):
            draft.renamed[f"{node.name}[{index}]"] = _moved(node, draft, (old, new), momentum).name
    draft.renamed[f"{node.name}[0]"] = _normalised(node, draft, source, (mean, scale, shift), meta.dtype).name
    return None


def _moved(node: Node, draft: Draft, pair: tuple[Ref, Ref], momentum: float) -> Ref:
    """``(1 - momentum) * old + momentum * new`` in the shape of the running statistic ``old``."""
    old, new = pair
    shape = draft.metas[new.name].shape
    kept = draft.emit(node, "kept", "mul.Tensor", _view(node, old, shape, draft), 1.0 - momentum)
    moved = draft.emit(node, "moved", "add.Tensor", kept, draft.emit(node, "taken", "mul.Tensor", new, momentum))
    flat = draft.emit(node, "running", "reshape.default", moved, draft.metas[old.name].shape)
    dtype = draft.metas[old.name].dtype
    if dtype == "float32":
        return flat
    return draft.emit(node, "running", "_to_copy.default", flat, dtype=Symbol("dtype", dtype))


def _normalised(node: Node, draft: Draft, x: Ref, parts: tuple[Ref, Ref, Ref | None], dtype: str | None = None) -> Ref:
    """``(x - mean) * scale + shift`` in the norm's dtype; ``parts`` are mean, scale and shift."""
    mean, scale, shift = parts
    result = draft.emit(node, "scaled", "mul.Tensor", draft.emit(node, "centred", "sub.Tensor", x, mean), scale)
    if shift is not None:
        result = draft.emit(node, "shifted", "add.Tensor", result, shift)
    wanted = node.meta.dtype if dtype is None else dtype
    if wanted == draft.metas[result.name].dtype:
        return result
    return draft.emit(node, "narrowed", "_to_copy.default", result, dtype=Symbol("dtype", wanted))


def _widened(node: Node, draft: Draft, x: Ref) -> Ref:
    """``x`` in float32, in which kernels compute anyway: statistics are kept in it between kernels."""
    if draft.metas[x.name].dtype == "float32":
        return x
    return draft.emit(node, "widened", "_to_copy.default", x, dtype=Symbol("dtype", "float32"))


def _rstd(node: Node, draft: Draft, variance: Ref, eps: float) -> Ref:
    return draft.emit(node, "rstd", "rsqrt.default", draft.emit(node, "variance_eps", "add.Tensor", variance, eps))


def _view(node: Node, value: Ref, shape: tuple[int, ...], draft: Draft) -> Ref:
    return draft.emit(node, f"{plain_name(value.name)}_shaped", "reshape.default", value, shape)
