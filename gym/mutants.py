"""Can the drawn inputs tell right from wrong? Wrong outputs that every trial must be able to reject (DESIGN 4.4).

Before a candidate is judged, mutants of the reference's own output are compared as a candidate's would be. One that
passes means that these inputs (or this module) cannot tell: the keys are drawn again, and if that does not help the
user hears that the module is insensitive, which is a finding about the module, not about a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from drk.gym.compare import compare_named

Mutant = Callable[[torch.Tensor], torch.Tensor]


def _drop_tail(value: torch.Tensor) -> torch.Tensor:
    flat = value.flatten().clone()
    flat[-max(flat.numel() // 8, 1) :] = 0
    return flat.reshape(value.shape)


def _shuffle_rows(value: torch.Tensor) -> torch.Tensor:
    return value.roll(1, 0) if value.dim() and value.shape[0] > 1 else torch.zeros_like(value)


MUTANTS: dict[str, Mutant] = {
    "zeros": torch.zeros_like,
    "mean": lambda value: value.double().mean().to(value.dtype).expand_as(value).clone(),
    "shuffled rows": _shuffle_rows,
    "dropped tail": _drop_tail,
    "missing scale": lambda value: value * 1.05,
}


def passing_mutants(
    native: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], previous: dict[str, torch.Tensor] | None = None
) -> list[str]:
    """Return the names of the mutants that these outputs cannot reject.

    A mutant counts only when it passes on every floating output at once, as a candidate has to. ``previous`` are the
    outputs of another trial: an answer from the past must not pass either.
    """
    leaves = [name for name, leaf in native.items() if name.startswith("out") and leaf.is_floating_point()]
    leaves = [name for name in leaves if native[name].numel()]
    if not leaves:
        return []
    found = []
    for mutant, change in MUTANTS.items():
        changed = {**native, **{name: change(native[name]) for name in leaves}}
        if all(compare_named(name, name, changed, truth, native).passed for name in leaves):
            found.append(mutant)
    if previous is not None and all(
        previous[name].shape == native[name].shape and compare_named(name, name, previous, truth, native).passed
        for name in leaves
        if name in previous
    ):
        found.append("previous output")
    return found
