"""Builders of profiler events and recordings, so that traces of a GPU can be tested without one."""

from __future__ import annotations

from typing import Any

from drk.assistant.profile_recording import RecordedInit, RecordedModule, RecordedWindow, Recording

FLOAT_ARGS = {"Input type": ["float", "float"], "Input Strides": [[], []], "Concrete Inputs": ["", ""]}


def host(
    name: str, start: float, duration: float, kind: str = "cpu_op", thread: int = 1, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 1, "tid": thread, "args": args}


def op(name: str, start: float, duration: float, dims: Any = None, sequence: int | None = None, **more: Any) -> dict:
    args: dict[str, Any] = {}
    if dims is not None:
        args["Input Dims"] = dims
        args["Input type"] = more.pop("types", ["float"] * len(dims))
    if "values" in more:
        args["Concrete Inputs"] = more.pop("values")
    if sequence is not None:
        args["Sequence number"] = sequence
    return host(name, start, duration, thread=more.pop("thread", 1), **args, **more)


def launch(correlation: int, start: float, duration: float = 2.0, thread: int = 1) -> dict[str, Any]:
    return host("cudaLaunchKernel", start, duration, "cuda_runtime", thread, correlation=correlation)


def kernel(name: str, correlation: int, start: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
    args = {
        "correlation": correlation,
        "grid": [64, 1, 1],
        "block": [128, 1, 1],
        "registers per thread": 32,
        "shared memory": 1024,
        "stream": 7,
    }
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "pid": 0, "tid": 7, "args": args}


def step(start: float, number: int, root: int = 0) -> dict[str, Any]:
    return host(f"drk|s|{root}|{number}", start, 0.1)


def gpu_step(at: float, number: int, correlation: int) -> list[dict[str, Any]]:
    """One training step of ``Net`` (module 0) with a ``Linear`` (module 1): three kernels forward, two backward.

    Device time 100 us: linear 40 (line 0), gelu 10 and mul 5 (line 1), their gradients 15 (line 1) and 30 (line 0).
    """
    size = [[1024, 256], [256, 256]]
    c = correlation
    return [
        step(at, number),
        host("drk|m|0", at + 1, 60),
        host("drk|m|1", at + 2, 20),
        host("drk|l|0", at + 3, 18),
        op("aten::linear", at + 4, 16, size, sequence=10 * number),
        op("aten::addmm", at + 5, 14, [[256], [1024, 256], [256, 256]], sequence=10 * number),
        launch(c, at + 6),
        host("drk|l|1", at + 30, 8),
        op("aten::gelu", at + 31, 6, [[1024, 256]], sequence=10 * number + 1),
        launch(c + 1, at + 32),
        host("drk|l|1", at + 40, 8),
        op("aten::mul", at + 41, 6, [[1024, 256], []], types=["float", "Scalar"], sequence=10 * number + 2),
        launch(c + 2, at + 42),
        op("autograd::engine::evaluate_function: GeluBackward0", at + 70, 10, sequence=10 * number + 1, thread=2),
        op("aten::gelu_backward", at + 71, 8, [[1024, 256], [1024, 256]], thread=2),
        launch(c + 3, at + 72, thread=2),
        op("autograd::engine::evaluate_function: AddmmBackward0", at + 82, 10, sequence=10 * number, thread=2),
        op("aten::mm", at + 83, 8, size, thread=2),
        launch(c + 4, at + 84, thread=2),
        kernel("gemm", c, at + 10, 40),
        kernel("gelu_kernel", c + 1, at + 50, 10),
        kernel("mul_kernel", c + 2, at + 60, 5),
        kernel("gelu_grad", c + 3, at + 80, 15),
        kernel("gemm_grad", c + 4, at + 95, 30),
    ]


def gpu_events(steps: int = 4, length: float = 150.0) -> list[dict[str, Any]]:
    return [event for number in range(steps) for event in gpu_step(1000 + number * length, number, 100 * number)]


def recording(**changes: Any) -> Recording:
    """A recording of ``Net`` with a ``Linear``, of files that need not exist."""
    values: dict[str, Any] = {
        "pid": 1,
        "argv": ["train.py"],
        "cwd": "/project",
        "environment": {"device": "NVIDIA H200", "torch": "2.13.0", "threads": 8, "python": "3.11.7"},
        "modules": (
            RecordedModule(0, 0, None, "", "Net", "/project/net.py", 2, 4, init=0),
            RecordedModule(1, 0, 0, "fc", "Linear", "/lib/linear.py", 0, 4),
        ),
        "inits": (RecordedInit("/project/net.py", "Net", [], {}),),
        "lines": (("/project/net.py", 10), ("/project/net.py", 11), ("/project/net.py", 30)),
        "steps": {"0": [0, 150_000, 300_000, 450_000]},
        "window": RecordedWindow("closed", "", "trace-1.json", {"0": 0}, True),
    }
    return Recording(**{**values, **changes})
