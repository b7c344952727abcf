"""CUDA graphs and the device's clock, with stand-ins for torch.cuda's classes: there is no GPU here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from drk.assistant.profile_clock import DeviceClock
from drk.assistant.profile_hooks import ProfileRecorder, watch
from drk.assistant.profile_recording import read_recordings
from drk.assistant.profile_trace import analyse, read_events


class FakeGraph:
    """Replays what was captured, as the real one does, without calling the module."""

    def __init__(self):
        self.work = None

    def capture_begin(self):
        pass

    def capture_end(self):
        pass

    def replay(self):
        return self.work()


@pytest.fixture
def capturing(monkeypatch):
    state = SimpleNamespace(on=False)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    monkeypatch.setenv("TEARDOWN_CUPTI", "1")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.on)
    return state


@pytest.fixture
def recorder(tmp_path, capturing):
    recorder = ProfileRecorder(tmp_path, 3, 600.0)
    restore = watch(nn.Module, recorder)
    yield recorder
    restore()
    recorder.finish()
    assert FakeGraph.replay.__qualname__ == "FakeGraph.replay"


def captured(net, x, capturing):
    graph = FakeGraph()
    graph.capture_begin()
    capturing.on = True
    net(x)
    capturing.on = False
    graph.capture_end()
    graph.work = lambda: x @ x
    return graph


def test_replays_are_steps_of_the_module_that_was_captured(recorder, capturing) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(4, 4)
    for _ in range(2):
        net(x)
    graph = captured(net, x, capturing)
    for _ in range(6):
        graph.replay()  # the line that replays
    recorder.finish()
    assert recorder.notes == []
    (told,) = read_recordings(recorder.folder)
    assert told.modules[0].calls == 9
    trace = analyse(read_events(recorder.folder / told.window.trace), told.step_root)
    assert len(trace.step_starts) == 3
    pieces = [piece for piece in trace.slices if piece.op == "aten::matmul"]
    assert len(pieces) == 3
    assert {piece.module for piece in pieces} == {0}
    file, line = told.lines[pieces[0].line]
    assert file == __file__
    assert "the line that replays" in Path(file).read_text().splitlines()[line - 1]


def test_nothing_is_looked_at_while_a_graph_is_captured(recorder, capturing) -> None:
    net, x = nn.Linear(4, 4), torch.randn(4, 4)
    captured(net, x, capturing)
    assert recorder.window.state == "waiting"  # the profiler starts after it
    assert recorder.all_entries[0].kinds[next(iter(recorder.all_entries[0].kinds))]["ranges"] == []


def test_a_graph_without_a_module_is_replayed_as_ever(recorder, capturing) -> None:
    nn.Linear(2, 2)(torch.randn(1, 2))
    graph = FakeGraph()
    graph.work = lambda: "done"
    assert graph.replay() == "done"
    assert recorder.all_entries[0].calls == 1


def test_what_stands_in_for_graphs_without_a_gpu_is_left_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    recorder = ProfileRecorder(tmp_path, 3, 600.0, on_gpu=False)
    restore = watch(nn.Module, recorder)
    nn.Linear(2, 2)(torch.randn(1, 2))
    restore()
    recorder.finish()
    assert recorder.notes == []


class FakeEvent:
    made = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.made += 1
        self.at = FakeEvent.made

    def query(self):
        return self.at <= 4

    def elapsed_time(self, later):
        return (later.at - self.at) * 2.0


def test_the_device_clock_tells_the_steps_that_are_over(monkeypatch) -> None:
    monkeypatch.setattr(FakeEvent, "made", 0)
    clock = DeviceClock(SimpleNamespace(cuda=SimpleNamespace(Event=FakeEvent)))
    for _ in range(6):
        clock.tick(3)
    assert clock.to_json() == {"3": [2000.0, 2000.0, 2000.0]}


def test_a_broken_context_is_left_to_the_program() -> None:
    def broken(enable_timing):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    clock = DeviceClock(SimpleNamespace(cuda=SimpleNamespace(Event=broken)))
    clock.tick(0)
    assert clock.to_json() == {"0": []}
