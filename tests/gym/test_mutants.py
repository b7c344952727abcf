"""Mutants: ordinary outputs reject all of them, insensitive modules are found out."""

from __future__ import annotations

import torch

from drk.gym.mutants import MUTANTS, passing_mutants


def draw(seed: int = 0) -> torch.Tensor:
    return torch.randn(64, 128, generator=torch.Generator().manual_seed(seed))


def outputs(value: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"out": value}, {"out": value.double()}


def test_ordinary_outputs_tell_all_mutants() -> None:
    assert passing_mutants(*outputs(draw()), {"out": draw(1)}) == []


def test_constant_output_is_insensitive() -> None:
    found = passing_mutants(*outputs(torch.full((8, 8), 3.0)), {"out": torch.full((8, 8), 3.0)})
    assert set(found) == {"mean", "shuffled rows", "previous output"}


def test_zero_output_is_insensitive() -> None:
    assert "zeros" in passing_mutants(*outputs(torch.zeros(8, 8)))


def test_every_mutant_keeps_the_form() -> None:
    for change in MUTANTS.values():
        for value in (draw(), draw()[0, :1], draw()[0, 0], draw().bfloat16()):
            assert change(value).shape == value.shape and change(value).dtype == value.dtype


def test_integers_alone_are_not_judged() -> None:
    native = {"out": torch.arange(8)}
    assert passing_mutants(native, native) == []
