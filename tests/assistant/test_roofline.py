from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.budget import Budget
from drk.assistant.optimize import Plan, begin_run, optimize
from drk.assistant.roofline import bound_us, least_bytes, least_memory_us
from drk.gym.devices import device_facts
from drk.gym.graph import graph_from_json
from drk.gym.schema import Candidate, Latency, Task

H200 = device_facts("h200")
# x and the output are 64 x 96, weight and shift 96, all fp32
LEAST = 2 * 64 * 96 * 4 + 2 * 96 * 4


def test_memory_bounds_a_pointwise_module(silu_graph: dict[str, Any]) -> None:
    graph = graph_from_json(silu_graph)
    assert least_bytes(graph) == LEAST
    assert least_memory_us(graph, H200) == pytest.approx(LEAST / 4.8e6)
    assert bound_us(graph, H200) == least_memory_us(graph, H200)


def test_arithmetic_bounds_where_memory_is_fast(silu_graph: dict[str, Any]) -> None:
    graph = graph_from_json(silu_graph)
    slow = replace(H200, peak_tflops={"fp32": 1e-6, "tf32": 2e-6})
    assert bound_us(graph, slow) > least_memory_us(graph, slow)


async def test_a_search_near_the_bound_ends(
    silu_task: Task, silu_graph: dict[str, Any], tmp_path: Path, make_gym: Any, verdicts: Any
) -> None:
    bound_ms = bound_us(graph_from_json(silu_graph), H200) / 1e3
    plan = Plan(silu_task, None, Budget(turns=5, samples=1), cache_dir=tmp_path / "cache")
    gpu = {"device": "cuda:0", "gpu": "NVIDIA H200"}
    judged = {}
    for name, factor in (("far", 1.5), ("near", 1.05)):
        sources = [f"# {name} {i}" for i in range(5)]
        latency = Latency(bound_ms * factor, bound_ms * factor, bound_ms * factor)
        gym = make_gym({one: verdicts.accepted(1.5, latency_ms=latency) for one in sources}, device_facts=gpu)

        class Next:
            name, ordered = "next", False

            async def propose(self, context: Any, sources: list[str] = sources) -> list[Candidate]:
                return [Candidate(sources[len(context.history)])]

        run = begin_run(plan, tmp_path / "runs", {})
        await optimize(plan, run, gym, Next(), emit=lambda _: None)
        judged[name] = len(gym.evaluated)
    assert judged == {"far": 5, "near": 1}
