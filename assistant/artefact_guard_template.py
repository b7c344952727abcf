"""The checks of every artefact: does this call, this model, fit what was verified? Real code, copied as text.

Pasted by :mod:`drk.assistant.artefact` between the constants, which stand here as placeholders, and the dispatcher of
:mod:`drk.assistant.artefact_runtime_template`. Only what is below the marker line is copied.

A tensor's record is (form, dtype, shape, layout, free dimensions); ``_FREE_SIZES`` maps the recorded sizes of free
dimensions to the smaller ones that were verified too. Every check raises ``_Unfit`` with a reason for people. A model
fits when its class, parts, plain attributes and the shapes and dtypes of its weights are those of a model built with
the recorded arguments.

Left out: tensors that are plain attributes rather than parameters or buffers are not compared.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import nn


class ModelNew(nn.Module):
    """Placeholder for the candidate's class."""


_TARGET = "Model"
_KIND = "module"
_SUBMODULE = ""
_INIT_ARGS: tuple[Any, ...] = ()
_INIT_KWARGS: dict[str, Any] = {}
_INIT_FUNCTION = ""
_ARGUMENTS: tuple[tuple[str, Any], ...] = ()
_FREE_SIZES: dict[int, int] = {}
_TRAINING = False
_GRADIENTS = False
_AUTOCAST = ""
_WEIGHTS = "copied"
_CHECK_NEW_SIZES = True
_OUTPUT: Any = ("value", None)
_CHANGED: tuple[str, ...] = ()
_OPERATOR_NAME = "drk::template"

# --- drk guard --------------------------------------------------------------------------------------------------
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_KERNEL_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError,
                  ValueError, triton.TritonError)  # fmt: skip


class _Unfit(Exception):
    """Why the kernels cannot be used for this model or this call."""


def _match(name: str, expected: Any, value: Any, tensors: list[Any], sizes: dict[int, int]) -> None:
    """Compare one argument with its record; collect tensors and free sizes; else raise _Unfit."""
    form = expected[0]
    if form == "tensor":
        _match_tensor(name, expected, value, sizes)
        tensors.append(value)
    elif form == "value":
        if type(value) is not type(expected[1]) or value != expected[1]:
            raise _Unfit(f"{name} is {value!r}, verified was {expected[1]!r}"[:200])
    else:
        items = list(value.items()) if form == "dict" and isinstance(value, dict) else value
        if type(value).__name__ != form or len(items) != len(expected[1]):
            raise _Unfit(f"{name} is another structure than the verified one")
        for index, (inner, item) in enumerate(zip(expected[1], items, strict=True)):
            if form == "dict":
                if item[0] != inner[0]:
                    raise _Unfit(f"{name} has other keys than the verified one")
                _match(f"{name}[{item[0]!r}]", inner[1], item[1], tensors, sizes)
            else:
                _match(f"{name}[{index}]", inner, item, tensors, sizes)


def _match_tensor(name: str, expected: Any, value: Any, sizes: dict[int, int]) -> None:
    _, dtype, shape, strides, free = expected
    if type(value) not in (torch.Tensor, nn.Parameter) and not torch.compiler.is_compiling():
        raise _Unfit(f"{name} is a {type(value).__name__}, not a plain tensor")
    if not value.is_cuda and not (_INTERPRETED and value.device.type == "cpu"):
        raise _Unfit(f"{name} is on {value.device.type}, not on a CUDA device")
    now = value.shape  # asked for once: all this runs at each call
    if value.dtype is not dtype or len(now) != len(shape):
        raise _Unfit(f"{name} is {_say(value)}, verified was {_say_as(dtype, shape)}")
    for dim, size in enumerate(shape):  # dimensions that had one size must have one size again
        if now[dim] != (sizes.setdefault(size, now[dim]) if dim in free else size):
            raise _Unfit(f"{name} is {_say(value)}, verified was {_say_as(dtype, shape)}")
    if value.numel() == 0:
        raise _Unfit(f"{name} is empty")
    if isinstance(strides, torch.memory_format):
        if not value.is_contiguous(memory_format=strides):
            raise _Unfit(f"{name} has another memory layout than the verified one")
    elif value.stride() != strides:
        raise _Unfit(f"{name} has strides {value.stride()}, verified were {strides}")


def _check_replaced(leaf: str, tensor: Any, before: Any) -> None:
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise _Unfit(f"{leaf} is a {type(tensor).__name__}, not a plain tensor")
    if tensor.shape != before.shape or tensor.dtype != before.dtype:
        raise _Unfit(f"{leaf} became {_say(tensor)}, verified was {_say(before)}")


def _check_autocast(device: Any) -> None:
    kind = device.type if device is not None else "cuda"
    now = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    if now != _autocast_dtype():
        raise _Unfit(f"autocast is {now or 'off'}, verified was {_AUTOCAST or 'off'}")


def _autocast_dtype() -> Any:
    return getattr(torch, _AUTOCAST) if _AUTOCAST else None


def _build_kernels(owner: Any) -> nn.Module:
    """Build ModelNew as it was built when it was verified; random states are left as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        if hasattr(ModelNew, "from_reference"):
            convert: Callable[[Any], nn.Module] = ModelNew.from_reference
            return convert(owner)
        if _KIND == "function" or _SUBMODULE:
            return ModelNew()
        args, kwargs = _init_arguments(owner)
        try:
            inspect.signature(ModelNew).bind(*args, **kwargs)
        except TypeError:
            return ModelNew()
        return ModelNew(*args, **kwargs)


def _init_arguments(owner: Any) -> tuple[Any, Any]:
    if not _INIT_FUNCTION:
        return _INIT_ARGS, _INIT_KWARGS
    home = sys.modules.get(type(owner).__module__)
    function = getattr(home, _INIT_FUNCTION, None)
    if function is None:
        raise _Unfit(f"{type(owner).__module__} has no {_INIT_FUNCTION}")
    given = function() if callable(function) else function
    return ((), given) if isinstance(given, dict) else (tuple(given), {})


def _check_same_configuration(model: nn.Module, build: Callable[..., Any] | None, place: str) -> None:
    """Raise _Unfit unless ``model`` has the plain attributes of one built with the recorded arguments."""
    if _KIND == "factory" and build is None:
        raise _Unfit(f"it comes from a factory: decorate {_TARGET} with @optimized, or pass build={_TARGET}")
    if _KIND == "module" and type(model).__name__ != _TARGET.rpartition(".")[2]:
        raise _Unfit(f"the model is a {type(model).__name__}, verified was {_TARGET}")
    twin = _twin(model, build)
    mine, theirs = (dict(one.get_submodule(place).named_modules()) for one in (model, twin))
    if [(name, type(one)) for name, one in mine.items()] != [(name, type(one)) for name, one in theirs.items()]:
        raise _Unfit("the model has other parts than the verified one")
    for name, one in mine.items():
        here, there = _attributes(one), _attributes(theirs[name])
        for key in here.keys() | there.keys():
            if here.get(key) != there.get(key):
                where = f"{name}.{key}" if name else key
                raise _Unfit(f"{where} is {here.get(key)!r} here and {there.get(key)!r} where it was verified"[:300])


def _twin(model: nn.Module, build: Callable[..., Any] | None) -> nn.Module:
    """Build the model that was verified, without memory for its weights where its constructor allows that."""
    args, kwargs = _init_arguments(model)
    reasons = []
    for device in ("meta", "cpu"):
        try:
            with torch.random.fork_rng(devices=[]), torch.device(device):
                if build is not None:
                    return build(*args, **kwargs)  # type: ignore[no-any-return]
                twin = type(model).__new__(type(model))
                construct = type(model).__init__
                getattr(construct, "__wrapped__", construct)(twin, *args, **kwargs)
                return twin
        except _KERNEL_FAULTS as error:
            reasons.append(f"{type(error).__name__}: {error}")
    raise _Unfit(f"a model like the verified one could not be built: {reasons[-1]}")


def _attributes(module: nn.Module) -> dict[str, Any]:
    internal = {*vars(nn.Module()), "forward"}
    return {name: value for name, value in vars(module).items() if name not in internal and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    return isinstance(value, _PLAIN)


def _holder(module: nn.Module, leaf: str) -> dict[str, Any]:
    return module._parameters if leaf in module._parameters else module._buffers


def _find(owner: Any, path: str, leaf: str) -> dict[str, Any] | None:
    """Return the dictionary of the owner that holds the tensor, or None."""
    if not isinstance(owner, nn.Module):
        return None
    try:
        module = owner.get_submodule(path)
    except AttributeError:
        return None
    holder = _holder(module, leaf)
    return holder if holder.get(leaf) is not None else None


def _state_marks(owner: Any) -> tuple[Any, ...]:
    tensors = [*owner.parameters(), *owner.buffers()] if isinstance(owner, nn.Module) else []
    return tuple((one.data_ptr(), -1 if one.is_inference() else one._version) for one in tensors)


def _alike(result: Any, expected: Any) -> bool:
    """Say whether nested results agree to a percent, as a kernel that ignores a batch size never would."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (expected.shape, expected.dtype):
            return False
        error, scale = (result.double() - expected.double()).norm(), expected.double().norm()
        return bool(error <= 0.01 * scale) or bool(torch.equal(result, expected))
    if isinstance(expected, dict):
        return result.keys() == expected.keys() and all(_alike(result[key], expected[key]) for key in expected)
    if isinstance(expected, (list, tuple)):
        return len(result) == len(expected) and all(map(_alike, result, expected))
    return bool(result == expected)


def _slopes_alike(first: Any, second: Any, args: Any, kwargs: Any, parameters: list[Any]) -> bool:
    """Say whether two functions hand the same gradients to their inputs and to ``parameters``."""
    found = [_slopes(function, args, kwargs, parameters) for function in (first, second)]
    return all(_alike(one, other) for one, other in zip(*found, strict=True))


def _slopes(function: Any, args: Any, kwargs: Any, parameters: list[Any]) -> list[Any]:
    inputs: list[Any] = []
    with torch.enable_grad():
        result = function(*_leaves_of(args, inputs), **_leaves_of(kwargs, inputs))
        outputs: list[Any] = []
        _leaves_of(result, outputs, fresh=False)
        outputs = [one for one in outputs if one.requires_grad]
        # no random numbers are drawn here: the caller's stay what they would have been
        drawn = [torch.arange(one.numel(), device=one.device).cos().reshape(one.shape).to(one.dtype) for one in outputs]
        wanted = [*inputs, *(one for one in parameters if one.requires_grad)]
        return list(torch.autograd.grad(outputs, wanted, drawn, allow_unused=True)) if outputs and wanted else []


def _leaves_of(value: Any, found: list[Any], *, fresh: bool = True) -> Any:
    """Collect floating tensors; with ``fresh``, return the same structure with leaves in their place."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            value = value.detach().requires_grad_() if fresh else value
            found.append(value)
        return value
    if isinstance(value, dict):
        return {key: _leaves_of(item, found, fresh=fresh) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_leaves_of(item, found, fresh=fresh) for item in value])
    return value


def _key(sizes: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(sizes.items()))


def _say(tensor: Any) -> str:
    return _say_as(tensor.dtype, tuple(tensor.shape))


def _say_as(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
