"""When graphs are tried, and in which order: by an estimate, and by verdicts."""

import pytest
import torch
from modules import Function, GatedMLP
from torch import nn

from drk.assistant.episode import Turn
from drk.assistant.proposers import BuiltinProposer as LoopProposer
from drk.assistant.proposers import ProposeContext
from drk.assistant.synth import BuiltinProposer, plans
from drk.assistant.synth.graphed import is_graphed
from drk.assistant.synth.graphed_choice import (
    CLEARLY,
    CONVOLUTION_US,
    KERNEL_US,
    OPERATOR_US,
    UNSURE,
    launch_bound,
    launch_excess,
    measured_us,
    starting_us,
)
from drk.assistant.synth.propose import Compiled
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


def form(launches, host_us):
    return Compiled("", (), (), launches=launches, host_us=host_us)


def test_the_estimate(small, wide, graph_of):
    assert launch_excess(small, form(4, 80.0), H200) >= CLEARLY
    assert launch_excess(small, form(1, 80.0), H200) == 0.0  # the copies cost as much as one launch
    assert launch_excess(small, form(2, 20.0), H200) == 0.0  # and a replay what two cheap ones do
    assert 0.0 < launch_excess(wide, form(2, 25.0), H200) < launch_excess(small, form(2, 25.0), H200)
    table = Function(lambda s, i: s.table(i) * 2 + 1, table=nn.Embedding(100_000, 64))
    rows = graph_of(table, torch.arange(32))
    assert launch_excess(rows, form(2, 40.0), H200) == 2.0  # it reads 32 rows, not the whole table


def test_inputs_are_weighed_by_what_their_copy_takes(graph_of):
    """51 MB in and 51 MB out, copied, cost about 40 us: little beside many launches, much beside two."""
    large = graph_of(Function(lambda _, x: x.exp()), torch.zeros(12_800, 1000))
    assert launch_excess(large, form(9, 260.0), H200) > 3.0
    assert launch_excess(large, form(2, 40.0), H200) < 1.0 / UNSURE * 2


def test_what_starting_costs(graph_of):
    net = Function(lambda s, x: s.conv(x).relu().flatten(1), conv=nn.Conv2d(3, 4, 3))
    nodes = graph_of(net, torch.randn(2, 3, 8, 8)).nodes
    assert [node.bare_op for node in nodes] == ["conv2d", "relu", "flatten"]
    assert starting_us([None, *nodes]) == KERNEL_US + CONVOLUTION_US + OPERATOR_US


@pytest.mark.parametrize(("steps", "order"), [(3, "pG"), (40, "Gp")])
def test_a_loop_of_many_small_operators_has_its_graph_first(graph_of, steps, order):
    def forward(module, x):
        state = x[:, 0] * 0
        for step in range(steps):
            state = module.mix(state.tanh() * x[:, step]) - state
        return state

    loop = graph_of(Function(forward, mix=nn.Linear(16, 16)), torch.randn(4, 40, 16))
    found = BuiltinProposer().propose(loop, hardware=H200, limit=2, graphs=True)
    assert shapes(found) == order


def test_a_second_call_plans_nothing_again(small, monkeypatch):
    proposer = BuiltinProposer()
    first = proposer.propose(small, hardware=H200, limit=3, graphs=True)
    history = [turn(first[0], 70.0, 60.0)]
    fresh = BuiltinProposer().propose(small, hardware=H200, history=history, limit=2, graphs=True)
    made = []
    real = plans.plan_graph
    monkeypatch.setattr(plans, "plan_graph", lambda *args, **options: made.append(args) or real(*args, **options))
    assert proposer.propose(small, hardware=H200, limit=3, graphs=True) == first
    assert proposer.propose(small, hardware=H200, history=history, limit=2, graphs=True) == fresh
    assert made == []


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
