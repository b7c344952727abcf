"""What one operator's call costs: bytes and FLOPs, estimated from the shapes that the profiler recorded.

Operands are read once, results written once, views are free (:mod:`drk.gym.graph_cost`). Results are not recorded, so
their shapes follow from the operands. Look-ups, copies, fills, lists of tensors, convolutions and attention have rules
of their own.

Left out: caches, padding, what a library's algorithm really moves; attention masks other than the causal one are
counted as if dense.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from drk.assistant.profile_tree import FREE, OpCall
from drk.gym.graph import TensorMeta
from drk.gym.graph_cost import Cost, operator_cost

# fmt: off
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16", "long int": "int64",
    "long": "int64", "int": "int32", "short": "int16", "short int": "int16", "signed char": "int8", "char": "int8",
    "unsigned char": "uint8", "bool": "bool", "c10::complex<float>": "complex64", "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn", "c10::Float8_e5m2": "float8_e5m2",
}
_REDUCING = ("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "norm", "linalg_vector_norm", "var",
             "std", "all", "any", "prod", "logsumexp", "nll_loss_forward", "mse_loss")
# fmt: on
MATMUL = re.compile(r"^(linear|mm|addmm|bmm|baddbmm|matmul|_scaled_mm)$")
_WITHOUT_OUT = {"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3}
"""How many tensors a product takes; compiled code hands the result's over too."""
_LOOKUPS = frozenset(("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"))
_TABLE_GRADIENTS = {"embedding_dense_backward": 2, "_embedding_bag_dense_backward": 5}
"""Operators that write the gradient of a whole table, and which argument says how many rows it has."""
_PICKING = frozenset(("gather", "nll_loss_forward", "nll_loss_backward"))
"""Operators that read or write one element for each index, not the whole tensor."""
_CAUSAL_AT = {
    "scaled_dot_product_attention": 5,
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Which argument of an attention says that it is causal: half of the products are left out then."""
SDPA = re.compile(r"^(_?scaled_dot_product\w*|_(flash|efficient|cudnn)_attention\w*)$")


def bare_name(op: str) -> str:
    """Return an operator's name without its namespace."""
    return op.rpartition("::")[2]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


def _meta(shape: Sequence[int], dtype: str) -> TensorMeta:
    sizes = tuple(int(extent) for extent in shape)
    return TensorMeta(sizes, dtype, _contiguous(sizes))


def operands(call: OpCall) -> list[TensorMeta]:
    """Return the tensors that a call takes, lists of tensors one by one; scalars left out."""
    found: list[TensorMeta] = []
    for dims, kind in zip(call.dims, call.types, strict=False):
        dtype = _DTYPES.get(kind)
        if isinstance(dims, list) and dims and all(isinstance(item, list) for item in dims):
            found += [_meta(item, dtype or "float32") for item in dims]
        elif dtype is not None and isinstance(dims, list):
            found.append(_meta(dims, dtype))
    return found


def _results(name: str, tensors: list[TensorMeta]) -> list[TensorMeta]:
    first = tensors[0]
    if name == "linear" and len(tensors) >= 2:
        return [_meta((*first.shape[:-1], tensors[1].shape[0]), first.dtype)]
    if MATMUL.match(name) and len(tensors) >= 2:
        left, right = tensors[-2], tensors[-1]
        if left.shape and right.shape:
            return [_meta((*left.shape[:-1], right.shape[-1]), left.dtype)]
    if name in _REDUCING:
        return []
    if name == "embedding" and len(tensors) >= 2:
        return [_meta((*tensors[1].shape, first.shape[-1]), first.dtype)]
    if name == "cat":
        return [_meta((sum(item.numel for item in tensors),), first.dtype)]
    if SDPA.match(name):
        return [first]
    return [max(tensors, key=lambda item: item.numel)]


def _convolution_shape(tensors: list[TensorMeta], call: OpCall) -> tuple[int, ...]:
    """Output shape of ``aten::convolution(input, weight, bias, stride, padding, dilation, transposed, ...)``."""
    data, weight = tensors[0].shape, tensors[1].shape
    spatial = len(data) - 2
    lists = [_ints(text) for text in call.values[3:6]]
    if spatial < 1 or len(lists) < 3 or any(not item for item in lists):
        return data
    stride, padding, dilation = ((item * spatial)[:spatial] for item in lists)
    transposed = len(call.values) > 6 and call.values[6] == "True"
    sizes = []
    for i in range(spatial):
        reach = dilation[i] * (weight[i + 2] - 1)
        if transposed:
            sizes.append((data[i + 2] - 1) * stride[i] - 2 * padding[i] + reach + 1)
        else:
            sizes.append((data[i + 2] + 2 * padding[i] - reach - 1) // max(stride[i], 1) + 1)
    channels = weight[1] if transposed else weight[0]
    return (data[0], channels, *(max(size, 0) for size in sizes))


def _ints(text: str) -> list[int]:
    return [int(item) for item in re.findall(r"-?\d+", text)]


def call_cost(call: OpCall) -> Cost | None:
    """Estimate one operator's call; None where the profiler recorded no shapes of it."""
    name = bare_name(call.name)
    if name in FREE:
        return Cost(0, 0)
    tensors = operands(call)[: _WITHOUT_OUT.get(name)]
    if not tensors:
        return None
    special = _special_cost(name, tensors, call)
    if special is not None:
        return special
    results = _results(name, tensors)
    if name in ("addmm", "baddbmm"):
        return Cost(
            sum(item.size_bytes for item in (*tensors, *results)),
            2 * results[0].numel * tensors[-2].shape[-1] if tensors[-2].shape else 0,
        )
    return operator_cost(name.rstrip("_"), tensors[:2] if name == "linear" else tensors, results)


def _special_cost(name: str, tensors: list[TensorMeta], call: OpCall) -> Cost | None:
    """Return the cost of an operator that has a rule of its own, else None."""
    if name in _LOOKUPS and len(tensors) >= 2:
        return _lookup_cost(name, tensors)
    if name in _TABLE_GRADIENTS and len(tensors) >= 2:
        rows = _number(call.values, _TABLE_GRADIENTS[name])
        table = rows * tensors[0].shape[-1] * tensors[0].size_bytes // max(tensors[0].numel, 1)
        return Cost(tensors[0].size_bytes + tensors[1].size_bytes + table, tensors[0].numel)
    if name in _PICKING:
        ids = next((item for item in tensors if item.dtype == "int64"), None)
        width = tensors[0].size_bytes // max(tensors[0].numel, 1)
        return Cost(ids.size_bytes + 2 * ids.numel * width, ids.numel) if ids is not None else None
    if name in ("copy_", "fill_", "zero_"):
        return Cost(sum(item.size_bytes for item in tensors[:2]), 0)
    if name.startswith("triton_"):  # a kernel of torch.compile: what it writes is among its arguments
        return Cost(sum(item.size_bytes for item in tensors), max(item.numel for item in tensors))
    if name == "convolution" and len(tensors) >= 2:
        return _convolution_cost(tensors, call)
    if name == "convolution_backward" and len(tensors) >= 3:
        grad, data, weight = tensors[:3]
        flops = 4 * grad.numel * (weight.numel // max(1, weight.shape[0]))
        return Cost(grad.size_bytes + 2 * (data.size_bytes + weight.size_bytes), flops)
    if SDPA.match(name) and len(tensors) >= 3:
        return _attention_cost(name, tensors, call)
    if name.startswith(("_foreach_", "_fused_")):
        return _lists_cost(name, tensors, call)
    return None


def _convolution_cost(tensors: list[TensorMeta], call: OpCall) -> Cost:
    """Cost of a convolution; a stride that is longer than the kernel skips input."""
    data, weight = tensors[:2]
    shape = _convolution_shape(tensors, call)
    cost = operator_cost("convolution", tensors, [_meta(shape, data.dtype)])
    spatial, transposed = len(data.shape) - 2, len(call.values) > 6 and call.values[6] == "True"
    stride = (_ints(call.values[3]) * spatial)[:spatial] if len(call.values) > 3 else []
    read = 1.0
    for kernel, step in zip(weight.shape[2:], stride, strict=False):
        read *= 1.0 if transposed else min(kernel / max(step, 1), 1.0)
    return Cost(cost.size_bytes - int((1 - read) * data.size_bytes), cost.flops)


def _lookup_cost(name: str, tensors: list[TensorMeta]) -> Cost:
    """Cost of reading the rows that are asked for, not the table; a bag writes one row for each of its own."""
    table, ids = tensors[:2]
    row = table.size_bytes // max(table.shape[0], 1) if table.shape else 0
    bags = tensors[2].numel if len(tensors) > 2 else ids.shape[0] if ids.shape else 1
    written = bags if "bag" in name else ids.numel
    return Cost((ids.numel + written) * row + ids.size_bytes, ids.numel * row // 4 if "bag" in name else 0)


def _lists_cost(name: str, tensors: list[TensorMeta], call: OpCall) -> Cost:
    """Cost of operators on lists: all are read; the first is written, or of a fused optimizer all but the gradients."""
    lists = [dims for dims in call.dims if isinstance(dims, list) and dims and isinstance(dims[0], list)]
    first = tensors[: len(lists[0])] if lists else tensors[:1]
    written = sum(item.size_bytes for item in first)
    if name == "_foreach_norm":
        written = 0
    elif name.startswith("_fused_"):
        state = len(lists) - 2  # beside parameters and gradients; step counts are scalars
        written += sum(item.size_bytes for item in tensors[2 * len(first) : (2 + max(state, 0)) * len(first)])
    return Cost(sum(item.size_bytes for item in tensors) + written, sum(item.numel for item in first))


def _attention_cost(name: str, tensors: list[TensorMeta], call: OpCall) -> Cost:
    backward = "backward" in name
    offset = 1 if backward and len(tensors) > 3 else 0
    query, key, value = tensors[offset : offset + 3]
    length = key.shape[-2] if len(key.shape) > 1 else 1
    traffic = sum(item.size_bytes for item in (query, key, value, query))
    flops = (10 if backward else 4) * query.numel * length
    at = _CAUSAL_AT.get(name.removesuffix("_for_cpu"))
    if at is not None and at < len(call.values) and call.values[at] == "True":
        flops //= 2
    return Cost(traffic * (2 if backward else 1), flops)


def _number(values: Sequence[str], at: int) -> int:
    found = _ints(values[at]) if at < len(values) else []
    return found[0] if found else 0
