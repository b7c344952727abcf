"""State and gradients of a candidate whose parameters bear other names, or have another form, than the reference's.

Such weights cannot be copied by name, and what a call leaves in them cannot be compared by name. It is judged all the
same, or a wrong backward pass and forgotten running statistics would go unseen:

- state that a call changes has to show, with the right values, in some state of the candidate of that shape;
- where gradients of parameters are lacking by name, the norm of all of them together has to be right. Transposing,
  joining, splitting or padding parameters leaves it as it is.

Limits: a norm says nothing of where in the parameters an error is; parameters folded into others (a scale into a
product) have gradients of another norm, and have to keep the reference's names in training. Tensors that are shown in
part only are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from drk.gym.runner.sampling import SHAPE
from drk.gym.schema import Cell

GRADIENT, STATE = "grad:param", "state:"
NORM_TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05
OWN_FACTOR = 10.0

Leaves = Mapping[str, torch.Tensor]
Compare = Callable[[str, str], Cell]


def is_renamed(leaf: str, mine: Leaves, native: Leaves) -> bool:
    """Whether a leaf is of the reference's state or parameters, and the candidate has none of that name and shape."""
    own = leaf.startswith((STATE, GRADIENT))
    return own and (leaf not in mine or mine[leaf].shape != native[leaf].shape)


def renamed_cells(prefix: str, mine: Leaves, native: Leaves, truth: Leaves, compare: Compare) -> list[Cell]:
    """Judge what ``mine`` lacks by name of the reference's state and gradients.

    Args:
        prefix: of the cells' names.
        mine: the candidate's leaves.
        native: the reference's leaves.
        truth: the same in float64.
        compare: judges the candidate's leaf of the first name as if it were the reference's of the second.
    """
    lacking = [leaf for leaf in native if is_renamed(leaf, mine, native)]
    cells = []
    for leaf in (leaf for leaf in lacking if leaf.startswith(STATE)):
        spare = [name for name in mine if name.startswith(STATE) and name not in native]
        alike = [name for name in spare if mine[name].shape == native[leaf].shape]
        if not any(compare(name, leaf).passed for name in alike):
            reason = "the call changes it, and no state of the candidate's shows that"
            cells.append(Cell(f"{prefix} {leaf}", passed=False, reason=reason))
    if any(leaf.startswith(GRADIENT) for leaf in lacking):
        cells += _norm_cell(prefix, mine, native, truth)
    return cells


def _norm_cell(prefix: str, mine: Leaves, native: Leaves, truth: Leaves) -> list[Cell]:
    parts = [{name: leaf for name, leaf in leaves.items() if name.startswith(GRADIENT)} for leaves in (mine, native)]
    if any(name.endswith(SHAPE) for part in parts for name in part):
        return []
    exact = _norm([truth[name] for name in parts[1]])
    own = abs(_norm(list(parts[1].values())) - exact)
    halves = any(leaf.dtype in (torch.float16, torch.bfloat16) for leaf in parts[1].values())
    allowed = max((HALF_TOLERANCE if halves else NORM_TOLERANCE) * exact, OWN_FACTOR * own)
    found = _norm(list(parts[0].values()))
    passed = (math.isfinite(found) and abs(found - exact) <= allowed) or not math.isfinite(exact)
    reason = "" if passed else f"its gradients have a norm of {found:.4g} all together, the reference's of {exact:.4g}"
    return [Cell(f"{prefix} {GRADIENT}s", passed=passed, reason=reason)]


def _norm(leaves: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(leaf.abs().double().square().sum()) for leaf in leaves))
