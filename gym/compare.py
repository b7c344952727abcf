"""Is an output right? Errors against float64 truth, scaled by local magnitude, judged by the reference's own error.

For one output leaf let T be the truth (the user's module in float64), R what the user's module returns in its own
dtype, and C what the candidate returns. Errors are divided by the RMS of the truth in the same block (a row of the last
dimension, or a larger run of elements where rows are short), so that small rows count as much as large ones. Then

    rms(C) <= max(k_rms * rms(R), floor_rms)   and   max(C) <= max(k_max * max(R), floor_max)

must hold, where the floors are a few units of round-off of the output dtype (an exact reference must not demand an
exact candidate), or 2.5 units of TF32 where the reference's convolutions run in it by the user's own flags. NaN and
infinities are allowed only where the truth or the reference has them. Integers and bools must equal the reference or
the truth. ``paper`` tolerance instead applies KernelBench's ``allclose`` rule (atol = rtol).

Everything here runs in the Judge on memory of its own. Work is done in slices of bounded size. See notes in
docs/architecture.md for how the constants were chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from drk.gym.runner.sampling import DIGEST, shape_in
from drk.gym.schema import Cell

K_RMS = 2.5
K_MAX = 6.0
TRUNCATED_UNITS = 2.5
"""What a product of two truncated operands errs by, in units of round-off, and some more (1.6 by simulation)."""
PAPER_TOLERANCE = 1e-2
MIN_BLOCK = 32
SLICE_ELEMENTS = 2**24
_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-9,
}
_FLOOR_RMS = {torch.float64: 64.0, torch.float32: 8.0, torch.float16: 1.0, torch.bfloat16: 1.0}
_FLOOR_MAX = {torch.float64: 512.0, torch.float32: 64.0, torch.float16: 8.0, torch.bfloat16: 8.0}


@dataclass(frozen=True)
class ErrorStats:
    """Scaled errors of one leaf: root mean square, maximum, and the worst block's RMS; ``bad`` counts stray NaN/Inf."""

    rms: float
    max: float
    worst_block_rms: float
    bad: int


def block_size(shape: torch.Size) -> int:
    """Return how many consecutive elements share one scale: the last dimension, or more where it is short."""
    size = 1
    for extent in reversed(shape):
        size *= extent
        if size >= MIN_BLOCK:
            break
    return max(size, 1)


def _slices(count: int, block: int) -> Iterator[tuple[int, int]]:
    step = max(SLICE_ELEMENTS // block, 1) * block
    for start in range(0, count, step):
        yield start, min(start + step, count)


def error_stats(value: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor | None = None) -> ErrorStats:
    """Return the scaled errors of ``value`` against ``truth`` (same shape).

    ``allowed`` is the reference's output: where it is not finite, ``value`` may be anything that the reference is.
    Complex tensors are compared as pairs of reals.
    """
    if value.is_complex():
        value, truth = torch.view_as_real(value), torch.view_as_real(truth)
        allowed = None if allowed is None else torch.view_as_real(allowed)
    block = block_size(truth.shape)
    flat, exact = value.reshape(-1), truth.reshape(-1)
    other = None if allowed is None else allowed.reshape(-1)
    scale_all = _global_rms(exact)
    square_sum, worst, worst_block, bad = 0.0, 0.0, 0.0, 0
    for start, stop in _slices(exact.numel(), block):
        part = _slice_stats(
            flat[start:stop].double(),
            exact[start:stop].double(),
            None if other is None else other[start:stop].double(),
            block,
            scale_all,
        )
        square_sum += part[0]
        worst, worst_block, bad = max(worst, part[1]), max(worst_block, part[2]), bad + int(part[3])
    count = max(exact.numel(), 1)
    return ErrorStats((square_sum / count) ** 0.5, worst, worst_block, bad)


def _global_rms(exact: torch.Tensor) -> float:
    total, count = 0.0, 0
    for start, stop in _slices(exact.numel(), 1):
        part = exact[start:stop].double()
        finite = torch.isfinite(part)
        total += float((torch.where(finite, part, 0.0) ** 2).sum())
        count += int(finite.sum())
    return (total / count) ** 0.5 if count else 0.0


def _slice_stats(
    value: torch.Tensor, exact: torch.Tensor, other: torch.Tensor | None, block: int, scale_all: float
) -> tuple[float, float, float, int]:
    comparable = torch.isfinite(exact) & torch.isfinite(value)
    same = (value == exact) | (torch.isnan(value) & torch.isnan(exact))
    if other is not None:
        same |= (value == other) | (torch.isnan(value) & torch.isnan(other))
    bad = int((~comparable & ~same).sum())
    usable = comparable & torch.isfinite(exact)
    magnitude = torch.where(torch.isfinite(exact), exact, 0.0).reshape(-1, block)
    # A block of zeros in a large output must not make round-off look infinite, hence the global share.
    scale = (magnitude.square().mean(1, keepdim=True) + (1e-3 * scale_all) ** 2).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    error = (torch.where(usable, value - exact, 0.0).reshape(-1, block) / scale).abs()
    squares = error.square()
    return float(squares.sum()), float(error.max()), float(squares.mean(1).max().sqrt()), bad


@dataclass(frozen=True)
class Limit:
    """What a leaf of this dtype may err by, given the reference's own errors."""

    rms: float
    max: float


def limit_for(reference: ErrorStats, dtype: torch.dtype, own_unit: float = 0.0) -> Limit:
    """Return the limits for a candidate whose reference errs by ``reference`` in an output of ``dtype``.

    ``own_unit`` is the unit of round-off of the products inside the reference where that is coarser than its outputs'.
    Averages of many such products (a pooled output, a running mean) err much less than one unit by chance, and by
    about one unit with a library kernel that truncates instead of rounding, as cuDNN's for channels-last do. Triton's
    ``tl.dot`` truncates both operands: in TF32 7.7e-4 where rounding gives 2.9e-4 and bfloat16 2.4e-3.
    """
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    unit = _ROUNDOFF.get(real, 2.0**-9)
    return Limit(
        rms=max(K_RMS * reference.rms, _FLOOR_RMS.get(real, 1.0) * unit, TRUNCATED_UNITS * own_unit),
        max=max(K_MAX * reference.max, _FLOOR_MAX.get(real, 8.0) * unit, K_MAX * TRUNCATED_UNITS * own_unit),
    )


def compare_float(
    name: str,
    value: torch.Tensor,
    truth: torch.Tensor,
    reference: torch.Tensor,
    dtype: torch.dtype | None = None,
    own_unit: float = 0.0,
) -> Cell:
    """Judge one floating leaf by the float64 rule; ``dtype`` is that of the output where the leaf is a digest of it."""
    own = error_stats(reference, truth, reference)
    mine = error_stats(value, truth, reference)
    limit = limit_for(own, dtype or reference.dtype, own_unit)
    reason = ""
    if mine.bad:
        reason = f"{mine.bad} elements are NaN or infinite where the reference is not (or the other way round)"
    elif mine.rms > limit.rms:
        reason = f"RMS error {mine.rms:.3g} exceeds {limit.rms:.3g} (the reference's own is {own.rms:.3g})"
    elif mine.max > limit.max:
        reason = f"largest error {mine.max:.3g} exceeds {limit.max:.3g} (the reference's own is {own.max:.3g})"
    return Cell(
        name=name,
        passed=not reason,
        reason=reason,
        rms=mine.rms,
        max=mine.max,
        reference_rms=own.rms,
        reference_max=own.max,
        rms_limit=limit.rms,
        max_limit=limit.max,
    )


def compare_exact(name: str, value: torch.Tensor, truth: torch.Tensor, reference: torch.Tensor) -> Cell:
    """Judge an integer or boolean leaf: every element equals the reference's or the truth's (ties in an argmax)."""
    wrong = int(((value != reference) & (value != truth)).sum())
    reason = f"{wrong} of {value.numel()} elements differ" if wrong else ""
    return Cell(name=name, passed=not wrong, reason=reason)


def compare_paper(name: str, value: torch.Tensor, reference: torch.Tensor, tolerance: float = PAPER_TOLERANCE) -> Cell:
    """Judge a leaf by KernelBench's published rule: ``allclose`` with atol = rtol = ``tolerance``."""
    passed = bool(torch.allclose(value.double(), reference.double(), atol=tolerance, rtol=tolerance, equal_nan=True))
    return Cell(name=name, passed=passed, reason="" if passed else f"not allclose at atol = rtol = {tolerance:g}")


def compare_leaf(
    name: str,
    value: torch.Tensor,
    truth: torch.Tensor,
    reference: torch.Tensor,
    *,
    paper: bool = False,
    own_unit: float = 0.0,
) -> Cell:
    """Judge one leaf: shape and dtype first, then values.

    Args:
        name: the cell's name, for the verdict.
        value: the candidate's output.
        truth: the module's output in float64 (integers and bools as they are).
        reference: the user's module's output in its own dtype.
        paper: use KernelBench's fixed tolerance instead.
        own_unit: see :func:`limit_for`.
    """
    if value.shape != reference.shape:
        return Cell(name, passed=False, reason=f"shape {tuple(value.shape)} instead of {tuple(reference.shape)}")
    if value.dtype != reference.dtype:
        return Cell(name, passed=False, reason=f"dtype {value.dtype} instead of {reference.dtype}")
    if not reference.numel():
        return Cell(name, passed=True)
    if paper:
        return compare_paper(name, value, reference)
    if reference.is_floating_point() or reference.is_complex():
        return compare_float(name, value, truth, reference, own_unit=own_unit)
    return compare_exact(name, value, truth, reference)


def compare_named(
    cell: str,
    leaf: str,
    leaves: Mapping[str, torch.Tensor],
    truth: Mapping[str, torch.Tensor],
    native: Mapping[str, torch.Tensor],
    *,
    paper: bool = False,
    own_unit: float = 0.0,
) -> Cell:
    """Judge the leaf of that name, which may be rows of a large tensor, or a digest of one."""
    shown = leaf.removesuffix(DIGEST)
    if leaf == shown:
        mine, theirs = shape_in(leaves, leaf), shape_in(native, leaf)
        if mine != theirs:
            return Cell(cell, passed=False, reason=f"shape {mine} instead of {theirs}")
        return compare_leaf(cell, leaves[leaf], truth[leaf], native[leaf], paper=paper, own_unit=own_unit)
    if leaves[leaf].shape != native[leaf].shape or leaves[leaf].dtype != native[leaf].dtype:
        return Cell(cell, passed=False, reason=f"{shown} has another shape")
    if paper:
        return Cell(cell, passed=True)  # the published rule speaks of elements
    return compare_float(cell, leaves[leaf], truth[leaf], native[leaf], native[shown].dtype, own_unit)


def compare_timed(name: str, value: torch.Tensor | None, reference: torch.Tensor, like: Cell | None) -> Cell:
    """Judge an output of a timed run against the reference's on the same inputs, without a new float64 truth.

    By the triangle inequality the two may differ by what the candidate is allowed plus what the reference errs by;
    ``like`` is the same leaf's cell from the correctness trials. Without one, integers must be equal.
    """
    if value is None or value.shape != reference.shape or value.dtype != reference.dtype:
        return Cell(name, passed=False, reason="a timed run returned something of another form")
    if like is None or like.rms_limit is None or like.max_limit is None:
        different = int((value != reference).sum())
        return Cell(name, passed=not different, reason=f"{different} elements differ" if different else "")
    found = error_stats(value, reference.double(), reference)
    rms_limit, max_limit = like.rms_limit + (like.reference_rms or 0.0), like.max_limit + (like.reference_max or 0.0)
    # One draw's errors vary around the trials' errors, hence the factor.
    passed = not found.bad and found.rms <= 1.5 * rms_limit and found.max <= 2.0 * max_limit
    reason = "" if passed else f"a timed run's output is off by {found.rms:.3g} RMS; {1.5 * rms_limit:.3g} is allowed"
    return Cell(name, passed, reason, rms=found.rms, max=found.max, rms_limit=rms_limit, max_limit=max_limit)
