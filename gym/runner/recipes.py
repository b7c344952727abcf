"""How a trial's inputs and weights differ from a plain draw: the recipes that deceptions do not expect.

========= ===========================================================================================
perturb   some elements of each floating input trade places: sums, ends and most probes stay the same
in_place  the values go into the tensors of the last call, which keep identity, address and version
weights   floating parameters are multiplied in place, as an optimizer step would change them
stress    signed floating inputs get a heavy tail, or an offset (see :func:`drk.gym.runner.values.stress`)
strided   floating inputs become views with gaps and an odd offset
========= ===========================================================================================

Reference and candidate follow the same recipe from the same key, so both see the same bits. Inputs that are never
negative are left alone by ``stress``: they may be probabilities or stand under a logarithm.
"""

from __future__ import annotations

from typing import Any

import torch

from drk.gym.runner import structure, values

PERTURBED_ELEMENTS = 4
PADDING = 3
Inputs = tuple[list[Any], dict[str, Any]]


def apply_recipe(recipe: dict[str, Any], inputs: Inputs, last: Inputs) -> Inputs:
    """Return ``inputs`` changed as ``recipe`` says; ``last`` are the tensors of the call before."""
    if recipe.get("perturb") is not None:
        inputs = perturbed(inputs, int(recipe["perturb"]))
    if recipe.get("stress"):
        inputs = stressed(inputs, recipe["stress"], int(recipe.get("key", 0)))
    if recipe.get("strided"):
        inputs = strided(inputs)
    return into_tensors_of(last, inputs) if recipe.get("in_place") else inputs


def _mapped(inputs: Inputs, change: Any) -> Inputs:
    args, kwargs = structure.map_tensors(change, inputs)
    return list(args), dict(kwargs)


def perturbed(inputs: Inputs, key: int) -> Inputs:
    """Let a few random elements of each floating input trade places."""

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.numel() < 4:
            return tensor
        generator = torch.Generator("cpu").manual_seed(values.sub_key(key, path) & 0x7FFFFFFF)
        count = min(PERTURBED_ELEMENTS, tensor.numel())
        # Few enough that a fingerprint of every n-th element misses them; the output shows them all the same.
        drawn = torch.randint(tensor.numel(), (4 * count,), generator=generator, device="cpu").tolist()
        chosen = torch.tensor(list(dict.fromkeys(drawn))[:count], device=tensor.device)
        flat = tensor.detach().flatten().clone()
        flat[chosen] = flat[chosen.roll(1)]
        return flat.reshape(tensor.shape).requires_grad_(tensor.requires_grad)

    return _mapped(inputs, change)


def stressed(inputs: Inputs, transform: dict[str, Any], key: int) -> Inputs:
    """Apply a stress transform to the signed floating inputs."""
    changed = values.stress(list(inputs[0]), dict(inputs[1]), transform, key)
    fresh = dict(structure.tensors(changed))

    def choose(path: str, tensor: torch.Tensor) -> torch.Tensor:
        signed = tensor.is_floating_point() and tensor.numel() > 0 and bool((tensor.detach() < 0).any())
        return fresh[path] if signed else tensor

    return _mapped(inputs, choose)


def strided(inputs: Inputs) -> Inputs:
    """Put each floating input into storage with gaps between rows and an odd offset."""

    def change(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dim() == 0 or not tensor.numel():
            return tensor
        wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + PADDING))
        view = wide.narrow(-1, 1, tensor.shape[-1])
        with torch.no_grad():
            view.copy_(tensor)
        return view.detach().requires_grad_(tensor.requires_grad)

    return _mapped(inputs, change)


def into_tensors_of(old: Inputs, new: Inputs) -> Inputs:
    """Write new values into the very tensors of the last call, past their version counters."""
    before = dict(structure.tensors(old))

    def place(path: str, tensor: torch.Tensor) -> torch.Tensor:
        target = before.get(path)
        if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype or target.requires_grad:
            return tensor
        target.data.copy_(tensor.detach())
        return target

    return _mapped(new, place)


def scale_weights(module: torch.nn.Module, factor: float) -> None:
    """Multiply every floating parameter in place, visibly to version counters."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.mul_(factor)
