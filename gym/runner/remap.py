"""``cuda`` means the CPU: runs candidates that insist on a GPU in a Runner that has none.

:func:`device_remap` puts a ``TorchFunctionMode`` in place that rewrites every ``cuda`` device given to a torch function
or method to ``cpu``, and lets tensors answer that they are on ``cuda:0``; beside it, the names in ``torch.cuda`` that a
candidate may call get stand-ins (:mod:`drk.gym.runner.cuda_stand_in`). ``torch.device("cuda")`` stays the value it is.
``torch.compile`` returns its argument, since only the meaning is checked here.

Honest limits: every CPU tensor claims to be on the GPU, so a candidate that mixes devices is not found out; the mode
acts in the thread that entered it; operators called below Python (C++ extensions) see CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device as torch_device_context

from drk.gym.devices import device_facts
from drk.gym.runner.cuda_stand_in import accelerator_members, nvtx_members, torch_cuda_members
from drk.gym.runner.patching import replace_attribute

_CUDA = re.compile(r"cuda(:\d+)?")
_CPU = torch.device("cpu")


def is_cuda_device(value: Any) -> bool:
    """Say whether ``value`` names a CUDA device: ``"cuda"``, ``"cuda:1"`` or such a ``torch.device``."""
    if isinstance(value, str):
        return _CUDA.fullmatch(value) is not None
    return isinstance(value, torch.device) and value.type == "cuda"


def to_cpu_device(value: Any) -> Any:
    """Return ``cpu`` for a CUDA device (a bare index is one too), anything else unchanged."""
    if is_cuda_device(value) or (isinstance(value, int) and not isinstance(value, bool)):
        return _CPU
    return value


class DeviceRemap(TorchFunctionMode):
    """The mode: rewrites devices in calls, answers for tensors.

    ``resident`` are addresses of storages that are certainly on the device: numpy may not look into those.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resident: frozenset[int] = frozenset()
        here = torch.device("cuda", 0)
        tensor: Any = torch.Tensor
        # Getters are compared with ==: a new wrapper object is made at each access.
        self._answers: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
            (tensor.device.__get__, lambda real: here if real.type == "cpu" else real),
            (tensor.is_cuda.__get__, lambda real: True),  # noqa: ARG005 - one shape for all answers
            (tensor.is_cpu.__get__, lambda real: False),  # noqa: ARG005
            (tensor.get_device, lambda real: max(real, 0)),
            (tensor.is_pinned, lambda real: False),  # noqa: ARG005
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func`` with ``cuda`` rewritten to ``cpu`` in its arguments."""
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _HOST_VIEWS and args[0].untyped_storage().data_ptr() in self.resident:
            raise TypeError(_NO_HOST_VIEW)
        if name in _METHODS and args and isinstance(args[0], torch.Tensor):
            return _METHODS[name](func, args, kwargs)
        if name == "__get__" or name in {"get_device", "is_pinned"}:
            result = func(*args, **kwargs)
            for getter, answer in self._answers:
                if func == getter:
                    return answer(result)
            return result
        if "device" in kwargs:
            kwargs["device"] = to_cpu_device(kwargs["device"])
        kwargs.pop("pin_memory", None)
        args = tuple(
            _CPU if isinstance(value, (str, torch.device)) and is_cuda_device(value) else value for value in args
        )
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_device(mode: DeviceRemap | None, named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Keep numpy out of these tensors for the length of a block, as it is where they really are on a GPU."""
    if mode is None:
        yield
        return
    mode.resident = frozenset(one.untyped_storage().data_ptr() for _, one in named if one.layout == torch.strided)
    try:
        yield
    finally:
        mode.resident = frozenset()


def _keep(_func: Any, args: Any, _kwargs: Any) -> Any:
    """``x.cuda()`` and ``x.pin_memory()`` of a tensor that is there already."""
    return args[0]


def _copy_down(_func: Any, args: Any, _kwargs: Any) -> Any:
    """``x.cpu()`` is always a copy of a CUDA tensor; writing to it must not reach ``x``."""
    return args[0].clone()


def _ignore(*_args: Any) -> None:
    return None


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    asked = kwargs.get("device", rest[0] if rest else None)
    if "device" in kwargs:
        kwargs["device"] = to_cpu_device(kwargs["device"])
    rest = [to_cpu_device(value) if i == 0 else value for i, value in enumerate(rest)]
    result = func(tensor, *rest, **kwargs)
    down = asked == "cpu" or asked == _CPU  # noqa: PLR1714 - a set would hash arbitrary values
    return result.clone() if down and result is tensor else result


def _type(func: Any, args: Any, kwargs: Any) -> Any:
    args = tuple(value.replace("torch.cuda.", "torch.") if isinstance(value, str) else value for value in args)
    return func(*args, **kwargs)


_HOST_VIEWS = frozenset(("numpy", "__array__", "__dlpack__"))
_NO_HOST_VIEW = (
    "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
)
_METHODS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "cuda": _keep,
    "pin_memory": _keep,
    "cpu": _copy_down,
    "to": _to,
    "type": _type,
}


@contextlib.contextmanager
def device_remap(target: str = "sm_90") -> Iterator[DeviceRemap]:
    """Let ``cuda`` mean the CPU in this thread until the block ends; everything is restored then.

    ``target`` (see :func:`drk.gym.devices.device_facts`) says which device the properties describe.

    Raises:
        DeviceError: the target is unknown.
    """
    facts = device_facts(target)
    with contextlib.ExitStack() as stack:
        for name, value in torch_cuda_members(facts).items():
            replace_attribute(stack, torch.cuda, name, value)
        for name, value in nvtx_members().items():
            replace_attribute(stack, torch.cuda.nvtx, name, value)
        for name, value in accelerator_members().items():
            replace_attribute(stack, torch.accelerator, name, value)
        # Its parser refuses a stand-in stream before the mode is asked.
        replace_attribute(stack, torch.Tensor, "record_stream", _ignore)
        replace_attribute(stack, torch, "compile", _no_compile)
        replace_attribute(stack, torch, "Generator", _cpu_generator_class())
        replace_attribute(stack, torch._C, "_cuda_getCurrentRawStream", lambda _index: 0)
        replace_attribute(stack, torch.backends.cudnn, "is_acceptable", lambda _tensor: False)
        _remap_contexts(stack)
        _remap_backward(stack)
        _remap_custom_operators(stack)
        replace_attribute(stack, torch, "load", _load_to_cpu(torch.load))
        yield stack.enter_context(DeviceRemap())


def _no_compile(model: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    """``torch.compile``, plain or as a decorator with arguments, as the identity."""
    return (lambda function: function) if model is None else model


def _cpu_generator_class() -> type:
    real: Any = torch.Generator

    class AnyGenerator(type(real)):  # type: ignore[misc]
        """``isinstance`` answers for the generators that torch made itself, too."""

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

    class Generator(real, metaclass=AnyGenerator):  # type: ignore[misc]
        """``torch.Generator(device="cuda")`` on the CPU."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, to_cpu_device(device))

    return Generator


def _remap_contexts(stack: contextlib.ExitStack) -> None:
    """Map autocast, ``with torch.device("cuda")`` and ``set_default_device``, which do not pass through the mode."""
    autocast = torch.amp.autocast_mode.autocast
    autocast_init, context_init = autocast.__init__, torch_device_context.DeviceContext.__init__

    def init_autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            # Left alone, the CPU's default would be bfloat16; on a GPU it is float16.
            device_type, dtype = "cpu", dtype or torch.float16
        autocast_init(self, device_type, dtype, *args, **kwargs)

    def init_context(self: Any, device: Any) -> None:
        context_init(self, to_cpu_device(device))

    replace_attribute(stack, autocast, "__init__", init_autocast)
    replace_attribute(stack, torch_device_context.DeviceContext, "__init__", init_context)
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        replace_attribute(stack, torch, name, _first_argument_to_cpu(getattr(torch, name)))
    replace_attribute(stack, torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))


def _remap_backward(stack: contextlib.ExitStack) -> None:
    """The autograd engine runs ``Function.backward`` with an empty mode stack: put the mode back for it."""
    node: Any = torch.autograd.function.BackwardCFunction
    apply = node.apply

    def apply_remapped(self: Any, *args: Any) -> Any:
        with DeviceRemap():
            return apply(self, *args)

    replace_attribute(stack, node, "apply", apply_remapped)


def _remap_custom_operators(stack: contextlib.ExitStack) -> None:
    """Register kernels of custom operators for the CPU, and put the mode back inside them (the dispatcher drops it)."""
    library: Any = torch.library
    definition = library.CustomOpDef
    register, implement = definition.register_kernel, library.Library.impl

    def register_kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        names = [device_types] if isinstance(device_types, str) else device_types
        names = names if names is None else ["cpu" if name == "cuda" else name for name in names]

        def remapped(function: Any) -> Any:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                with DeviceRemap():
                    return function(*args, **kwargs)

            return register(self, names)(call)

        return remapped if fn is None else remapped(fn)

    def impl(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> Any:
        name = str(op_name) if "::" in str(op_name) else f"{self.ns}::{op_name}"
        # An operator that has a CPU kernel of its own keeps it.
        free = dispatch_key == "CUDA" and not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
        return implement(self, op_name, fn, "CPU" if free else dispatch_key, **options)

    replace_attribute(stack, definition, "register_kernel", register_kernel)
    replace_attribute(stack, library.Library, "impl", impl)


def _load_to_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_to_cpu(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        return load(file, to_cpu_device(map_location), *args, **kwargs)

    return load_to_cpu


def _first_argument_to_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and args[0] == "cuda":
            args = ("cpu", *args[1:])
        elif not args and function.__name__ == "is_autocast_enabled" and not kwargs:
            args = ("cpu",)  # the form without argument asks for the GPU
        return function(*args, **kwargs)

    return call
