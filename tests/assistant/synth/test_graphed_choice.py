"""When graphs are tried, and in which order: by an estimate, and by verdicts."""

import pytest
import torch
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.episode import Turn
from drk.assistant.proposers import BuiltinProposer as LoopProposer
from drk.assistant.proposers import ProposeContext
from drk.assistant.synth import BuiltinProposer
from drk.assistant.synth.graphed import is_graphed
from drk.assistant.synth.graphed_choice import launch_bound, measured_us, seems_launch_bound
from drk.gym.devices import device_facts
from drk.gym.schema import Candidate, KernelRow, Latency, Task, Verdict

H200 = device_facts("h200")


@pytest.fixture(scope="module")
def small(graph_of):
    return graph_of(GatedMLP(), torch.randn(2, 5, 48))


@pytest.fixture(scope="module")
def wide(graph_of):
    """One kernel that moves 33 MB."""
    return graph_of(Function(lambda _, x: x.exp() * 2 + 1), torch.randn(4096, 1024))


def turn(candidate, latency_us, device_us, status="accepted"):
    kernels = (KernelRow("a", owned=True, time_us=device_us / 2), KernelRow("b", owned=False, time_us=device_us / 2))
    latency = Latency(latency_us / 1e3, latency_us / 1e3, latency_us / 1e3)
    verdict = Verdict(status, "gpu", "measured", True, True, latency_ms=latency, kernels=kernels)
    return Turn(1, candidate, verdict)


def propose(graph, history=(), **options):
    return BuiltinProposer().propose(graph, hardware=H200, history=history, limit=50, **{"graphs": True, **options})


def shapes(found):
    return "".join("G" if is_graphed(one.source) else "p" for one in found)


def test_a_small_module_has_its_first_candidate_in_a_graph_second(small):
    found = propose(small)
    assert shapes(found) == "pG" + "p" * (len(found) - 2)
    assert found[1].note == f"{found[0].note}, in a CUDA graph"
    assert [one.source for one in propose(small, graphs=False)] == [one.source for one in found if one is not found[1]]


def test_the_estimate(small, wide, graph_of):
    assert seems_launch_bound(small, 4, H200)
    assert not seems_launch_bound(small, 1, H200)  # the copies cost as much as one launch
    assert not seems_launch_bound(wide, 2, H200)
    table = Function(lambda s, i: s.table(i) * 2 + 1, table=nn.Embedding(100_000, 64))
    assert seems_launch_bound(graph_of(table, torch.arange(32)), 2, H200)  # it reads 32 rows, not the whole table
    large = Function(lambda _, x: x[:1].exp() * 2)
    assert not seems_launch_bound(graph_of(large, torch.zeros(2049, 1024)), 9, H200)


def test_a_launch_bound_verdict_puts_its_candidate_in_a_graph_next(wide):
    first, second = propose(wide)[:2]
    assert not is_graphed(second.source)
    slow = [turn(first, 70.0, 12.0), turn(second, 71.0, 11.0)]
    best = propose(wide, slow)[0]
    assert is_graphed(best.source)
    assert best.note == f"{second.note}, in a CUDA graph"  # the one that takes the device the least time
    tried = [*slow, turn(best, 80.0, 11.0)]
    assert "G" not in shapes(propose(wide, tried))


@pytest.mark.parametrize(
    ("latency_us", "device_us", "status"),
    [(107.0, 75.0, "accepted"), (70.0, 12.0, "rejected"), (9000.0, 1200.0, "accepted"), (45.0, 12.0, "accepted")],
    ids=["busy device", "wrong", "long", "copies cost as much"],
)
def test_other_verdicts_do_not(wide, latency_us, device_us, status):
    history = [turn(propose(wide)[0], latency_us, device_us, status)]
    assert launch_bound(wide, history, H200) is None
    assert "G" not in shapes(propose(wide, history))


def test_only_this_proposers_candidates_count(wide):
    other = Candidate(propose(wide)[0].source, proposer="user")
    assert launch_bound(wide, [turn(other, 70.0, 12.0)], H200) is None


def test_once_graphs_lead_all_others_come_in_graphs_first(small):
    everything = propose(small)
    plain, graphed = everything[:2]
    history = [turn(plain, 300.0, 20.0), turn(graphed, 40.0, 20.0)]
    rest = propose(small, history)
    count = len(everything) - 2
    assert shapes(rest) == "G" * count + "p" * count
    behind = propose(small, [turn(plain, 300.0, 20.0), turn(graphed, 320.0, 20.0)])
    assert shapes(behind) == "p" * count


def test_what_no_gpu_measured_has_no_times():
    assert measured_us(None) == (0.0, 0.0)
    assert measured_us(Verdict("accepted", "interpreter", "correct", True, None)) == (0.0, 0.0)


async def test_the_loop_asks_for_graphs_on_a_gpu_without_autocast_only(small):
    async def offered(**changes):
        task = Task("t", {"m.py": ""}, "m.py", "Model", autocast=changes.pop("autocast", None))
        found = await LoopProposer().propose(ProposeContext(task, small, H200, limit=3, **changes))
        return shapes(found)

    assert await offered(on_gpu=True) == "pGp"
    assert await offered() == "ppp"
    assert await offered(on_gpu=True, autocast="bfloat16") == "ppp"
