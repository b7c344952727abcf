"""The factors of a matrix product: which axes are theirs, how they are addressed, what sizes they tell.

Batched products take each factor by its own strides along the batch dimensions, 0 where it is broadcast. A left factor
of several leading dimensions is seen as one matrix; a convolution's pixels are the columns of each image's matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from drk.assistant.synth.body import Body
from drk.assistant.synth.domain import Operand
from drk.assistant.synth.regions import Region
from drk.gym.graph import TensorMeta


@dataclass(frozen=True)
class Factor:
    """One factor: its own axis (rows of the left one, columns of a right one) and the inner one, both negative.

    ``name`` is the kernel's word for it, ``text`` the launcher's; ``meta`` is that of what the launcher calls so.
    """

    value: str
    name: str
    text: str
    meta: TensorMeta
    own: int
    left: bool
    batch: tuple[tuple[str, int | None], ...] = ()
    """Kernel arguments of the strides along batch dimensions, and the axes; None where it is broadcast."""

    @property
    def inner(self) -> int:
        """The axis that the product sums over."""
        return -3 - self.own

    @property
    def inner_last(self) -> bool:
        """Whether the inner dimension is innermost in memory."""
        return self.meta.strides[self.inner] == 1

    def stride(self, axis: int) -> tuple[str, str, int]:
        """Kernel argument, launcher expression and captured size of the stride along ``axis``."""
        return f"stride_{self.name}_{axis + 2}", f"{self.text}.stride({axis})", self.meta.strides[axis]


def factor_values(region: Region) -> list[str]:
    """Names of the left factor and of each right one."""
    return [region.products[0].left, *(product.right for product in region.products)]


def factor_names(body: Body) -> list[str]:
    """The kernel's words for the factors, all different: a matrix may be multiplied by itself."""
    left, *rights = (body.names[value] for value in factor_values(body.region))
    return [left, *(f"{right}_again" if right == left else right for right in rights)]


def laid_out(body: Body) -> tuple[Factor, ...]:
    """The factors with their axes."""
    product, metas = body.region.products[0], body.metas
    found = []
    for index, (value, name) in enumerate(zip(factor_values(body.region), factor_names(body), strict=True)):
        text, meta = body.names[value], metas[value]
        if product.of_pixels:
            edge = 2 if index else 1
            meta = replace(meta, shape=(*meta.shape[:edge], math.prod(meta.shape[edge:])))
            meta = replace(meta, strides=(*meta.strides[:edge], meta.strides[-1] if index else meta.strides[1]))
            text = f"{text}_pixels" if index else text
        elif not index and not product.batched and len(meta.shape) > 2:
            text = f"{text}_2d"
        own = -2 if not index or product.transposed else -1
        batch = tuple((item.parameter, item.axis) for item in _batch_strides(body) if item.name == name)
        found.append(Factor(value, name, text, meta, own, not index, batch))
    return tuple(found)


def product_operands(region: Region, metas: Mapping[str, TensorMeta]) -> tuple[Operand, ...]:
    """The factors, seen as operands that tell sizes: the left one for the rows, the first right one for the columns."""
    product = region.products[0]
    first, second = metas[product.left], metas[product.right]
    if product.of_pixels:
        rank = len(region.shape)
        channels = tuple(dim == 1 for dim in range(rank))
        weights = Operand(
            product.left, first, channels, tuple(-rank if item else None for item in channels), fixed=True
        )
        return factor_operand(product.right, second, region.shape, 1 - rank), weights
    left = factor_operand(product.left, first, region.shape, -1)
    if product.batched:
        return left, factor_operand(product.right, second, region.shape, -2)
    rank = len(region.shape)
    columns = tuple(dim == rank - 1 for dim in range(rank))
    axes = tuple((-2 if product.transposed else -1) if item else None for item in columns)
    return left, Operand(product.right, second, columns, axes, fixed=True)


def factor_operand(value: str, meta: TensorMeta, shape: tuple[int, ...], inner: int) -> Operand:
    """A factor as an operand; ``inner`` is the axis that the product sums over."""
    rank = len(shape)
    axes = tuple(
        dim - rank
        if dim - rank != inner and rank - dim <= len(meta.shape) and meta.shape[dim - rank] == shape[dim]
        else None
        for dim in range(rank)
    )
    return Operand(value, meta, tuple(axis is not None for axis in axes), axes)


@dataclass(frozen=True)
class _BatchStride:
    """A factor's stride along a batch dimension: kernel argument and the factor's axis, None where it is broadcast."""

    name: str
    parameter: str
    axis: int | None


def _batch_strides(body: Body) -> list[_BatchStride]:
    product = body.region.products[0]
    if not product.batched:
        return []
    if product.of_pixels:
        right = body.names[product.right]
        return [_BatchStride(right, f"stride_{right}_batch_0", 0)]
    found = []
    for value, name in zip(factor_values(body.region), factor_names(body), strict=True):
        operand = factor_operand(value, body.metas[value], body.region.shape, 0)
        for dim in range(len(body.region.shape) - 2):
            found.append(_BatchStride(name, f"stride_{name}_batch_{dim}", operand.axes[dim]))
    return found


def batch_arguments(body: Body, texts: Mapping[str, str]) -> list[tuple[str, str]]:
    """(parameter, launcher expression) of the strides along the batch dimensions, and of the inner batch size.

    ``texts`` are the launcher's words for the factors, by the kernel's.
    """
    found = []
    for item in _batch_strides(body):
        stride = "0" if item.axis is None else f"{texts[item.name]}.stride({item.axis})"
        found.append((item.parameter, stride))
    if found and len(body.region.shape) > 3 and not body.region.products[0].of_pixels:
        operands = [item for item in body.extra_operands if item.varies[1]]
        axis = operands[0].axes[1]
        found.append(("inner_batches", f"{body.names[operands[0].value]}.shape[{axis}]"))
    return found


def batch_offset(body: Body, name: str) -> str:
    """Pointer to a factor's matrix of the program's batch."""
    product = body.region.products[0]
    if not product.batched or (product.of_pixels and name == body.names[product.left]):
        return f"{name}_mat"
    if product.of_pixels or len(body.region.shape) == 3:
        return f"{name}_mat + batch * stride_{name}_batch_0"
    outer, inner = f"batch // inner_batches * stride_{name}_batch_0", f"batch % inner_batches * stride_{name}_batch_1"
    return f"{name}_mat + {outer} + {inner}"
