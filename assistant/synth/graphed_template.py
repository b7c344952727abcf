"""What a candidate in a CUDA graph holds beside its kernels: real code, copied as text.

Everything below the marker line goes into the emitted file (:mod:`drk.assistant.synth.graphed`); it needs torch only.
It is a module of its own so that type checker, linter and tests see it.

What is promised: a result never shares memory with an earlier one, with the inputs or with the graph; new values of
inputs and weights are always seen; whatever cannot be recorded runs as it would without a graph.

Left out: settings that are read while kernels are started (TF32 for library products, determinism) stay as they were
when a call was recorded; calls from several threads on one stream wait for one another.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import torch


# --- drk graphed ------------------------------------------------------------------------------------------------
class GraphedCalls:
    """Starts all kernels of a module's ``launch`` at once, as one CUDA graph for each kind of call.

    Calls are of one kind when stream, input shapes, strides and dtypes and the addresses of all weights are the same.
    The first one is recorded. Later ones copy their inputs to where the recorded ones lie, replay the graph, and return
    copies of its results. ``launch`` itself runs where there is no GPU or gradients are needed, under autocast, tracing
    or another capture, where recording failed, and for every kind after the first ``limit``. Global settings such as
    TF32 stay as they were when a call was recorded.
    """

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self.recorded: dict[Any, Any] = {}  # kind of call: graph, its inputs, its results; or None where that failed
        self.pools: dict[Any, Any] = {}  # stream: memory that its graphs share, and the stream that records them
        self.holders: list[Any] | None = None  # the dictionaries of the module and its parts that hold weights
        self.lock = threading.Lock()
        self.interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def __reduce__(self) -> Any:
        return GraphedCalls, (self.limit,)  # a copy of the module has other weights, so it records its own

    def __call__(self, module: Any, *inputs: Any) -> Any:
        """Return what ``module.launch(*inputs)`` would."""
        if not self.allowed(module, inputs):
            return module.launch(*inputs)
        kind = self.kind(inputs)
        with self.lock:
            if kind not in self.recorded and len(self.recorded) < self.limit:
                self.recorded[kind] = self.record(module, inputs)
            recording = self.recorded.get(kind)
            if recording is not None:
                graph, held, results = recording
                torch._foreach_copy_(held, inputs)
                graph.replay()
                return self.copied(results)
        return module.launch(*inputs)

    def allowed(self, module: Any, inputs: Any) -> bool:
        """Say whether this call may come from a graph."""
        if self.interpreted or torch.compiler.is_compiling() or torch.is_autocast_enabled("cuda"):
            return False
        if not all(one.is_cuda for one in inputs) or torch.cuda.is_current_stream_capturing():
            return False
        if self.holders is None:
            self.holders = [one for part in module.modules() for one in (part._parameters, part._buffers) if one]
        if not torch.is_grad_enabled():
            return True
        weights = [one for holder in self.holders for one in holder.values()]
        return not any(one.requires_grad for one in (*inputs, *weights))

    def kind(self, inputs: Any) -> tuple[Any, ...]:
        """Return what has to be as it was when a call was recorded. A graph reads weights by their addresses."""
        device = torch.cuda.current_device()
        found: list[Any] = [device, torch._C._cuda_getCurrentRawStream(device)]
        for one in inputs:
            found += (one.get_device(), one.shape, one.stride(), one.dtype)
        for holder in self.holders or ():
            for one in holder.values():
                found += (one.data_ptr(), one.dtype)
        return tuple(found)

    def record(self, module: Any, inputs: Any) -> Any:
        """Record one call; return the graph, its inputs and its results, or None where it cannot be recorded."""
        home, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.inference_mode(False), torch.no_grad():
            side.wait_stream(home)
            try:
                with torch.cuda.stream(side):
                    held = [torch.empty_like(one) for one in inputs]
                    torch._foreach_copy_(held, inputs)
                    for _ in range(3):  # compiles kernels and loads libraries, which a capture does not allow
                        module.launch(*held)
                    graph = torch.cuda.CUDAGraph()
                    if home not in self.pools:
                        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                        self.pools[home] = torch.cuda.graph_pool_handle(), stream
                    pool, stream = self.pools[home]
                    with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                        results = module.launch(*held)
                for one in held:
                    one.record_stream(home)
            except RuntimeError as error:
                logging.getLogger(__name__).warning("kernels are started one by one: %s", error)
                return None
            finally:
                home.wait_stream(side)
        return graph, held, results

    @staticmethod
    def copied(value: Any) -> Any:
        """Return the same structure with copies of its tensors: the next replay writes over the graph's own."""
        if isinstance(value, torch.Tensor):
            return value.clone()
        if isinstance(value, dict):
            return {key: GraphedCalls.copied(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(GraphedCalls.copied(item) for item in value)
        return value
