"""Draws the values of one trial's inputs from a key, on the device.

The Judge sends one secret integer per trial; every Runner draws the same values from it, bit for bit on the same kind
of device, so nothing large has to travel. Each argument has a sub-key of its own, derived from the key and the
argument's path, so that arguments are independent and one more argument does not change the others.

Three sources: specifications (shape, dtype, strides, range, fill), functions of the user's file (called with every
generator seeded, under the device), and fixed values (module-level names, captured tensors), whose finite floating
elements are permuted by the key; integers, booleans, infinities and NaN stay where they are.

Limits: values differ between kinds of GPU and between CPU and GPU; a function that draws from a source of its own (the
clock, ``os.urandom``) is not reproducible, which :func:`inputs_vary` and two draws with one key can tell.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open

from drk.gym.runner import structure
from drk.gym.runner.failures import LoadFailure, user_code
from drk.gym.runner.reduction import Plan, apply_plan, dense_strides, reduce_plan

__all__ = ["draw_inputs", "draw_tensor", "inputs_vary", "permute", "reduce_plan", "seed_everything", "sub_key"]

Spec = Mapping[str, Any]
Device = torch.device | str
Captured = Mapping[str, torch.Tensor] | Path

MEMORY_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}


def sub_key(key: int, path: str) -> int:
    """Return a 63-bit key for the argument at ``path``, derived from ``key`` by SHA-256."""
    digest = hashlib.sha256(f"{key}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _generator(key: int, device: Device) -> torch.Generator:
    generator = torch.Generator(device=device)
    generator.manual_seed(key)
    return generator


def seed_everything(key: int) -> None:
    """Seed torch (all devices that are in use), numpy's global generator and ``random`` from ``key``."""
    torch.manual_seed(key % 2**63)
    numpy.random.seed(key % 2**32)
    random.seed(key)


# --- one tensor ----------------------------------------------------------------------------------------------


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that ``name`` (without prefix) stands for.

    Raises:
        LoadFailure: kind ``bad-dtype``.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LoadFailure("load", "bad-dtype", f"torch has no dtype {name!r}")
    return found


def _draw_flat(shape: tuple[int, ...], spec: Spec, dtype: torch.dtype, key: int, device: Device) -> torch.Tensor:
    """Draw a contiguous tensor; dtypes without a generator of their own are drawn wider and cast."""
    generator = _generator(key, device)
    fill, low, high = spec.get("fill", "normal"), spec.get("low"), spec.get("high")
    if fill in ("zeros", "ones"):
        return torch.full(shape, fill == "ones", device=device).to(dtype)
    if dtype == torch.bool or fill == "bernoulli":
        return torch.randint(0, 2, shape, generator=generator, device=device).to(dtype)
    if fill == "integers" or not (dtype.is_floating_point or dtype.is_complex):
        first, last = int(low if low is not None else 0), int(high if high is not None else 2)
        drawn = torch.randint(first, max(last, first + 1), shape, generator=generator, device=device)
        return drawn.to(dtype)
    wide = dtype if dtype.itemsize >= 2 else torch.float32
    if fill == "uniform":
        start, stop = float(low if low is not None else 0.0), float(high if high is not None else 1.0)
        drawn = torch.rand(shape, generator=generator, dtype=wide, device=device)
        return drawn.mul_(stop - start).add_(start).to(dtype)
    return torch.randn(shape, generator=generator, dtype=wide, device=device).to(dtype)


def _lay_out(tensor: torch.Tensor, spec: Spec, full: tuple[int, ...]) -> torch.Tensor:
    """Give ``tensor`` the strides of ``spec``; a reduced shape gets dense strides in the same order."""
    strides = spec.get("strides")
    layout = spec.get("layout", "contiguous")
    if strides is None:
        return tensor if layout == "contiguous" else tensor.contiguous(memory_format=MEMORY_FORMATS[layout])
    shape = tuple(tensor.shape)
    wanted = tuple(strides) if shape == full else dense_strides(shape, strides)
    size = 1 + sum((length - 1) * stride for length, stride in zip(shape, wanted, strict=True)) if tensor.numel() else 0
    storage = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    kept = [slice(0, 1) if stride == 0 else slice(None) for stride in wanted]
    target = storage.as_strided(shape, wanted)
    # One element per address: an expanded dimension is written once, overlapping strides in a fixed order.
    target[tuple(kept)] = tensor[tuple(kept)]
    return target


def draw_tensor(spec: Spec, key: int, device: Device, dims: Mapping[str, int] | None = None) -> torch.Tensor:
    """Draw the tensor that ``spec`` (a TensorSpec's JSON) describes; ``dims`` are reduced sizes.

    Raises:
        LoadFailure: unknown dtype, or strides whose count differs from the shape's.
    """
    full = tuple(spec["shape"])
    shape = tuple(min(size, (dims or {}).get(str(dim), size)) for dim, size in enumerate(full))
    strides = spec.get("strides")
    if strides is not None and len(strides) != len(full):
        raise LoadFailure("load", "bad-strides", f"{len(strides)} strides for {len(full)} dimensions")
    dtype = torch_dtype(spec.get("dtype", "float32"))
    tensor = _lay_out(_draw_flat(shape, spec, dtype, key, device), spec, full)
    return tensor.requires_grad_(bool(spec.get("requires_grad", False)))


def permute(tensor: torch.Tensor, key: int) -> torch.Tensor:
    """Return a copy with its finite floating elements permuted by ``key``; strides, and all else, as they were."""
    source = tensor.detach()
    if not source.is_floating_point() or source.layout != torch.strided or source.dtype.itemsize < 2:
        return source.clone().requires_grad_(tensor.requires_grad)
    flat = source.reshape(-1)
    places = torch.isfinite(flat).nonzero().squeeze(1)
    order = torch.randperm(places.numel(), generator=_generator(key, source.device), device=source.device)
    flat = flat.clone()
    flat[places] = flat[places[order]]
    return _relayout(flat.reshape(source.shape), source).requires_grad_(tensor.requires_grad)


def _relayout(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if tensor.stride() == like.stride():
        return tensor
    return _lay_out(tensor, {"strides": list(like.stride())}, tuple(tensor.shape))


# --- a call ------------------------------------------------------------------------------------------------------


class _Draw:
    """One trial's draw: the key, the device, the plan, and where captured tensors lie."""

    def __init__(self, key: int, device: Device, reduce: Plan | None, captured: Captured) -> None:
        self.key = key
        self.device = device
        self.reduce = reduce or {}
        self.captured = captured

    def argument(self, spec: Spec, path: str) -> Any:
        kind = spec["kind"]
        if kind == "tensor":
            return draw_tensor(spec, sub_key(self.key, path), self.device, self.reduce.get(path))
        if kind == "captured":
            return self.captured_tensor(spec, path)
        if kind == "scalar":
            return spec["value"]
        form, items = spec["form"], spec.get("items", ())
        if form == "dict":
            return {
                name: self.argument(item, f"{path}[{name!r}]") for name, item in zip(spec["keys"], items, strict=True)
            }
        parts = [self.argument(item, f"{path}[{index}]") for index, item in enumerate(items)]
        return tuple(parts) if form == "tuple" else parts

    def captured_tensor(self, spec: Spec, path: str) -> torch.Tensor:
        name = f"input.{spec['name']}"
        tensor = permute(_captured_tensor(self.captured, name).to(self.device), sub_key(self.key, path))
        return tensor.requires_grad_(bool(spec.get("requires_grad", False)))


def _captured_tensor(captured: Captured, name: str) -> torch.Tensor:
    if isinstance(captured, Path):
        with safe_open(captured, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 - not a mapping
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
    elif name in captured:
        return captured[name]
    raise LoadFailure("load", "missing-tensor", f"the task holds no captured tensor {name!r}")


def as_call(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Read what a user's function or name gives as arguments of one call.

    A list or tuple holds the positional arguments, a dict with text keys the keywords, a pair of a tuple and such a
    dict both (the form of ``torch.export``); anything else is the only argument.
    """
    is_pair = type(value) is tuple and len(value) == 2 and type(value[0]) is tuple
    if is_pair and _as_keywords(value[1]):
        return list(value[0]), dict(value[1])
    if type(value) in (list, tuple):
        return list(value), {}
    if _as_keywords(value):
        return [], dict(value)
    return [value], {}


def _as_keywords(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(name, str) for name in value)


def _move(value: Any, device: Device) -> Any:
    def place(_path: str, tensor: torch.Tensor) -> torch.Tensor:
        # A graph behind an input is not part of the call: each input is a leaf.
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    moved = structure.map_tensors(place, value)
    leaves = structure.flatten(moved)
    return structure.unflatten(
        moved, [leaf.value.to(device) if isinstance(leaf.value, torch.nn.Module) else leaf.value for leaf in leaves]
    )


def _call_user_function(function: Any, key: int, device: Device) -> Any:
    """Call with every generator seeded, on the device when the function allows it, else on the CPU and moved."""
    if torch.device(device).type != "cpu":
        seed_everything(key)
        try:
            with torch.device(device):
                return function()
        except (RuntimeError, TypeError, ValueError):
            seed_everything(key)
            return function()
    seed_everything(key)
    return function()


def _draw_user(spec: Spec, key: int, device: Device, reference: Any) -> tuple[list[Any], dict[str, Any]]:
    name = spec["name"]
    root = Path(getattr(reference, "source_root", "."))
    entry = getattr(reference, "entry", "")
    source = getattr(reference.namespace, name, None) if reference is not None else None
    if source is None:
        raise LoadFailure("load", "missing-inputs", f"{entry or 'the file'} defines no {name!r}", file=entry)
    with user_code("load", root, kind="inputs-raised", what=f"{name}()"):
        fixed = spec.get("permute", not callable(source))
        value = _call_user_function(source, key, device) if callable(source) else source
    args, kwargs = as_call(value)
    args, kwargs = _move(args, device), _move(kwargs, device)
    if not fixed:
        return args, kwargs

    def shuffle(path: str, tensor: torch.Tensor) -> torch.Tensor:
        return permute(tensor, sub_key(key, path))

    return structure.map_tensors(shuffle, args, "args"), structure.map_tensors(shuffle, kwargs, "kwargs")


def draw_inputs(
    meta_inputs: Spec,
    key: int,
    device: Device,
    *,
    reference: Any = None,
    reduce: Plan | None = None,
    transform: Spec | None = None,
    tensors: Mapping[str, torch.Tensor] | Path | None = None,
) -> tuple[list[Any], dict[str, Any]]:
    """Draw the arguments of one call.

    Args:
        meta_inputs: JSON of a Call or UserFunction; ``"permute": true`` beside a function's name permutes what it
            returns (for functions that return the same values each time, see :func:`inputs_vary`); by default only
            values that are no functions are permuted.
        key: the trial's key, a non-negative integer.
        device: where values are drawn.
        reference: the loaded reference; needed for functions of the user's file.
        reduce: plan of :func:`drk.gym.runner.reduction.reduce_plan`.
        transform: a stress variant, see :func:`stress`.
        tensors: the task's tensors by name (``input.<name>``), or the safetensors file that holds them.

    Returns:
        Positional and keyword arguments. Equal key, device kind and task give equal bits in every process.

    Raises:
        LoadFailure: the user's function raised, a name is missing, or a specification makes no sense.
    """
    if meta_inputs["kind"] == "function":
        args, kwargs = _draw_user(meta_inputs, key, device, reference)
        if reduce:
            args, kwargs = apply_plan(args, kwargs, reduce)
    else:
        draw = _Draw(key, device, reduce, tensors or {})
        args = [draw.argument(spec, f"args[{index}]") for index, spec in enumerate(meta_inputs.get("args", ()))]
        kwargs = {
            name: draw.argument(spec, f"kwargs[{name!r}]") for name, spec in meta_inputs.get("kwargs", {}).items()
        }
        if reduce:
            args, kwargs = apply_plan(args, kwargs, reduce)
    return (args, kwargs) if transform is None else stress(args, kwargs, transform, key)


def stress(args: list[Any], kwargs: dict[str, Any], transform: Spec, key: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with floating tensors changed as ``transform`` says.

    ``{"kind": "scale", "factor": f}``, ``{"kind": "offset", "value": v}``, ``{"kind": "heavy-tail", "factor": f,
    "share": p}`` (a share ``p`` of the elements is multiplied by ``f``), ``{"kind": "zeros"}``.

    Raises:
        LoadFailure: kind ``bad-transform``.
    """
    kind = transform["kind"]

    def change(path: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return tensor
        source = tensor.detach()
        if kind == "scale":
            changed = source * transform["factor"]
        elif kind == "offset":
            changed = source + transform["value"]
        elif kind == "zeros":
            changed = torch.zeros_like(source)
        elif kind == "heavy-tail":
            generator = _generator(sub_key(key, f"tail:{path}"), source.device)
            chosen = torch.rand(source.shape, generator=generator, device=source.device) < transform.get("share", 0.001)
            changed = torch.where(chosen, source * transform.get("factor", 100.0), source)
        else:
            raise LoadFailure("load", "bad-transform", f"unknown stress transform {kind!r}")
        return _relayout(changed, source).requires_grad_(tensor.requires_grad)

    return structure.map_tensors(change, args, "args"), structure.map_tensors(change, kwargs, "kwargs")


def inputs_vary(meta_inputs: Spec, device: Device, *, reference: Any = None) -> bool:
    """Whether two keys give different values; False for a user's function that returns the same tensors each time."""
    first = draw_inputs(meta_inputs, 1, device, reference=reference)
    second = draw_inputs(meta_inputs, 2, device, reference=reference)
    pairs = zip(structure.tensors(first), structure.tensors(second), strict=False)
    return any(a.shape != b.shape or not torch.equal(a, b) for (_, a), (_, b) in pairs)
