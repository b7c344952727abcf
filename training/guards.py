"""What watches a run: metrics to JSONL, no step on a gradient that is not finite, no checkpoint on a full disk.

Callbacks of ``transformers.Trainer``. Each stops the run with an error that says what to do; none repairs in silence.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from drk.training.config import TrainConfig
from drk.training.errors import NotFiniteError
from drk.training.live_table import Report
from drk.training.model_facts import write_model_facts
from drk.training.run_folder import RunFolder, append_line


class MetricsWriter(TrainerCallback):  # type: ignore[misc] # the library has no types
    """Writes one JSON line a step, and tells ``report``."""

    def __init__(self, folder: RunFolder, report: Report) -> None:
        self._folder = folder
        self._report = report
        self._begun = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:  # noqa: ARG002
        """Write what was logged; numbers that are not finite become null."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        numbers = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        record = {"step": state.global_step, "time_s": round(time.monotonic() - self._begun, 3), **finite}
        append_line(self._folder.metrics, record)
        self._report(state.global_step, numbers)


class FiniteGradients(TrainerCallback):  # type: ignore[misc]
    """Stops before a step whose gradient is NaN or infinite: the weights stay those of the last good step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Look at every gradient.

        Raises:
            NotFiniteError: one is not finite.
        """
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        bad = [grad for grad in grads if not bool(torch.isfinite(grad).all())]
        if bad:
            raise NotFiniteError(
                f"the gradient of step {state.global_step + 1} is not finite in {len(bad)} of {len(grads)} tensors",
                help="the last checkpoint is good: the same command tries again from there; if it comes back, begin a "
                "new run from it (model.path, run.output_dir) with a lower optimizer.learning_rate, or in float32",
            )


class CheckpointGuard(TrainerCallback):  # type: ignore[misc]
    """Asks for room before a checkpoint, and marks it complete after."""

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        self._folder = folder
        self._config = config

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:  # noqa: ARG002
        """Check the room when a save is due.

        Raises:
            RunFolderError: there is too little.
        """
        if control.should_save and state.is_world_process_zero:
            sizes = [p.numel() * p.element_size() * (3 if p.requires_grad else 1) for p in model.parameters()]
            self._folder.need_space(sum(sizes), self._config.run.min_free_gb)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Say how the model wants to be asked, and mark what was saved."""
        if state.is_world_process_zero:
            write_model_facts(self._folder.checkpoints / f"checkpoint-{state.global_step}", self._config)
            self._folder.mark_complete(state.global_step, self._config)


class WallClock(TrainerCallback):  # type: ignore[misc]
    """Ends a run after the step in which its time is over; a checkpoint is saved, and the same command goes on.

    Processes agree on it, so that none waits for one that has ended.
    """

    def __init__(self, minutes: float) -> None:
        self._seconds = 60 * minutes
        self._begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Stop when it is time."""
        if self._seconds and any(gather_object([time.monotonic() - self._begun > self._seconds])):
            control.should_training_stop = True
            control.should_save = bool(args.save_strategy != "no")


def standard_callbacks(folder: RunFolder, report: Report, config: TrainConfig) -> list[TrainerCallback]:
    """Return what watches over every run: metrics, finite gradients, room for checkpoints, the clock."""
    return [
        MetricsWriter(folder, report),
        FiniteGradients(),
        CheckpointGuard(folder, config),
        WallClock(config.run.minutes),
    ]
