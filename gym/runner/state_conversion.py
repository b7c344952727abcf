"""Reads a pickled state dict (``.pt``, ``.pth``, ``.bin``) inside a sandboxed Runner, with ``weights_only=True``.

Trusted processes never unpickle; they get the tensors through shared memory, as any other result of a Runner. Common
wrappings are opened: a dict that holds the state dict under ``state_dict``, ``model_state_dict``, ``model`` or
``module`` beside epochs and optimizer state. Tensors come out contiguous, strided and on the CPU.

Left out: files that hold a whole pickled module (they need its class; build it and save ``model.state_dict()``), sparse
and quantised tensors.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drk.gym.runner.failures import LoadFailure

WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
ADVICE = "save the weights with safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"


def _failure(message: str, name: str) -> LoadFailure:
    return LoadFailure("load", "state-dict", message, file=name, help=ADVICE)


def _tensors_of(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapping with text keys; empty when it holds anything else but tensors."""
    if not isinstance(value, Mapping) or not value:
        return {}
    if not all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items()):
        return {}
    return dict(value)


def read_pickled_state(path: Path) -> list[tuple[str, torch.Tensor]]:
    """Return keys and tensors of the state dict in the file at ``path``.

    Raises:
        LoadFailure: kind ``state-dict``: unreadable, holds more than tensors, or no state dict was found in it.
    """
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _failure(f"{path.name} cannot be read as a state dict: {first[:300]}", path.name) from error
    found = _tensors_of(loaded)
    if not found and isinstance(loaded, Mapping):
        found = next(filter(None, (_tensors_of(loaded.get(name)) for name in WRAPPERS)), {})
    if not found:
        raise _failure(f"{path.name} holds no state dict (a dict of tensors)", path.name)
    odd = [key for key, tensor in found.items() if tensor.layout != torch.strided or tensor.is_quantized]
    if odd:
        raise _failure(f"{path.name}: {odd[0]} is no plain dense tensor", path.name)
    return [(key, tensor.detach().contiguous()) for key, tensor in found.items()]
