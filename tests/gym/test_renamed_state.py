"""State and gradients that cannot be compared by name are compared by value, or by norm."""

from __future__ import annotations

import pytest
import torch

from drk.gym.compare import compare_leaf
from drk.gym.renamed_state import is_renamed, renamed_cells
from drk.gym.schema import Cell

WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
BIAS = torch.randn(6, generator=torch.Generator().manual_seed(2))
MEAN = torch.randn(8, generator=torch.Generator().manual_seed(3))
NATIVE = {"out": BIAS, "grad:param.linear.weight": WEIGHT, "grad:param.linear.bias": BIAS, "state:bn.mean": MEAN}
TRUTH = {name: leaf.double() for name, leaf in NATIVE.items()}


def judged(mine: dict[str, torch.Tensor]) -> dict[str, bool]:
    def compare(name: str, like: str) -> Cell:
        return compare_leaf(like, mine[name], TRUTH[like], NATIVE[like])

    return {cell.name: cell.passed for cell in renamed_cells("t", mine, NATIVE, TRUTH, compare)}


@pytest.mark.parametrize(
    ("gradients", "passed"),
    [
        ({"grad:param.packed": WEIGHT.t(), "grad:param.b": BIAS}, True),
        ({"grad:param.both": torch.cat([WEIGHT.flatten(), BIAS, torch.zeros(7)])}, True),
        ({"grad:param.packed": WEIGHT.t() * 1.01, "grad:param.b": BIAS}, False),
        ({"grad:param.packed": WEIGHT.t()}, False),
        ({"grad:param.packed": WEIGHT.t() * float("nan"), "grad:param.b": BIAS}, False),
        ({}, False),
        # by name where the name is there, the rest by norm
        ({"grad:param.linear.bias": BIAS, "grad:param.packed": WEIGHT.t()}, True),
        # the name is there, and another shape
        ({"grad:param.linear.bias": BIAS, "grad:param.linear.weight": WEIGHT.t()}, True),
    ],
)
def test_gradients_under_other_names(gradients: dict[str, torch.Tensor], passed: bool) -> None:
    assert judged({**gradients, "state:mean": MEAN}) == {"t grad:params": passed}


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ({"state:mean": MEAN}, {}),
        ({"state:bn.mean": MEAN * 2}, {}),  # of the same name: compared elsewhere
        ({"state:mean": MEAN * 2, "state:other": MEAN[:4]}, {"t state:bn.mean": False}),
        ({}, {"t state:bn.mean": False}),
    ],
)
def test_state_under_other_names(state: dict[str, torch.Tensor], found: dict[str, bool]) -> None:
    gradients = {name: leaf for name, leaf in NATIVE.items() if name.startswith("grad")}
    assert judged({**gradients, **state}) == found


def test_what_is_shown_in_part_has_no_norm() -> None:
    mine = {"state:bn.mean": MEAN, "grad:param.w": WEIGHT[:2], "grad:param.w~shape": torch.tensor([6, 4])}
    assert judged(mine) == {}
    assert is_renamed("grad:param.linear.bias", mine, NATIVE)
    assert not is_renamed("out", {}, NATIVE)
