"""Values that answer for ``torch.cuda`` in a Runner that has no GPU: streams, events, properties, memory figures.

:mod:`drk.gym.runner.remap` installs them. Streams and events keep program order, because on the CPU everything is
already done when a call returns; event times are those of the host clock and are never used for a verdict. Device
properties are the data-sheet figures of the compile target, so that host code that sizes a persistent grid by the SM
count takes the branch that it takes there.

Left out: CUDA graphs, memory pools, pluggable allocators, peer access, NVML queries. Asking for a graph raises
:class:`CudaFeatureUnsupported`, which is the machine's limit and not the candidate's fault.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from drk.gym.devices import DeviceFacts


class CudaFeatureUnsupported(RuntimeError):
    """The candidate asked for a CUDA feature that cannot be stood in for on a CPU. ``kind`` is for the verdict."""

    kind = "unsupported"


@dataclass(frozen=True)
class DeviceProperties:
    """What ``torch.cuda.get_device_properties`` returns; the names are torch's, memory in bytes."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    max_threads_per_multi_processor: int
    max_threads_per_block: int = 1024
    regs_per_multiprocessor: int = 65536
    warp_size: int = 32
    is_integrated: bool = False
    is_multi_gpu_board: bool = False


def device_properties(facts: DeviceFacts) -> DeviceProperties:
    """Build torch's property record from data-sheet figures."""
    major, minor = facts.capability
    small = (major, minor) in {(8, 6), (8, 9), (12, 0)}
    return DeviceProperties(
        name=facts.name,
        major=major,
        minor=minor,
        total_memory=facts.memory_bytes,
        multi_processor_count=facts.sm_count,
        L2_cache_size=facts.l2_bytes,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=facts.shared_bytes,
        shared_memory_per_multiprocessor=facts.shared_bytes + 1024,
        max_threads_per_multi_processor=1536 if small else 2048,
    )


class Stream:
    """A stream whose work is always done."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0

    def __init__(self, device: Any = None, priority: int = 0, **_ignored: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority
        self.requested_device = device

    def synchronize(self) -> None:
        """Return at once: nothing is pending."""

    def query(self) -> bool:
        """Say that all work is done."""
        return True

    def wait_stream(self, stream: Any) -> None:
        """Order is kept already."""

    def wait_event(self, event: Any) -> None:
        """Order is kept already."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (a new one when none is given) and return it."""
        event = event or Event()
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_exception: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """An event that takes the host's clock."""

    cuda_event = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.enable_timing = enable_timing
        self.flags = (blocking, interprocess)
        self.time_ns: int | None = None

    def record(self, stream: Any = None) -> None:  # noqa: ARG002 - torch's signature
        """Take the time; ``stream`` makes no difference."""
        self.time_ns = time.perf_counter_ns()

    def wait(self, stream: Any = None) -> None:
        """Order is kept already."""

    def query(self) -> bool:
        """Say that the event has happened."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end_event: Event) -> float:
        """Return host milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of them was not recorded or was made without timing, as on a GPU.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.time_ns is None or end_event.time_ns is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event.time_ns - self.time_ns) / 1e6


class DeviceGuard:
    """``torch.cuda.device`` and ``device_of``: there is one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = 0
        self.prev_idx = 0
        self.requested = device

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_exception: object) -> None:
        return None


@contextlib.contextmanager
def _nothing(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _ignoring() -> Callable[..., None]:
    """Return a new function that does nothing; dynamo refuses one object under several names of torch."""

    def ignore(*_args: Any, **_kwargs: Any) -> None:
        return None

    return ignore


def _constant(value: Any) -> Callable[..., Any]:
    def answer(*_args: Any, **_kwargs: Any) -> Any:
        return value

    return answer


def _refuse(feature: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise CudaFeatureUnsupported(f"{feature} cannot be checked without a GPU")

    return refuse


_IGNORED = [
    "init",
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "set_stream",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
]
_ZERO = ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device"]
_REFUSED = {
    "CUDAGraph": "a CUDA graph",
    "graph": "a CUDA graph",
    "make_graphed_callables": "a CUDA graph",
    "graph_pool_handle": "a CUDA graph",
    "MemPool": "a CUDA memory pool",
    "CUDAPluggableAllocator": "a pluggable CUDA allocator",
    "cudart": "the CUDA runtime",
}
_LEGACY_TENSORS = ["Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool"]


def torch_cuda_members(facts: DeviceFacts) -> dict[str, Any]:
    """Return what ``torch.cuda`` holds for a machine with one device of the kind ``facts``.

    Names are those of ``torch.cuda``; the caller sets and restores them.
    """
    stream = Stream()
    members: dict[str, Any] = {name: _ignoring() for name in _IGNORED}
    members |= {name: _constant(0) for name in _ZERO}
    members |= {name: _refuse(feature) for name, feature in _REFUSED.items()}
    members |= {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in _LEGACY_TENSORS}
    members |= {
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_tf32_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": _constant(1),
        "get_device_name": _constant(facts.name),
        "get_device_capability": _constant(facts.capability),
        "get_device_properties": _constant(device_properties(facts)),
        "get_arch_list": _constant([facts.target]),
        "mem_get_info": _constant((facts.memory_bytes, facts.memory_bytes)),
        "memory_stats": _constant({}),
        "memory_summary": _constant(""),
        "can_device_access_peer": _constant(False),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": _nothing,
        "StreamContext": _nothing,
        "current_stream": _constant(stream),
        "default_stream": _constant(stream),
        "device": DeviceGuard,
        "device_of": DeviceGuard,
    }
    return members | _random_members()


def _random_members() -> dict[str, Any]:
    """The one device's generator is the CPU's, so that seeding it has an effect."""
    generator = torch.default_generator
    return {
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device=None: generator.get_state(),  # noqa: ARG005 - torch's signature
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device=None: generator.set_state(state),  # noqa: ARG005 - torch's signature
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "default_generators": (generator,),
    }


def nvtx_members() -> dict[str, Any]:
    """Return what ``torch.cuda.nvtx`` holds: markers that go nowhere."""
    return {"range_push": _ignoring(), "range_pop": _ignoring(), "mark": _ignoring(), "range": _nothing}


def accelerator_members() -> dict[str, Any]:
    """Return what ``torch.accelerator`` holds for one CUDA device."""
    return {
        "is_available": _constant(True),
        "device_count": _constant(1),
        "current_accelerator": _constant(torch.device("cuda")),
        "current_device_index": _constant(0),
        "current_device_idx": _constant(0),
        "set_device_index": _ignoring(),
        "synchronize": _ignoring(),
        "current_stream": _constant(Stream()),
    }
