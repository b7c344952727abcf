"""Recording and replaying: what is one kind of call, what runs plainly, and (on a GPU) that it is right and faster.

Without a GPU a stand-in plays the graph: it holds what ``launch`` did while it was recorded and does it again.
"""

import asyncio
import contextlib
import logging
import pickle

import pytest
import torch
from torch import nn

from drk.assistant.synth import BuiltinProposer
from drk.assistant.synth.graphed_template import GraphedCalls
from drk.gym.engine import Gym
from drk.gym.graph import graph_from_json
from drk.gym.runner.remap import device_remap
from drk.gym.schema import Call, Task, TensorSpec
from drk.gym.settings import GymSettings, Timing


class Graph:
    """Repeats what was done while it was being recorded."""

    recording = None

    def __init__(self):
        self.work = []

    def replay(self):
        for again in self.work:
            again()


@contextlib.contextmanager
def recorded(graph, pool, stream, *, capture_error_mode):
    assert capture_error_mode == "thread_local"
    Graph.recording = graph
    try:
        yield
    finally:
        Graph.recording = None


class Scale(nn.Module):
    """Counts its launches; ``forward`` as in an emitted module."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("shift", torch.ones(3))
        self.graphed, self.launches, self.fails = GraphedCalls(), 0, False

    def forward(self, x):
        return self.graphed(self, x)

    def launch(self, x):
        self.launches += 1
        if Graph.recording is not None and self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        work = lambda: x * self.weight.detach() + self.shift  # noqa: E731
        result = work()
        if Graph.recording is not None:
            Graph.recording.work.append(lambda: result.copy_(work()))
        return {"out": result, "more": (result, 3)}


@pytest.fixture
def gpu(monkeypatch):
    """A thread in which tensors say that they are on a GPU, and graphs can be recorded."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with device_remap(), torch.no_grad():
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", recorded)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        yield monkeypatch


def test_later_calls_replay_with_new_inputs_and_weights(gpu):
    model, x = Scale(), torch.randn(4, 3)
    first = model(x)
    assert model.launches == 4  # three to warm up, one to record
    kept = first["out"].clone()
    y = torch.randn(4, 3)
    second = model(y)
    assert torch.equal(second["out"], y * 2 + 1)
    assert torch.equal(first["out"], kept)
    model.weight.mul_(2)
    assert torch.equal(model(x)["out"], x * 4 + 1)
    assert model.launches == 4
    assert second["more"][1] == 3
    assert len({one.data_ptr() for one in (first["out"], second["out"], second["more"][0])}) == 3


def test_shapes_strides_dtypes_and_replaced_weights_are_kinds_of_their_own(gpu):
    model = Scale()
    calls = [torch.randn(4, 3), torch.randn(5, 3), torch.randn(3, 4).t(), torch.randn(4, 3, dtype=torch.float64)]
    for number, x in enumerate([*calls, torch.randn(4, 6)[:, ::2]], start=1):
        assert torch.equal(model(x)["out"], x * 2 + 1)
        assert len(model.graphed.recorded) == number
    model.weight = nn.Parameter(torch.full((3,), 5.0))
    model.shift.data = torch.zeros(3)
    assert torch.equal(model(calls[0])["out"], calls[0] * 5)
    assert len(model.graphed.recorded) == 6


def test_kinds_beyond_the_limit_run_plainly(gpu):
    model = Scale()
    model.graphed = GraphedCalls(2)
    for rows in (1, 2, 3, 4, 3):
        assert torch.equal(model(torch.ones(rows, 3))["out"], torch.full((rows, 3), 3.0))
    assert len(model.graphed.recorded) == 2
    assert model.launches == 2 * 4 + 3


def test_what_cannot_be_recorded_runs_plainly_and_is_told_once(gpu, caplog):
    model = Scale()
    model.fails = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert torch.equal(model(torch.ones(2, 3))["out"], torch.full((2, 3), 3.0))
    assert [one.message for one in caplog.records if one.name == GraphedCalls.__module__] == [
        "kernels are started one by one: operation not permitted when stream is capturing"
    ]
    assert model.launches == 4 + 3
    assert list(model.graphed.recorded.values()) == [None]


def test_errors_of_the_module_are_raised(gpu):
    model = Scale()
    gpu.setattr(model, "launch", lambda _x: (_ for _ in ()).throw(ValueError("of another shape")))
    with pytest.raises(ValueError, match="of another shape"):
        model(torch.ones(2, 3))
    assert not model.graphed.recorded


def test_gradients_autocast_and_other_captures_run_plainly(gpu):
    model, x = Scale(), torch.ones(2, 3)
    with torch.enable_grad():
        model(x)  # the weight needs gradients
        model.weight.requires_grad_(False)
        model(x.clone().requires_grad_())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        model(x)
    with gpu.context() as during:
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        model(x)
    assert not model.graphed.recorded
    assert model.launches == 4
    with torch.enable_grad():
        model(x)
    assert len(model.graphed.recorded) == 1


def test_results_of_inference_mode_do_not_spoil_later_calls(gpu):
    model, x = Scale(), torch.ones(2, 3)
    with torch.inference_mode():
        model(x)
    assert torch.equal(model(x + 1)["out"], x * 5)
    assert len(model.graphed.recorded) == 1


def test_without_a_gpu_and_under_the_interpreter_nothing_is_recorded(monkeypatch):
    model = Scale()
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 3))["out"], torch.full((2, 3), 3.0))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        model.graphed = GraphedCalls()
        with device_remap():
            model(torch.ones(2, 3))
    assert model.launches == 2
    assert not model.graphed.recorded


def test_compiled_code_sees_the_launches():
    model = Scale()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(2, 3))["out"], torch.full((2, 3), 3.0))


def test_pickles_carry_no_graph(gpu):
    model = Scale()
    model(torch.ones(2, 3))
    again = pickle.loads(pickle.dumps(model.graphed))  # noqa: S301 - our own
    assert not again.recorded
    assert again.holders is None


# --- on a GPU ------------------------------------------------------------------------------------------------

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12)
        )

    def forward(self, x):
        y = self.layers(x)
        return {"mean": torch.tanh(y), "size": y.square().sum(-1)}
"""


@pytest.mark.gpu
def test_a_graph_of_a_tiny_module_is_accepted_and_faster():
    task = Task("tiny", {"model.py": REFERENCE}, "model.py", "Model", inputs=Call((TensorSpec((32, 48)),)))

    async def judged():
        async with Gym(GymSettings(device="cuda:0", timing=Timing(compile_baseline=False, max_s=1.0))) as gym:
            graph = graph_from_json(await gym.capture(task))
            plain, graphed = BuiltinProposer().propose(graph, limit=2, graphs=True)
            return graphed, [await gym.evaluate(task, one) for one in (plain, graphed)]

    candidate, (plain, graphed) = asyncio.run(judged())
    assert candidate.note.endswith("in a CUDA graph")
    assert plain.accepted, (plain.error, plain.flags)
    assert graphed.accepted, (graphed.error, graphed.flags, graphed.notes)
    assert {flag.kind for flag in graphed.flags} == {flag.kind for flag in plain.flags}
    assert graphed.coverage is not None and graphed.coverage > 0.3  # the rest are copies of inputs and results
    assert graphed.latency_ms.high < plain.latency_ms.low
    assert graphed.speedups.eager.low > 1.2
