"""The trainer on a small random policy, with made-up or really sampled turns, without a gym. Needs the train extra."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from policy_parts import MadeUp, make_policy, make_tasks

from drk.training.backend_choice import make_backend
from drk.training.config import TrainConfig, load_config
from drk.training.guards import standard_callbacks
from drk.training.policy import load_policy, lora_settings
from drk.training.prompting import stop_ids
from drk.training.rl import trainer_arguments
from drk.training.rollout import Clock, Trajectory, TurnSample
from drk.training.run_folder import RunFolder
from drk.training.sampling import Prompt
from drk.training.trainer import TurnLevelTrainer

OVERRIDES = (
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.turns=2",
    "optimizer.max_grad_norm=1e9",
    "rejection.mrs=false",
    "rejection.width=0.0",
    "run.save_every=0",
    "run.min_free_gb=0.0",
)


class Gradients(transformers.TrainerCallback):
    """Keeps the first step's gradient by name (trained weights only), and the weights that it belongs to."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.first:
            named = list(model.named_parameters())
            self.first = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}
            self.weights = {name: p.detach().clone() for name, p in named}


class Sampled(MadeUp):
    """Made-up prompts and rewards, answers that the run's own sampler gives. ``trainer`` is set by :func:`build`."""

    trainer: Any = None

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: Any = None

    def __call__(self, items: Any, *, seed: int) -> tuple[list[Trajectory], Clock]:
        found, clock = super().__call__(items, seed=seed)
        if self.backend is None:
            tokenizer = self.trainer.processing_class
            stops = stop_ids(tokenizer, self.trainer.model)
            self.backend = make_backend(self.config, stops, tokenizer.pad_token_id, lambda: self.trainer)
        return asyncio.run(self._answers(found)), clock

    async def _answers(self, found: list[Trajectory]) -> list[Trajectory]:
        self.backend.begin(len(found))
        try:
            return list(await asyncio.gather(*(self._answer(one) for one in found)))
        finally:
            await self.backend.settle()

    async def _answer(self, one: Trajectory) -> Trajectory:
        turns: list[TurnSample] = []
        for row in one.turns:
            prompt = Prompt(row.prompt_ids, one.item.sample * 10 + row.turn, 8)
            said = await self.backend.generate(prompt)
            turns.append(replace(row, completion_ids=said.ids, sampling_logps=said.logps))
        self.backend.leave()
        return replace(one, turns=tuple(turns))


def settings_of(*overrides: str, steps: int = 1) -> TrainConfig:
    """Return the recipe ``nano-cpu`` for made-up turns."""
    return load_config("nano-cpu", [*OVERRIDES, *overrides, f"run.steps={steps}"])


def build(
    folder: Path,
    collect: Any,
    settings: TrainConfig,
    *,
    callbacks: Sequence[Any] = (),
    before_collect: Any = None,
    guarded: bool = False,
) -> tuple[TurnLevelTrainer, RunFolder]:
    """Return a trainer in ``folder`` (policy and run are made there) and its run's folder, which is open.

    ``guarded`` adds the callbacks of every real run.
    """
    policy = folder / "policy"
    if not policy.is_dir():
        make_policy(policy)
    run = RunFolder(folder / "run")
    run.open(settings)
    model, tokenizer = load_policy(str(policy), settings.model)
    order = [0, 1] * settings.run.steps
    trainer = TurnLevelTrainer(
        tasks=make_tasks(2),
        collect=collect,
        settings=settings,
        journal=run.journal,
        before_collect=before_collect,
        model=model,
        args=trainer_arguments(settings, run, 1),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"task-{i}", "task_index": i} for i in order]),
        processing_class=tokenizer,
        peft_config=lora_settings(settings.model),
        callbacks=[*(standard_callbacks(run, lambda *_: None, settings) if guarded else ()), *callbacks],
    )
    if isinstance(collect, Sampled):
        collect.trainer = trainer
    return trainer, run


def relative_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the size of the difference over the size of ``right``; both must have the same names."""
    assert left.keys() == right.keys()
    difference = sum(float((left[name].float() - right[name].float()).square().sum()) for name in right)
    return (difference / sum(float(one.float().square().sum()) for one in right.values())) ** 0.5
