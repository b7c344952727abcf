"""Weights of a small model in one file of 8-bit integers: written by the trainer, read by the embedded proposer.

Scheme ``per-row symmetric``, version 1: a matrix of shape ``[rows, columns]`` is stored as int8 beside ``NAME.scale``
(float32, one a row); ``row = scale * integers`` with integers from -127 to 127. Vectors (norms) stay float32. An
embedding that is tied to the output is stored once. The file's metadata names scheme and version, and a file of another
one is refused. A folder with a plain ``model.safetensors`` is read as well, as training leaves it.

Honest limits: rows with one large outlier lose precision; activations are never quantised, so that this saves space
and not time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drk.assistant.llm.messages import ModelFault

if TYPE_CHECKING:
    import torch

INT8_FILE = "nano.safetensors"
PLAIN_FILE = "model.safetensors"
SCHEME = "per-row symmetric int8"
VERSION = "1"
SCALE = ".scale"
TIED = "lm_head.weight"


def quantized(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what is stored for ``tensors``: int8 and scales for matrices, float32 for the rest.

    Raises:
        ValueError: a value is not finite, or a name is one that the scheme uses itself.
    """
    import torch

    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        values = tensor.detach().to("cpu", torch.float32)
        if not torch.isfinite(values).all():
            raise ValueError(f"{name} holds values that are not finite")
        if name.endswith(SCALE):
            raise ValueError(f"{name} ends like the name of a scale")
        if values.dim() != 2:
            stored[name] = values.contiguous()
            continue
        scale = values.abs().amax(dim=1) / 127
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
        stored[name] = (values / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantized(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors that ``stored`` stands for; products are made in float32 and then rounded to ``dtype``.

    Raises:
        ValueError: an int8 tensor has no scales, or they do not fit.
    """
    import torch

    tensors = {}
    for name, values in stored.items():
        if name.endswith(SCALE):
            continue
        if values.dtype == torch.int8:
            scale = stored.get(name + SCALE)
            if scale is None or scale.shape != values.shape[:1]:
                raise ValueError(f"{name} has no scales that fit")
            tensors[name] = (values.to(torch.float32) * scale[:, None]).to(dtype)
        else:
            tensors[name] = values.to(dtype)
    return tensors


def write_int8(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> int:
    """Write ``tensors`` quantised to ``path`` and return the file's size in bytes; a tied output is left out.

    Raises:
        ValueError: see :func:`quantized`.
    """
    from safetensors.torch import save_file

    kept = {name: one for name, one in tensors.items() if not (name == TIED and config.get("tie_word_embeddings"))}
    metadata = {
        "scheme": SCHEME,
        "version": VERSION,
        "parameters": str(sum(one.numel() for one in kept.values())),
        "model_type": str(config.get("model_type", "")),
    }
    save_file(quantized(kept), path, metadata)
    return path.stat().st_size


def weights_file(folder: Path) -> Path | None:
    """Return the file of weights in ``folder``, the quantised one first; null where there is none."""
    for name in (INT8_FILE, PLAIN_FILE):
        if (folder / name).is_file():
            return folder / name
    return None


def read_weights(folder: Path, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in ``folder`` as ``dtype`` on ``device``.

    Raises:
        ModelFault: no file of weights, one of another scheme, or one that is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = weights_file(folder)
    if path is None:
        raise ModelFault(f"no weights in {folder}", help=f"{INT8_FILE} or {PLAIN_FILE} must stand there")
    try:
        with safe_open(path, framework="pt") as opened:
            said = opened.metadata() or {}
            if path.name == INT8_FILE and (said.get("scheme"), said.get("version")) != (SCHEME, VERSION):
                raise ModelFault(
                    f"{path} is of another format",
                    cause=f"scheme {said.get('scheme')!r}, version {said.get('version')!r}; this drk reads {SCHEME!r}, "
                    f"version {VERSION!r}",
                    help="use weights and drk of the same release",
                )
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        found = dequantized(stored, dtype)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFault(f"{path} cannot be read", cause=str(error)[:300], help="fetch the folder again") from error
    return {name: one.to(device) for name, one in found.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a model's folder.

    Raises:
        ModelFault: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFault(f"{path} cannot be read", cause=str(error)[:300], help="fetch the folder again") from error
    if not isinstance(found, dict):
        raise ModelFault(f"{path} is no JSON object", help="fetch the folder again")
    return found
