"""Both passes of autograd functions where autograd cannot run: while kernels are compiled for a GPU that is not there.

Autograd needs a device that exists. Here ``Function.apply`` calls ``forward`` and then ``backward`` itself, on zeros
like the results, so that a candidate's backward kernels are compiled as its forward ones are.

Left out: what autograd adds (views, versions, hooks); results are meaningless and are not looked at.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from drk.gym.runner.patching import replace_attribute


class Context:
    """What ``forward`` and ``backward`` of an autograd function share."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(one, torch.Tensor) and one.is_floating_point() for one in arguments)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for the backward pass."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_tensors: Any) -> None:
        """Nothing to note: every result gets a cotangent."""

    def mark_dirty(self, *_tensors: Any) -> None:
        """Nothing to note."""

    def set_materialize_grads(self, _value: bool) -> None:
        """Nothing to note."""


def _apply(cls: Any, *arguments: Any) -> Any:
    context = Context(arguments)
    if cls.setup_context is torch.autograd.Function.setup_context:
        result = cls.forward(context, *arguments)
    else:
        result = cls.forward(*arguments)
        cls.setup_context(context, arguments, result)
    results = result if isinstance(result, tuple) else (result,)
    cls.backward(context, *(torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for one in results))
    return result


def run_both_passes(stack: contextlib.ExitStack) -> None:
    """Let every autograd function run its backward pass right after its forward pass, until ``stack`` closes."""
    replace_attribute(stack, torch.autograd.Function, "apply", classmethod(_apply))
