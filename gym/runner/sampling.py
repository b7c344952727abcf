"""What the Judge sees of a large tensor: some whole rows, and a digest of every block.

Copying outputs of gigabytes out of a Runner five times over would cost more than everything else, and would not fit a
smaller card's memory together with their float64 truth. A leaf above a size is therefore shown as three leaves:

=========== =============================================================================================
``out``     rows chosen by the Judge's secret seed, first and last ones always among them
``out~all`` for every block of 4096 elements two sums under secret random signs, in float64
``out~shape`` the whole tensor's shape
=========== =============================================================================================

The sums are random projections (Johnson-Lindenstrauss): the difference of two tensors' sums over a block has the
variance of their squared distance there, so that a tile that was left out, or rounding that is too coarse, shows in
them wherever it is, while what travels is 2/4096 of the tensor. Integer tensors get no digest. Values that are not
finite count as zero in the digest; where they stand among the chosen rows is compared there.

Honest limit: the largest single error outside the chosen rows is only seen as far as it shows in its block's sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BLOCK = 4096
SUMS = 2
SLICE_ELEMENTS = 2**24
MIN_ROW = 32
MAX_ROW = 2**13
EDGE_ROWS = 2
DIGEST = "~all"
SHAPE = "~shape"

Named = list[tuple[str, torch.Tensor]]


def shrink(named: Named, sample: dict[str, Any] | None) -> Named:
    """Replace each tensor of more than ``sample["above"]`` elements by rows, digest and shape; copy none of the others.

    Args:
        named: leaves with their names.
        sample: ``seed`` (the Judge's secret), ``above`` and ``elements`` (of the chosen rows); None changes nothing.
    """
    if sample is None:
        return named
    shown: Named = []
    for name, tensor in named:
        if tensor.numel() <= int(sample["above"]):
            shown.append((name, tensor))
            continue
        with torch.no_grad():
            flat = tensor.detach().reshape(-1)
            shown.append((name, chosen_rows(flat, tensor.shape, int(sample["seed"]), int(sample["elements"]))))
            if tensor.is_floating_point() or tensor.is_complex():
                shown.append((name + DIGEST, digest(flat, int(sample["seed"]))))
            shown.append((name + SHAPE, torch.tensor(tensor.shape, dtype=torch.int64)))
    return shown


def chosen_rows(flat: torch.Tensor, shape: torch.Size, seed: int, elements: int) -> torch.Tensor:
    """Return some rows of a tensor of ``shape`` that was flattened to ``flat``; shape (rows, row length)."""
    width = int(shape[-1]) if shape and MIN_ROW <= shape[-1] <= MAX_ROW else min(BLOCK, flat.numel())
    rows = flat[: flat.numel() // width * width].reshape(-1, width)
    count = min(max(elements // width, 2 * EDGE_ROWS), len(rows))
    generator = torch.Generator("cpu").manual_seed(seed & 0x7FFFFFFF)
    drawn = torch.randint(len(rows), (count,), generator=generator, device="cpu")
    ends = torch.arange(EDGE_ROWS)
    edges = torch.cat([ends, ends + len(rows) - EDGE_ROWS]).clamp(0, len(rows) - 1)
    # Another count of rows in another process would only mean another shape, which is compared.
    return rows[torch.cat([edges, drawn]).sort().values.to(flat.device)]


def digest(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """Return two signed sums of every block, in float64; shape (blocks / 16, 32), filled up with zeros."""
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    generator = torch.Generator("cpu").manual_seed((seed >> 31) & 0x7FFFFFFF)
    signs = torch.randint(2, (BLOCK, SUMS), generator=generator, device="cpu").double().mul_(2).sub_(1).to(flat.device)
    sums = []
    for start in range(0, flat.numel(), SLICE_ELEMENTS):
        part = flat[start : start + SLICE_ELEMENTS].double()
        part = torch.where(torch.isfinite(part), part, torch.zeros_like(part))
        part = torch.nn.functional.pad(part, (0, -part.numel() % BLOCK))
        sums.append((part.reshape(-1, BLOCK) @ signs).reshape(-1))
    whole = torch.cat(sums)
    # Rows of 32 share one scale when errors are judged: magnitudes may differ from place to place.
    return torch.nn.functional.pad(whole, (0, -whole.numel() % MIN_ROW)).reshape(-1, MIN_ROW)


def shape_in(leaves: Mapping[str, torch.Tensor], leaf: str) -> tuple[int, ...]:
    """Return a leaf's whole shape, also where only rows of it are shown."""
    whole = leaves.get(leaf + SHAPE)
    if whole is None:
        return tuple(leaves[leaf].shape)
    return tuple(whole.reshape(-1).tolist()) if whole.dtype == torch.int64 else ()


def is_shown(name: str) -> bool:
    """Whether a leaf is a tensor that was returned, rather than what tells of one."""
    return not name.endswith((DIGEST, SHAPE))


def fingerprint(tensor: torch.Tensor, above: int) -> torch.Tensor:
    """Return what tells whether a tensor was changed: a copy, or for a large one its digest."""
    plain = tensor.detach()
    if plain.numel() <= above:
        return plain.clone()
    return digest(plain.reshape(-1), 0x5DEECE66D)
