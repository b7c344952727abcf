"""Why nothing was won."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drk.assistant.episode import Episode, Turn
from drk.assistant.explanation import explain, explanation_lines
from drk.assistant.outcome import Outcome
from drk.gym.devices import device_facts
from drk.gym.graph import Graph, Node, Placeholder, Ref, TensorMeta
from drk.gym.schema import Candidate, KernelRow, Task

H100 = device_facts("sm_90")
TASK = Task("t", {"m.py": ""}, "m.py", "M")


def graph(op: str, size: int, count: int, dtype: str = "float32") -> Graph:
    meta = TensorMeta((size, size), dtype, (size, 1))
    inputs = tuple(Placeholder(name, "input", name, meta) for name in "xw")
    nodes = tuple(
        Node(f"n{index}", f"aten.{op}.default", (Ref("x"), Ref("w")), {}, (meta,), line=7) for index in range(count)
    )
    return Graph("export", False, (), (), inputs, nodes, Ref(f"n{count - 1}"))


def outcome(status: Any = "no-win", best: Turn | None = None) -> Outcome:
    return Outcome(status, "", best, Episode("t"))


def test_bounds_and_advice() -> None:
    launch = explain(outcome(), TASK, graph("tanh", 16, 12), H100)
    assert launch is not None and launch.bound == "launch"
    assert "starting 12 operators" in launch.reason
    assert "CUDA graphs" in launch.advice[0]
    memory = explain(outcome(), TASK, graph("mul", 8192, 2), H100)
    assert memory is not None and memory.bound == "memory"
    assert any("bfloat16" in text for text in memory.advice)
    compute = explain(outcome("failed"), TASK, graph("mm", 8192, 1), H100)
    assert compute is not None and compute.bound == "compute"
    assert compute.time == ("mm (line 7) 100% (estimated)",)
    assert any("--precision tf32" in text for text in compute.advice)
    narrow = explain(outcome(), replace(TASK, precision="tf32"), graph("mm", 8192, 1, "bfloat16"), H100)
    assert narrow is not None and narrow.advice == (
        "what calls this module: a larger region around it may hold more to fuse",
    )
    conv = explain(outcome(), TASK, graph("convolution", 512, 1), H100)
    assert conv is not None and any("channels-last" in text for text in conv.advice)


def test_what_was_tried_is_not_advised(verdicts: Any) -> None:
    candidate = Candidate("", note="Every product with its epilogue in one kernel, in a CUDA graph")
    tried = Turn(1, candidate, verdicts.accepted(0.9))
    found = explain(replace(outcome(), episode=Episode("t", (tried,))), TASK, graph("tanh", 16, 12), H100)
    assert found is not None and found.advice[0] == "larger batches: several calls in one"


def test_measured_kernels_replace_estimates(verdicts: Any) -> None:
    kernels = (KernelRow("mine", True, share=0.25), KernelRow("gemm", False, share=0.75), KernelRow("idle", False))
    best = Turn(1, Candidate(""), verdicts.accepted(0.9, kernels=kernels))
    found = explain(outcome(best=best), TASK, graph("mul", 8192, 2), H100)
    assert found is not None and found.time == ("gemm 75%", "mine 25%")
    lines = explanation_lines(found.to_json())
    assert lines[0].startswith("  why:       memory-bound")
    assert lines[1] == "  time:      gemm 75%, mine 25%"


def test_what_was_won_needs_no_reason() -> None:
    assert explain(outcome("optimised"), TASK, None, H100) is None
    assert explain(replace(outcome(), interrupted=True), TASK, None, H100) is None
    assert explanation_lines(None) == []
    uncaptured = explain(outcome(), TASK, None, H100)
    assert uncaptured is not None and uncaptured.bound is None
    assert "branches on data" in uncaptured.advice[0]
