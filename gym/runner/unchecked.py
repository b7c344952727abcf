"""What is set aside for the time of a capture: looks at values, function modes, parameters' wish for gradients.

A graph has no place for ``if torch.any(var < 0): raise``, so that a module which calls such a function could not be
captured. What is computed is the same.

Honest limit: a captured module does not refuse what the original would have refused for its values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributions import Distribution


def gaussian_nll_loss(
    input: torch.Tensor,  # noqa: A002 - the name by which it is called
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """``torch.nn.functional.gaussian_nll_loss`` but for the refusal of negative variances.

    Raises:
        ValueError: the variances' shape does not fit, or the reduction is unknown, as there.
    """
    if not isinstance(var, torch.Tensor):
        var = var * torch.ones_like(input)
    if var.shape != input.shape:
        if input.shape[:-1] == var.shape:
            var = var.unsqueeze(-1)
        elif input.shape[:-1] != var.shape[:-1] or var.shape[-1] != 1:
            raise ValueError("var is of incorrect size")
    if reduction not in {"none", "mean", "sum"}:
        raise ValueError(f"{reduction} is not valid")
    bounded = var.clamp(min=eps)
    loss = 0.5 * (torch.log(bounded) + (input - target) ** 2 / bounded)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@contextlib.contextmanager
def without_looks() -> Iterator[None]:
    """Have modules call these functions while this lasts, and distributions take arguments and samples as they are."""
    original, checking = F.gaussian_nll_loss, Distribution._validate_args
    F.gaussian_nll_loss = gaussian_nll_loss  # type: ignore[assignment]
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        F.gaussian_nll_loss = original
        Distribution.set_default_validate_args(checking)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Set aside the function modes of this thread: some decompositions trip over tensors that claim to be elsewhere."""
    overrides: Any = torch.overrides
    modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


@contextlib.contextmanager
def without_gradients(module: torch.nn.Module) -> Iterator[None]:
    """Let no parameter ask for gradients: autograd ends the process on tensors that claim a device torch lacks."""
    asking = [one for one in module.parameters() if one.requires_grad]
    try:
        for one in asking:
            one.requires_grad_(False)
        yield
    finally:
        for one in asking:
            one.requires_grad_(True)
