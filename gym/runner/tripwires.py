"""Tripwires: did user code replace what drk or the user's program relies on, or change global settings?

Identities of some forty callables and the values of global flags are noted before the candidate is imported and looked
at again after it ran. A change is advice for the Judge (an honest kernel has no reason for one); it is not the defence:
a candidate that puts everything back is not seen here, and gains nothing from what it did, since time and correctness
are judged outside its process.
"""

from __future__ import annotations

import builtins
import importlib
import threading
from typing import Any

import torch

# fmt: off
_WATCHED = (
    "torch:allclose", "torch:equal", "torch:isclose", "torch:empty", "torch:empty_like",
    "torch:randn", "torch:rand", "torch:matmul", "torch:compile", "torch:no_grad", "torch.cuda:Event",
    "torch.cuda:Stream", "torch.cuda:synchronize", "torch.cuda:current_stream", "torch.cuda:Event.record",
    "torch.cuda:Event.elapsed_time", "torch.cuda:Event.synchronize", "torch.cuda:Stream.synchronize",
    "torch.cuda:CUDAGraph", "torch.testing:assert_close", "torch.nn:Module.__call__",
    "torch.nn:Module.load_state_dict", "torch.nn:Module.state_dict", "torch.nn.functional:linear",
    "torch:Tensor.cpu", "torch:Tensor.clone", "torch:Tensor.detach", "torch:Tensor.copy_", "torch:Tensor.to",
    "torch:Tensor.__eq__", "torch:Tensor.contiguous", "torch:Tensor.numpy", "torch.autograd:backward",
    "time:perf_counter", "time:time", "time:monotonic", "time:sleep", "json:dumps", "json:loads", "os:pwrite",
    "os:write", "socket:socket.sendall", "random:random", "triton:jit", "drk.gym.runner.execute:call",
    "drk.gym.runner.timing:Timer.go", "drk.gym.runner.transfer:write_tensors",
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
    }


def _overrides() -> set[str]:
    """Return the ATen kernels that Python code has registered with the dispatcher."""
    known = getattr(torch.library, "_impls", ())
    return {str(name) for name in known if str(name).startswith("aten")}


class Tripwires:
    """A note of the process as it was when this was made."""

    def __init__(self) -> None:
        self._names = {name: _lookup(name) for name in _WATCHED}
        self._codes = {name: getattr(found, "__code__", None) for name, found in self._names.items()}
        self._builtins = {name: getattr(builtins, name) for name in _BUILTINS}
        self._flags = _flags()
        self._threads = threading.active_count()
        self._overrides = _overrides()

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
        found += [f"the operator {name} was overridden" for name in sorted(_overrides() - self._overrides)[:5]]
        if threading.active_count() > self._threads:
            found.append("threads were left running")
        return found
