"""Smaller inputs for slow devices: find batch-like dimensions that a module lets shrink.

Triton's interpreter runs some ten thousand times slower than a GPU, so inputs are narrowed before anything runs in it.
Which dimensions may shrink is found by trying: dimensions of equal size across all tensor inputs form a group, each
group is narrowed to small sizes, and a size is kept when the reference's forward runs with two different sizes and its
outputs differ only in dimensions that follow the size. Nothing is guessed from names.

Honest limits: only inputs shrink, never weights; a module whose cost lies in its weights or in loops stays as slow as
it is. A dimension that equals a feature size by chance is tried alone, by position, and may be left as it is. A module
that runs at a smaller size but means something else there is still judged fairly, since reference and candidate get
the same inputs, but not at the sizes of the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drk.gym.runner import structure

Plan = dict[str, dict[str, int]]
"""Argument path -> dimension (as a JSON key) -> reduced size."""

FORWARD_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a forward that cannot take a shape raises."""

LEADING_SIZES = (3, 2, 4, 8)
INNER_SIZES = (33, 24, 32, 48, 64, 96, 128)
# Divisible by 16, as Triton specialises arguments: a kernel that was compiled for such sizes serves these too.
COMPILED_LEADING_SIZES = (16, 48, 32, 8, 4, 2)
COMPILED_INNER_SIZES = (48, 80, 112, 144, 32, 64, 128)
# Odd counts of rows whose own size divides by 16: the number of elements then still does, but fills no last block.
ODD_LEADING_SIZES = (17, 9, 5, 3)
ODD_SIZES = (33, *ODD_LEADING_SIZES)
ALIGNMENT = 128


@dataclass(frozen=True)
class _Place:
    path: str
    dim: int
    rank: int


def dense_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides (in elements) of ``shape`` without gaps, in the order of ``strides``; 0-strides stay 0."""
    order = sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim))
    result = [0] * len(shape)
    step = 1
    for dim in order:
        if strides[dim] == 0 and shape[dim] > 1:
            continue
        result[dim] = step
        step *= max(shape[dim], 1)
    return tuple(result)


def narrow(tensor: torch.Tensor, dims: dict[str, int]) -> torch.Tensor:
    """Return the leading part of ``tensor`` along ``dims``, dense again in the same order of dimensions."""
    if all(tensor.shape[int(dim)] <= size for dim, size in dims.items()):
        return tensor
    part = tensor.detach()
    for dim, size in dims.items():
        part = part.narrow(int(dim), 0, min(size, part.shape[int(dim)]))
    strides = dense_strides(part.shape, tensor.stride())
    if any(stride == 0 and size > 1 for stride, size in zip(strides, part.shape, strict=True)):
        unique = [1 if stride == 0 else size for stride, size in zip(strides, part.shape, strict=True)]
        base = part.as_strided(unique, part.stride(), part.storage_offset())
        return _copy(base, dense_strides(unique, strides)).expand(part.shape).requires_grad_(tensor.requires_grad)
    return _copy(part, strides).requires_grad_(tensor.requires_grad)


def _copy(source: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    target = torch.empty_strided(tuple(source.shape), tuple(strides), dtype=source.dtype, device=source.device)
    return target.copy_(source)


def apply_plan(args: list[Any], kwargs: dict[str, Any], plan: Plan) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with the tensors that ``plan`` names narrowed; others are passed on as they are."""

    def shrink(path: str, tensor: torch.Tensor) -> torch.Tensor:
        return narrow(tensor, plan[path]) if path in plan else tensor

    return structure.map_tensors(shrink, args, "args"), structure.map_tensors(shrink, kwargs, "kwargs")


def _shapes(value: Any) -> list[tuple[str, tuple[int, ...] | None, str]]:
    found: list[tuple[str, tuple[int, ...] | None, str]] = []
    for leaf in structure.flatten(value):
        tensor = leaf.value
        shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None
        found.append((leaf.path, shape, structure.type_name(tensor)))
    return found


def _follows(first: list[Any], second: list[Any], sizes: tuple[int, int]) -> bool:
    """Whether two lists of output shapes differ only where a dimension is a fixed multiple or offset of the size."""
    if len(first) != len(second):
        return False
    small, large = sizes
    for (path, shape, kind), (other_path, other_shape, other_kind) in zip(first, second, strict=True):
        if path != other_path or kind != other_kind or (shape is None) != (other_shape is None):
            return False
        if shape is None:
            continue
        if len(shape) != len(other_shape):
            return False
        for a, b in zip(shape, other_shape, strict=True):
            if a != b and a * large != b * small and b - a != large - small and not _downsampled(a, b, sizes):
                return False
    return True


def _downsampled(first: int, second: int, sizes: tuple[int, int]) -> bool:
    """Convolutions and pools: the output grows with the input at a steady, rounded rate."""
    small, large = sizes
    return (second - first) * (large - small) > 0 and abs(second * small - first * large) <= 8 * max(small, large)


def _groups(leaves: Sequence[tuple[str, torch.Tensor]]) -> list[list[_Place]]:
    by_size: dict[int, list[_Place]] = {}
    for path, tensor in leaves:
        for dim, size in enumerate(tensor.shape):
            if size > LEADING_SIZES[0]:
                by_size.setdefault(size, []).append(_Place(path, dim, tensor.dim()))
    return [by_size[size] for size in sorted(by_size, reverse=True)]


def _parts(group: list[_Place]) -> list[list[_Place]]:
    """Return the group, then its parts by dimension, then its single places: what to try in turn."""
    by_dim: dict[int, list[_Place]] = {}
    for place in group:
        by_dim.setdefault(place.dim, []).append(place)
    tries = [group]
    if len(by_dim) > 1:
        tries.extend(by_dim.values())
    if len(group) > len(by_dim):
        tries.extend([place] for place in group)
    return tries


def _power_of_two(size: int) -> int:
    return min(size & -size, ALIGNMENT)


def _rows_divide(group: list[_Place], shapes: dict[str, torch.Size]) -> bool:
    """Whether all places count rows (dimension 0) of a multiple of 16 elements each."""
    return all(place.dim == 0 and shapes[place.path][1:].numel() % 16 == 0 and place.rank > 1 for place in group)


def _sizes(group: list[_Place], shapes: dict[str, torch.Size], aligned: bool, compiled: bool) -> list[int]:
    size = shapes[group[0].path][group[0].dim]
    leading = all(place.dim == 0 and place.rank > 2 for place in group)
    if compiled and _rows_divide(group, shapes):
        wanted = [*(ODD_LEADING_SIZES if leading else ODD_SIZES), *COMPILED_INNER_SIZES]
    elif compiled and size % 16 == 0:
        wanted = [*COMPILED_LEADING_SIZES, *COMPILED_INNER_SIZES] if leading else [*COMPILED_INNER_SIZES]
    elif aligned:
        unit = _power_of_two(size)
        wanted = [unit, unit * 2, unit * 3] if unit > 1 else [3, 5, 9, 17, 33]
    elif leading:
        # The batch of a larger tensor; dimension 0 of a matrix is rows, which should not fit one block.
        wanted = [*LEADING_SIZES, *INNER_SIZES]
    else:
        wanted = [*INNER_SIZES]
    return [small for small in wanted if small < size]


class _Search:
    """Keeps what was found while groups are tried one after the other."""

    def __init__(self, forward: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.forward = forward
        self.args = args
        self.kwargs = kwargs
        self.plan: Plan = {}

    def with_size(self, group: list[_Place], size: int) -> Plan:
        plan = {path: dict(dims) for path, dims in self.plan.items()}
        for place in group:
            plan.setdefault(place.path, {})[str(place.dim)] = size
        return plan

    def outcome(self, plan: Plan) -> list[Any] | None:
        """Return the output shapes under ``plan``, or None when the forward does not take it."""
        args, kwargs = apply_plan(self.args, self.kwargs, plan)
        try:
            with torch.no_grad():
                return _shapes(self.forward(*args, **kwargs))
        except FORWARD_ERRORS:
            return None

    def shrink(self, group: list[_Place], size: int, sizes: list[int]) -> bool:
        """Try ``sizes`` for ``group``; keep the first that runs and is confirmed by a second size."""
        for index, small in enumerate(sizes):
            first = self.outcome(self.with_size(group, small))
            if first is None:
                continue
            for other in [*sizes[index + 1 :], *sizes[:index], size]:
                second = self.outcome(self.with_size(group, other))
                if second is None:
                    continue
                if _follows(first, second, (small, other)):
                    self.plan = self.with_size(group, small)
                    return True
                break
        return False

    def input_elements(self) -> int:
        args, kwargs = self.args, self.kwargs
        total = 0
        for path, tensor in [*structure.tensors(args, "args"), *structure.tensors(kwargs, "kwargs")]:
            dims = self.plan.get(path, {})
            count = 1
            for dim, size in enumerate(tensor.shape):
                count *= min(size, dims.get(str(dim), size))
            total += count
        return total


def reduce_plan(
    call_forward: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    budget_elements: int,
    *,
    aligned: bool = False,
    compiled: bool = False,
) -> Plan:
    """Find sizes at which the inputs hold at most ``budget_elements`` elements, or as near to it as the module lets.

    Args:
        call_forward: runs the reference on ``(*args, **kwargs)`` and returns its output; it must restore any state that
            it changes. It is called under ``no_grad``, at most some dozen times, always with narrowed inputs first.
        args: full-size positional arguments on the device to try on (CPU, or meta).
        kwargs: full-size keyword arguments.
        budget_elements: limit for the sum of elements over all tensor arguments.
        aligned: keep each size's power-of-two factor (up to 128), for candidates that are written for the user's
            exact shapes; otherwise odd sizes are preferred, so that block masks are exercised.
        compiled: prefer sizes at which kernels need not be compiled again where the full size is a multiple of 16.

    Returns:
        Argument path -> dimension -> size; empty when nothing has to, or may, shrink.
    """
    search = _Search(call_forward, args, kwargs)
    leaves = [*structure.tensors(args, "args"), *structure.tensors(kwargs, "kwargs")]
    sizes = {path: tensor.shape for path, tensor in leaves}
    for group in _groups(leaves):
        if search.input_elements() <= budget_elements:
            break
        size = sizes[group[0].path][group[0].dim]
        settled: set[_Place] = set()
        for part in _parts(group):
            if settled.intersection(part):
                continue
            if search.shrink(part, size, _sizes(part, sizes, aligned, compiled)):
                settled.update(part)
            if len(settled) == len(group):
                break
    return search.plan
