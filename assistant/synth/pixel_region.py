"""Regions of a convolution that sees one pixel: a matrix product over pixels, with pointwise operators after it.

The weights (channels out, channels in) multiply the channels of every pixel of an image, so that the result lies as the
convolution's does and bias, norm in eval, activation and residual join it. In float16 and bfloat16 only: the library
rounds float32 to TF32 where ``tl.dot`` cuts it off, whose error is 2.5 times as large, and its kernels took a third of
the time of these ones (both measured on an H200).

Left out: strides and groups, operators before the convolution, reductions over its result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drk.assistant.synth.frames import Frame
from drk.assistant.synth.regions import (
    MAX_OPERANDS,
    Facts,
    Product,
    Region,
    product_of,
    reduced_dims,
    region_inputs,
    region_outputs,
)
from drk.gym.graph import Node, Ref, TensorMeta

_RANKS = {"aten.conv1d.default": 1, "aten.conv2d.default": 2, "aten.conv3d.default": 3}
_DEFAULTS = (None, 1, 0, 1, 1)


def sees_one_pixel(node: Node, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether ``node`` is a 16-bit convolution of a batch with windows of one element, stride 1 and no padding."""
    rank = _RANKS.get(node.op)
    if rank is None or node.kwargs or len(node.metas) != 1 or node.metas[0] is None:
        return False
    source, weight, *rest = node.args
    given: list[Any] = [*rest, *_DEFAULTS[len(rest) :]]
    _bias, stride, padding, _dilation, groups = given
    if not isinstance(source, Ref) or not isinstance(weight, Ref) or groups != 1:
        return False
    first, second, result = metas.get(source.name), metas.get(weight.name), node.metas[0]
    if first is None or second is None or result.dtype not in {"float16", "bfloat16"}:
        return False
    same = first.dtype == second.dtype == result.dtype and len(result.shape) == rank + 2 and result.numel > 0
    return same and second.shape[2:] == (1,) * rank and _all(stride, 1) and _all(padding, 0)


def pixel_product(node: Node, metas: Mapping[str, TensorMeta]) -> Product | None:
    """Read such a convolution without a bias as a product, or return None."""
    if not sees_one_pixel(node, metas) or (len(node.args) > 2 and node.args[2] is not None):
        return None
    source, weight = node.args[:2]
    return Product(node, weight.name, source.name, transposed=False, batched=True, of_pixels=True)


def _all(value: object, wanted: int) -> bool:
    return all(item == wanted for item in value) if isinstance(value, tuple) else value == wanted


def build_pixel_region(nodes: list[Node], facts: Facts) -> Region | None:
    """Return the region of ``nodes`` (in graph order) with one such convolution, or None."""
    products = [item for node in nodes if (item := pixel_product(node, facts.metas)) is not None]
    inside = {node.name for node in nodes}
    if len(products) != 1 or any(item.left in inside or item.right in inside for item in products):
        return None
    if any(product_of(node, facts.metas) or reduced_dims(node, facts.metas) for node in nodes):
        return None
    shape = products[0].node.meta.shape
    frame = Frame(shape, tuple(range(len(shape))), len(shape) - 2)
    inputs = region_inputs(nodes, inside, frame, frozenset(), facts, products)
    outputs = region_outputs(nodes, inside, frame, frozenset(), facts)
    if inputs is None or outputs is None or len(inputs) + len(outputs) > MAX_OPERANDS:
        return None
    used = {name for node in nodes for name in node.inputs()}
    scalars = {name: value for name, value in facts.scalars.items() if name in used}
    return Region(
        "matmul", tuple(nodes), shape, frame.columns, inputs, outputs, products=tuple(products), scalars=scalars
    )
