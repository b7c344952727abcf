"""Whole candidates or regions first: by what was captured, how large it is, and what was judged so far."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.budget import Budget
from drk.assistant.episode import Turn
from drk.assistant.proposers import ProposeContext
from drk.assistant.regions_search import LARGE_NODES, MAX_WHOLE_KERNELS, RegionsProposer, RegionsWork
from drk.assistant.runs import create_run
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.devices import device_facts
from drk.gym.graph import Graph, graph_from_json
from drk.gym.schema import Candidate, Task


class Whole:
    """Proposes whole candidates without end; notes how many it was asked for."""

    name = "builtin"
    ordered = True

    def __init__(self, source: str = "# whole") -> None:
        self.source = source
        self.limits: list[int] = []

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        self.limits.append(context.limit)
        done = len(context.history)
        return [Candidate(f"{self.source} {done + number}", "builtin") for number in range(context.limit)]


class Cut:
    """A gym that only notes that the module's parts were asked for."""

    def __init__(self) -> None:
        self.cut = 0

    async def parts(self, task: Task) -> list[Any]:
        self.cut += 1
        return []


@pytest.fixture
def graph(silu_graph: Any) -> Graph:
    return graph_from_json(silu_graph)


@pytest.fixture
def large(graph: Graph) -> Graph:
    return replace(graph, nodes=graph.nodes * (LARGE_NODES // len(graph.nodes) + 1))


@pytest.fixture
def gym() -> Cut:
    return Cut()


@pytest.fixture
def make(silu_task: Task, tmp_path: Path, gym: Any) -> Any:
    def proposer(then: Whole) -> RegionsProposer:
        run = create_run(tmp_path / "runs", silu_task, {})
        work = RegionsWork(run, gym, VerdictCache(None, {}), Budget(), lambda _event: None, asyncio.Event(), True)
        return RegionsProposer(then, work)

    return proposer


def context(task: Task, graph: Graph | None, *history: Turn, turn: int = 0) -> ProposeContext:
    return ProposeContext(task, graph, device_facts("h200"), history, turn=turn, on_gpu=True)


def turns(proposer: str, *verdicts: Any) -> list[Turn]:
    return [Turn(1, Candidate(f"# {number}", proposer), verdict) for number, verdict in enumerate(verdicts)]


async def test_a_large_module_is_judged_whole_before_it_is_cut(
    silu_task: Task, large: Graph, gym: Cut, make: Any, verdicts: Any
) -> None:
    then = Whole()
    found = await make(then).propose(context(silu_task, large, turn=1))
    assert (len(found), gym.cut) == (2, 0)
    won = turns("builtin", verdicts.accepted(1.3), verdicts.accepted(0.8))
    assert len(await make(then).propose(context(silu_task, large, *won, turn=2))) == 4
    assert gym.cut == 0
    given = turns("user", verdicts.refused())
    assert len(await make(then).propose(context(silu_task, large, *given, turn=2))) == 2
    assert gym.cut == 0


async def test_a_large_module_is_cut_where_the_first_step_brought_no_win(
    silu_task: Task, large: Graph, gym: Cut, make: Any, verdicts: Any
) -> None:
    slow = turns("builtin", verdicts.accepted(0.8), verdicts.refused())
    found = await make(Whole()).propose(context(silu_task, large, *slow, turn=2))
    assert gym.cut == 1
    assert len(found) == 4  # no part was found: the whole goes on
    assert await make(Whole()).propose(context(silu_task, large, turn=2))
    assert gym.cut == 2  # what was proposed first could not be judged


async def test_too_many_kernels_are_not_compiled_before_the_regions(
    silu_task: Task, large: Graph, gym: Cut, make: Any
) -> None:
    then = Whole("@triton.jit\n" * (MAX_WHOLE_KERNELS + 1) + "#")
    found = await make(then).propose(context(silu_task, large, turn=1))
    assert gym.cut == 1
    assert then.limits == [2, 4]
    assert len(found) == 4


@pytest.mark.parametrize("captured", [True, False])
async def test_a_small_module_is_cut_only_where_nothing_whole_is_left(
    silu_task: Task, graph: Graph, gym: Cut, make: Any, captured: bool
) -> None:
    await make(Whole()).propose(context(silu_task, graph if captured else None, turn=1))
    assert gym.cut == (0 if captured else 1)
