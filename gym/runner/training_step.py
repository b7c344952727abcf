"""Forward and backward pass as one call, for tasks whose gradients are judged: what timing and profiling then run.

Cotangents are drawn on the device from a key before the window, so that drawing them is not timed and both Runners use
equal ones. Gradients are returned rather than accumulated: nothing of one call is left for the next.

Left out: the optimiser's step, which is the same for every candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drk.gym.runner import structure


@dataclass(frozen=True)
class Stepped:
    """What one call gave: its value without a graph, and the named gradients of inputs and parameters."""

    value: Any
    gradients: list[tuple[str, torch.Tensor]]


class TrainingStep:
    """Calls ``forward``, then takes the gradients of its floating inputs and of ``module``'s parameters."""

    def __init__(self, forward: Callable[..., Any], module: torch.nn.Module) -> None:
        self.forward = forward
        self.module = module
        self.like: list[torch.Tensor] = []
        self.cotangents: list[list[torch.Tensor]] = []
        self.calls = 0

    def draw(self, keys: Sequence[int]) -> None:
        """Draw cotangents for each of the coming calls, for outputs like those of the call before."""
        self.calls = 0
        self.cotangents = [self._drawn(key) for key in keys]

    def __call__(self, *args: Any, **kwargs: Any) -> Stepped:
        """Run both passes; gradient mode and autocast are the caller's."""
        value = self.forward(*args, **kwargs)
        outputs = [tensor for _, tensor in structure.tensors(value) if tensor.requires_grad]
        named = [(f"grad:input{path}", one) for path, one in structure.tensors((args, kwargs)) if one.requires_grad]
        named += [(f"grad:param.{key}", one) for key, one in self.module.named_parameters() if one.requires_grad]
        gradients: list[tuple[str, torch.Tensor]] = []
        if outputs and named:
            if [one.shape for one in outputs] != [one.shape for one in self.like]:
                self.like = [one.detach() for one in outputs]
                self.draw([0])
            cotangents = self.cotangents[self.calls % len(self.cotangents)]
            self.calls += 1
            found = torch.autograd.grad(outputs, [one for _, one in named], cotangents, allow_unused=True)
            gradients = [(name, one) for (name, _), one in zip(named, found, strict=True) if one is not None]
        return Stepped(structure.map_tensors(lambda _path, tensor: tensor.detach(), value), gradients)

    def _drawn(self, key: int) -> list[torch.Tensor]:
        device = self.like[0].device if self.like else torch.device("cpu")
        generator = torch.Generator(device).manual_seed((key ^ 0x5DEECE66D) & 0x7FFFFFFF)
        return [torch.randn(one.shape, generator=generator, device=device).to(one.dtype) for one in self.like]
