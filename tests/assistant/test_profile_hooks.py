from __future__ import annotations

import copy
import json
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from drk.assistant.profile_hooks import ProfileRecorder, is_watched, watch
from drk.assistant.profile_marks import LineTable
from drk.assistant.profile_recording import read_recordings
from drk.assistant.profile_trace import analyse, read_events


class Part(nn.Module):
    def __init__(self, dim, scale=1.0):
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.scale = scale

    def forward(self, x, *, ids=None):
        return torch.relu(self.linear(x)) * self.scale  # the line of relu


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(8), Part(8, scale=2.0)])

    def forward(self, x):
        for part in self.parts:
            x = part(x, ids=torch.tensor([3, 1]))
        return x + x  # the line of add


@pytest.fixture
def watched(tmp_path, monkeypatch):
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")
    recorder = ProfileRecorder(tmp_path, 3, 600.0)
    restore = watch(nn.Module, recorder)
    yield recorder
    restore()
    recorder.finish()
    assert not is_watched(nn.Module)


def told(recorder):
    recorder.finish()
    (found,) = read_recordings(recorder.folder)
    return found


def run(steps=5):
    net = Whole()
    for _ in range(steps):
        net(torch.randn(4, 8)).sum().backward()
    return net


def test_calls_kinds_and_constructors_are_written_down(watched) -> None:
    run()
    found = told(watched)
    names = found.module_names()
    calls = {names[module.id]: module.calls for module in found.modules}
    assert calls == {
        "Whole": 5,
        **{f"Whole.parts.{i}": 5 for i in (0, 1)},
        **{f"Whole.parts.{i}.linear": 5 for i in (0, 1)},
    }
    part = next(module for module in found.modules if names[module.id] == "Whole.parts.1")
    (kind,) = part.kinds
    assert (kind.count, kind.training, kind.grad, kind.autocast) == (5, True, True, None)
    assert kind.args[0]["shape"] == [4, 8]
    assert kind.kwargs["ids"]["dtype"] == "int64"
    assert kind.ranges[1] == (1.0, 3.0)
    assert found.inits[part.init].kwargs == {"scale": {"kind": "scalar", "value": 2.0}}
    assert found.notes == ()


def test_operators_are_tied_to_modules_and_lines(watched) -> None:
    run()
    found = told(watched)
    trace = analyse(read_events(watched.folder / found.window.trace), found.step_root)
    assert [number for number, _ in trace.step_starts] == [0, 1, 2]
    lines = {piece.op: found.lines[piece.line] for piece in trace.slices if piece.line is not None}
    text = Path(__file__).read_text().splitlines()
    assert "the line of relu" in text[lines["aten::relu"][1] - 1]
    assert "the line of add" in text[lines["aten::add"][1] - 1]
    assert "sum().backward()" in text[lines["aten::sum"][1] - 1]
    names = found.module_names()
    modules = {piece.op: names[piece.module] for piece in trace.slices if piece.calls}
    assert modules["aten::linear"].endswith(".linear")
    assert modules["ReluBackward0"].startswith("Whole.parts.")
    known = sum(piece.duration_us for piece in trace.slices if piece.calls)
    assert known > 0.5 * sum(piece.duration_us for piece in trace.slices)


def test_copies_are_not_taken_for_constructions(watched) -> None:
    copied = copy.deepcopy(Part(4, scale=3.0))
    copied(torch.randn(2, 4))
    found = told(watched)
    assert found.modules[0].init is None
    assert [init.kwargs["scale"]["value"] for init in found.inits] == [3.0]


def test_programs_with_modes_of_their_own_keep_them(watched) -> None:
    net = Part(4)
    with torch.device("cpu"):
        net(torch.randn(2, 4))
        assert torch.get_default_device() == torch.device("cpu")
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        net(torch.randn(2, 4, device="cpu"))
        assert torch.empty(2).device.type == "meta"
    assert torch.empty(2).device.type == "cpu"
    assert torch.overrides._get_current_function_mode_stack() in ([], [watched.window.slot._mode])
    for _ in range(4):
        net(torch.randn(2, 4))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_what_the_program_raises_goes_through_and_calls_stay_balanced(watched) -> None:
    net = Whole()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        net(torch.randn(4, 9))
    net(torch.randn(4, 8))
    assert watched.stacks.stack == []
    assert watched.active


def test_a_fault_of_the_recorder_does_not_reach_the_program(watched, monkeypatch) -> None:
    def broken(*_):
        raise ValueError("ours")

    monkeypatch.setattr(watched, "count_kind", broken)
    assert Part(4)(torch.randn(2, 4)).shape == (2, 4)
    assert not watched.active
    data = json.loads(next(watched.folder.glob("recording-*.json")).read_text())
    assert "ours" in data["notes"][0]


def test_steps_are_calls_of_the_root_with_most_parts(watched) -> None:
    net, metric = Whole(), nn.Identity()
    for _ in range(5):
        metric(net(torch.randn(4, 8)))
        metric(torch.randn(2))
    found = told(watched)
    assert found.module_names()[found.step_root] == "Whole"
    trace = analyse(read_events(watched.folder / found.window.trace), found.step_root)
    assert [number for number, _ in trace.step_starts] == [0, 1, 2]


def test_large_tensors_are_not_looked_into(watched, monkeypatch) -> None:
    monkeypatch.setattr("drk.assistant.capture_values.MAX_LOOKED_AT", 8)
    Part(4)(torch.full((4, 4), float("nan")))
    (kind,) = told(watched).modules[0].kinds
    assert kind.ranges == (None,)
    assert "file" not in kind.args[0]


def test_threads_have_stacks_of_their_own(watched) -> None:
    net = Whole()
    net(torch.randn(4, 8))
    threads = [threading.Thread(target=net, args=(torch.randn(4, 8),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = told(watched)
    assert {module.calls for module in found.modules} == {5}
    assert {module.parent for module in found.modules if module.path == ""} == {None}


def test_compiled_modules_stay_compiled(watched) -> None:
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    net = torch.compile(Part(4), backend=backend)
    for _ in range(5):
        net(torch.randn(2, 4))
    found = told(watched)
    assert len(graphs) == 1
    assert (found.modules[0].class_name, found.modules[0].compiled) == ("Part", True)
    assert found.window.first_step == {"0": 1}  # the step that compiled is no step of the window
    assert not found.window.lines
    trace = analyse(read_events(watched.folder / found.window.trace), 0)
    sites = {piece.op: Path(found.lines[piece.line][0]).name for piece in trace.slices if piece.line is not None}
    assert sites["aten::randn"] == Path(__file__).name  # what runs between calls has its line
    assert "aten::relu" not in sites
    torch._dynamo.reset()


def test_a_second_watcher_can_be_told(watched) -> None:
    assert is_watched(nn.Module)


def test_libraries_are_not_the_users_code(tmp_path) -> None:
    table = LineTable()
    assert table.is_user(__file__)
    assert not table.is_user(torch.__file__)
    assert not table.is_user(json.__file__)
    assert not table.is_user("<string>")
    assert not LineTable((str(tmp_path),)).is_user(str(tmp_path / "x.py"))
