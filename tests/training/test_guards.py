from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate", reason="needs the train extra")

import torch

from drk.training import guards
from drk.training.config import load_config
from drk.training.errors import NotFiniteError
from drk.training.guards import CheckpointGuard, FiniteGradients, MetricsWriter, WallClock
from drk.training.run_folder import RunFolder, RunFolderError

MAIN = SimpleNamespace(is_world_process_zero=True, global_step=4)


def test_a_gradient_that_is_not_finite_stops_before_the_step() -> None:
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    guard = FiniteGradients()
    guard.on_pre_optimizer_step(None, MAIN, None, model=model)
    assert model.weight.grad is not None
    model.weight.grad[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match="step 5 is not finite in 1 of 2 tensors"):
        guard.on_pre_optimizer_step(None, MAIN, None, model=model)


def test_metrics_are_written_and_told(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path), []
    writer = MetricsWriter(folder, lambda step, numbers: told.append((step, numbers)))
    writer.on_log(None, MAIN, None, logs={"loss": 0.5, "odd": float("nan"), "text": "x"})
    writer.on_log(None, MAIN, None, logs={"train_runtime": 3.0})
    writer.on_log(None, SimpleNamespace(is_world_process_zero=False, global_step=4), None, logs={"loss": 1.0})
    (line,) = [json.loads(text) for text in folder.metrics.read_text().splitlines()]
    assert (line["step"], line["loss"], line["odd"]) == (4, 0.5, None)
    assert len(told) == 1


def test_a_checkpoint_is_refused_without_room_and_marked_when_whole(tmp_path: Path) -> None:
    config = load_config("nano-cpu")
    folder = RunFolder(tmp_path)
    folder.open(config)
    (folder.checkpoints / "checkpoint-4").mkdir()
    guard = CheckpointGuard(folder, config)
    guard.on_step_end(None, MAIN, SimpleNamespace(should_save=True), model=torch.nn.Linear(2, 2))
    guard.on_save(None, MAIN, None)
    assert folder.last_checkpoint() == folder.checkpoints / "checkpoint-4"
    greedy = CheckpointGuard(folder, load_config("nano-cpu", ["run.min_free_gb=1e9"]))
    with pytest.raises(RunFolderError, match="no room"):
        greedy.on_step_end(None, MAIN, SimpleNamespace(should_save=True), model=torch.nn.Linear(2, 2))


def clock_after(
    minutes: float, spent_s: float, monkeypatch: pytest.MonkeyPatch, *, save: str = "steps"
) -> SimpleNamespace:
    """Return what a clock of ``minutes`` asks for at the end of a step ``spent_s`` seconds after it was made."""
    now = [1000.0]
    monkeypatch.setattr(guards.time, "monotonic", lambda: now[0])
    clock = WallClock(minutes)
    now[0] += spent_s
    control = SimpleNamespace(should_training_stop=False, should_save=False)
    clock.on_step_end(SimpleNamespace(save_strategy=save), MAIN, control)
    return control


def test_the_clock_ends_a_run_after_its_step_and_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    before = clock_after(2.0, 119.0, monkeypatch)
    assert (before.should_training_stop, before.should_save) == (False, False)
    after = clock_after(2.0, 121.0, monkeypatch)
    assert (after.should_training_stop, after.should_save) == (True, True)
    unsaved = clock_after(2.0, 121.0, monkeypatch, save="no")
    assert (unsaved.should_training_stop, unsaved.should_save) == (True, False)
    assert not clock_after(0.0, 1e9, monkeypatch).should_training_stop  # 0: no limit


def test_processes_agree_that_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # another process's clock is ahead: this one stops with it
    monkeypatch.setattr(guards, "gather_object", lambda mine: [*mine, True])
    assert clock_after(2.0, 1.0, monkeypatch).should_training_stop
