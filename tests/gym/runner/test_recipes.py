"""Recipes: what each changes, and what it must leave alone."""

from __future__ import annotations

import torch

from drk.gym.runner import recipes


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_perturbing_moves_few_elements_and_keeps_the_multiset() -> None:
    x, mask = draw(64, 33), torch.ones(4, dtype=torch.bool)
    (moved, same_mask), _ = recipes.perturbed(([x, mask], {}), key=5)
    assert 0 < int((moved != x).sum()) <= recipes.PERTURBED_ELEMENTS
    assert torch.equal(moved.flatten().sort().values, x.flatten().sort().values)
    assert same_mask is mask
    (again, _), _ = recipes.perturbed(([x, mask], {}), key=5)
    assert torch.equal(again, moved)


def test_in_place_keeps_object_address_and_version() -> None:
    old, new = draw(8, 8), draw(8, 8, seed=1)
    version, address = old._version, old.data_ptr()
    (placed,), _ = recipes.into_tensors_of(([old], {}), ([new], {}))
    assert placed is old and old.data_ptr() == address and old._version == version
    assert torch.equal(old, new)


def test_in_place_takes_new_tensors_where_shapes_differ() -> None:
    new = draw(4, 4)
    (placed,), _ = recipes.into_tensors_of(([draw(8, 8)], {}), ([new], {}))
    assert placed is new


def test_stress_leaves_what_is_never_negative() -> None:
    signed, share = draw(64, 64), torch.rand(64, 64)
    (tailed, kept), _ = recipes.stressed(([signed, share], {}), {"kind": "offset", "value": 1000.0}, key=1)
    assert torch.equal(tailed, signed + 1000.0) and kept is share


def test_strided_views_hold_the_same_values() -> None:
    x, ids = draw(6, 10), torch.arange(4)
    (view, same_ids), kwargs = recipes.strided(([x, ids], {"y": draw(3)}))
    assert torch.equal(view, x) and not view.is_contiguous() and view.storage_offset() == 1
    assert same_ids is ids and kwargs["y"].stride() == (1,)


def test_weights_change_visibly() -> None:
    module = torch.nn.Linear(4, 4)
    before, version = module.weight.detach().clone(), module.weight._version
    recipes.scale_weights(module, 1.125)
    assert torch.equal(module.weight.detach(), before * 1.125) and module.weight._version > version


def test_recipes_compose() -> None:
    old, new = draw(8, 8), draw(8, 8, seed=1)
    (placed,), _ = recipes.apply_recipe({"perturb": 3, "in_place": True, "key": 1}, ([new], {}), ([old], {}))
    assert placed is old and not torch.equal(placed, new)
