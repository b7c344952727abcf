"""Tripwires: did user code replace what drk or the user's program relies on, or change global settings?

Before the candidate is imported, identities are noted of some sixty callables of torch, Triton and Python and of every
function of this package that is loaded, with the values of global flags and what may run beside the call: collector
callbacks, profile functions, signal handlers, timers, threads. All is looked at again after each correctness call and
once more after the candidate was timed.

A change is advice for the Judge (an honest kernel has no reason for one); it is not the defence: a candidate that puts
everything back is not seen here. Time and correctness are judged outside its process.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import signal
import sys
import threading
import time
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as torch_module

THREAD_GRACE_S = 0.05
_CALLED = ("CPU", "CUDA", "Autograd", "Autocast", "Composite", "ADInplaceOrView", "BackendSelect")
# fmt: off
_WATCHED = (
    "torch:allclose", "torch:equal", "torch:isclose", "torch:empty", "torch:empty_like",
    "torch:randn", "torch:rand", "torch:matmul", "torch:compile", "torch:no_grad", "torch.cuda:Event",
    "torch.cuda:Stream", "torch.cuda:synchronize", "torch.cuda:current_stream", "torch.cuda:Event.record",
    "torch.cuda:Event.elapsed_time", "torch.cuda:Event.synchronize", "torch.cuda:Stream.synchronize",
    "torch.cuda:CUDAGraph", "torch.testing:assert_close", "torch.nn:Module.__call__",
    "torch.nn:Module.load_state_dict", "torch.nn:Module.state_dict", "torch.nn.functional:linear",
    "torch.nn:Module.named_parameters", "torch.nn:Module.named_buffers", "torch.nn:Module.named_modules",
    "torch.nn:Module.parameters", "torch.nn:Module.zero_grad", "torch.nn:Module.train", "torch.nn:Module.__setattr__",
    "torch:Tensor.mul_", "torch:Tensor.data_ptr", "torch:Tensor.fill_", "torch:Tensor.backward",
    "triton.runtime.jit:JITFunction.run", "triton.runtime.autotuner:Autotuner.run",
    "triton.runtime.interpreter:InterpretedFunction.run", "triton.compiler.compiler:CompiledKernel.run",
    "triton.compiler.compiler:CompiledKernel.launch_metadata",
    "torch:Tensor.cpu", "torch:Tensor.clone", "torch:Tensor.detach", "torch:Tensor.copy_", "torch:Tensor.to",
    "torch:Tensor.__eq__", "torch:Tensor.contiguous", "torch:Tensor.numpy", "torch.autograd:backward",
    "time:perf_counter", "time:time", "time:monotonic", "time:sleep", "json:dumps", "json:loads", "os:pwrite",
    "os:write", "socket:socket.sendall", "random:random", "triton:jit",
)
# fmt: on
_BUILTINS = ("open", "print", "isinstance", "getattr", "setattr", "len", "sum", "min", "max", "__import__", "id")


def _lookup(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _flags() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn TF32": torch.backends.cudnn.allow_tf32,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "reduced fp16 reduction": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "reduced bf16 reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "default device": str(torch.get_default_device()),
        "gradient mode": torch.is_grad_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        **_beside(),
    }


def _beside() -> dict[str, Any]:
    """Return what runs besides what is called: callbacks of collector, interpreter, modules and signals."""
    hooks = [value for name, value in vars(torch_module).items() if name.startswith("_global_") and name.endswith("s")]
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    return {
        "the garbage collector's list of callbacks": list(gc.callbacks),
        "profile function": (sys.getprofile(), threading.getprofile()),
        "trace function": (sys.gettrace(), threading.gettrace()),
        "the table of hooks of all modules": [len(value) for value in hooks if isinstance(value, dict)],
        "the table of signal handlers": handlers,
        "interval timer": signal.getitimer(signal.ITIMER_REAL)[1],
    }


@dataclass(frozen=True)
class _Part:
    """A function, method or class of this package as it was: where it is found, itself, and its code object."""

    owner: str
    holder: Mapping[str, Any]
    key: str
    value: Any
    code: Any

    @property
    def changed(self) -> bool:
        """Whether another stands there now, or it has other code."""
        return self.holder.get(self.key) is not self.value or _code_of(self.value) is not self.code


def _own_parts() -> list[_Part]:
    """Return every function, method and class of this package that is loaded."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.startswith("drk.gym.") and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if callable(value):
                    found.append(_Part(name, vars(module), key, value, _code_of(value)))
                if isinstance(value, type) and value.__module__ == name:
                    members = list(vars(value).items())
                    coded = [(part, one, _code_of(one)) for part, one in members]
                    found += [_Part(f"{name}.{key}", vars(value), *entry) for entry in coded if entry[2] is not None]
    return found


def _code_of(member: Any) -> Any:
    inner = getattr(member, "__func__", getattr(member, "fget", member))
    return getattr(inner, "__code__", None)


def _running_threads() -> int:
    """Count Python's threads, those that the ``threading`` module does not know included."""
    return max(threading.active_count(), len(sys._current_frames()))


def _registered() -> set[str]:
    """Return what Python code has registered with the dispatcher, as ``namespace/operator/key``."""
    return set(getattr(torch.library, "_impls", ()))


def _overridden(names: set[str]) -> list[str]:
    """Return what replaces kernels of ATen; rules of shapes and of transforms (vmap) are torch's own, made late."""
    return sorted(one for one in names if one.startswith("aten/") and one.rpartition("/")[2].startswith(_CALLED))


class Tripwires:
    """A note of the process as it was when this was made."""

    def __init__(self) -> None:
        self._names = {name: _lookup(name) for name in _WATCHED}
        self._codes = {name: getattr(found, "__code__", None) for name, found in self._names.items()}
        self._builtins = {name: getattr(builtins, name) for name in _BUILTINS}
        self._flags = _flags()
        self._threads = _running_threads()
        self._registered = _registered()
        self._own = _own_parts()

    def tripped(self) -> list[str]:
        """Return in words what differs now."""
        found = [
            f"{name.replace(':', '.')} was replaced" for name, was in self._names.items() if _lookup(name) is not was
        ]
        found += [
            f"the code of {name.replace(':', '.')} was replaced"
            for name, was in self._codes.items()
            if was is not None and getattr(self._names[name], "__code__", None) is not was
        ]
        found += [
            f"builtins.{name} was replaced"
            for name, was in self._builtins.items()
            if getattr(builtins, name, None) is not was
        ]
        found += [f"{name} was changed" for name, value in _flags().items() if value != self._flags[name]]
        found += [f"the operator {name} was overridden" for name in _overridden(_registered() - self._registered)[:5]]
        found += [f"{part.owner}.{part.key} was replaced" for part in self._own if part.changed]
        if self._threads_left():
            found.append("threads were left running")
        return found

    def _threads_left(self) -> bool:
        # A thread that was joined by a lock of its own may need a moment to end.
        deadline = time.monotonic() + THREAD_GRACE_S
        while _running_threads() > self._threads:
            if time.monotonic() > deadline:
                return True
            time.sleep(THREAD_GRACE_S / 10)
        return False
