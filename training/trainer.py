"""The turn-level trainer: TRL's GRPOTrainer with one method replaced (turn = row).

``_generate_and_score_completions`` is the one point through which every sample passes. Here it collects trajectories
(:mod:`drk.training.rollout`), lays turns out as rows, and hands TRL the dict that its loss reads. Loss, gradient
accumulation, checkpoints, PEFT, DDP and FSDP stay TRL's. With one optimizer step a collection the probability ratio is
1, no clip is active, and the loss is REINFORCE with the advantages of :mod:`drk.training.advantages`.

Of TRL's internals this uses: the dict's keys, ``_metrics``, ``_get_per_token_logps_and_entropies(...)[0]``,
``accelerator`` and ``num_generations``. The method's body is not copied, so that TRL may change it; a contract test
compares the gradient with one written by hand, and guards each upgrade.

Honest limits: tried with TRL 1.16 on CPU with one and two processes (DDP). Prefixes are computed anew for each turn.
Weight transfer into a vLLM server (``vllm_generation.sync_weights``) is TRL's, and was not run here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer

from drk.gym.schema import Task
from drk.training.batch import RowTensors, decide, matched_rows, row_records, row_tensors
from drk.training.config import TrainConfig
from drk.training.errors import EmptyBatchError, TrainingError
from drk.training.mismatch import diagnostics
from drk.training.rollout import Clock, RolloutItem, Trajectory, TurnSample, journal_row, unequal_groups


class GymFaults(TrainingError):
    """So many trajectories were lost to faults of the gym or the sampler that going on would be no training."""


class SamplerRestarted(TrainingError):
    """The sampler was away again and again: it may have come back with other weights than the trainer's."""


class Collect(Protocol):
    """Collects one trajectory an item, blocking; ``seed`` repeats it."""

    def __call__(self, items: Sequence[RolloutItem], *, seed: int) -> tuple[list[Trajectory], Clock]:
        """Return trajectories in the order of ``items``."""
        ...


@dataclass(frozen=True)
class Collected:
    """One process's share of a step: its rows, their tensors, and how long things took."""

    rows: list[TurnSample]
    tensors: RowTensors
    matched: list[bool]
    count: int


class TurnLevelTrainer(GRPOTrainer):  # type: ignore[misc] # TRL has no types
    """GRPOTrainer whose rows are turns.

    Args:
        tasks: by the dataset's ``task_index``.
        collect: gives trajectories.
        settings: the run's configuration.
        journal: a JSONL file for every turn, or None; each process writes its own.
        before_collect: called before each collection, or None; sends the weights to where they are sampled from.
        options: what GRPOTrainer takes.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        collect: Collect,
        settings: TrainConfig,
        journal: Path | None = None,
        before_collect: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(reward_funcs=[_never_called], **options)
        self._tasks = tasks
        self._collect = collect
        self._drk = settings
        self._journal = journal
        self._before_collect = before_collect
        self._was_away = False

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        items, attempts = self._items(inputs), self._drk.rollout.empty_attempts
        for attempt in range(attempts):
            if self._before_collect is not None:
                self._before_collect(self)
            batch = self._attempt(items, seed=self._step_seed(attempt))
            if batch is not None:
                return batch
        if self._was_away:
            raise SamplerRestarted(
                f"the sampler was away in {attempts} collections of the same tasks, so its weights are in doubt",
                help="mend the server and start the same command again: it resumes at the last checkpoint",
            )
        raise EmptyBatchError(
            f"rejection left no token to train on in {attempts} collections of the same tasks",
            help="sample and train in the same precision, or widen rejection.low and rejection.high in a new run "
            "(run.output_dir) from the last checkpoint (model.path)",
        )

    def _items(self, inputs: Sequence[dict[str, Any]]) -> list[RolloutItem]:
        # the sample's number is its place in the whole step, whatever the number of processes
        first, section = self.accelerator.process_index * len(inputs), self._drk.rollout
        mine = [int(row["task_index"]) for row in inputs]
        if section.group_sizes == "unequal":
            mine = unequal_groups(gather_object(mine), section.samples_per_prompt)[first : first + len(inputs)]
        return [RolloutItem(self._tasks[task], task, first + place) for place, task in enumerate(mine)]

    def _step_seed(self, attempt: int) -> int:
        step: int = self.state.global_step
        return (self._drk.run.seed * 1_000_003 + step) * 16 + attempt

    def _attempt(self, items: list[RolloutItem], *, seed: int) -> dict[str, Any] | None:
        """Collect once and return the batch, or None when nothing is left of it (on every process alike)."""
        mode = "train" if self.model.training else "eval"
        begun = time.monotonic()
        trajectories, clock = self._collect(items, seed=seed)
        self._metrics[mode]["time/rollout_s"].append(time.monotonic() - begun)
        self._metrics[mode]["time/sampling_s"].append(clock.sampling_s)
        said = sum(len(turn.completion_ids) for one in trajectories for turn in one.turns)
        self._metrics[mode]["time/tokens_per_s"].append(said / max(clock.sampling_s, 1e-9))
        self._metrics[mode]["time/judging_sum_s"].append(clock.judging_sum_s)
        self._metrics[mode]["gym/judged"].append(float(clock.judged))
        self._metrics[mode]["gym/kept"].append(float(clock.kept))
        self._note_endings(trajectories, mode)
        # weights that are sent are gone when the sampler starts anew: what it said is not this policy's
        self._was_away = self._before_collect is not None and any(gather_object([clock.outages > 0]))
        if self._was_away:
            return None
        self._write_journal(trajectories)
        collected = self._lay_out([turn for one in trajectories for turn in one.turns], mode)
        local = row_records(collected.rows, collected.matched, count=collected.count)
        records = gather_object(local)
        decision = decide(records, self._drk, seed=seed)
        for name, value in decision.metrics.items():
            self._metrics[mode][name].append(value)
        if decision.tokens == 0:
            return None
        first = self.accelerator.process_index * collected.count
        mine = slice(first, first + collected.count)
        return self._loss_inputs(collected, decision.advantages[mine], decision.keep[mine], decision.tokens)

    def _note_endings(self, trajectories: Sequence[Trajectory], mode: str) -> None:
        endings = gather_object([(one.ending, one.cause) for one in trajectories])
        for name in ("fault", "straggler", "context"):
            share = sum(ending == name for ending, _ in endings) / max(len(endings), 1)
            self._metrics[mode][f"trajectories/{name}_share"].append(share)
        gone = [cause for ending, cause in endings if ending in ("fault", "straggler")]
        if len(gone) > self._drk.gym.max_fault_share * len(endings):
            raise GymFaults(
                f"{len(gone)} of {len(endings)} trajectories were lost to faults; the last said: {gone[-1]}",
                help="mend the gym or the sampler and start the same command again: it resumes at the last checkpoint",
            )

    def _lay_out(self, rows: list[TurnSample], mode: str) -> Collected:
        """Pad to equal counts on all processes, and compare sampler and trainer."""
        most = max(gather_object([len(rows)]))
        parts = self.args.steps_per_generation
        count = max(-(-most // parts), 1) * parts
        tensors = row_tensors(rows, count=count, pad_id=self.processing_class.pad_token_id)
        matched = [True] * len(rows)
        if self._drk.rejection.mrs:
            begun = time.monotonic()
            train_logp = self._train_logp(tensors)
            self._metrics[mode]["time/logp_s"].append(time.monotonic() - begun)
            matched = matched_rows(train_logp, tensors, rows, self._drk)
            real = tensors.completion_mask.clone()
            real[len(rows) :] = 0
            for name, value in diagnostics(train_logp.cpu(), tensors.sampling_logps, real).items():
                self._metrics[mode][f"mismatch/{name}"].append(value)
        return Collected(rows, tensors, matched, count)

    def _train_logp(self, tensors: RowTensors) -> Tensor:
        device = self.accelerator.device
        with torch.no_grad():
            found: Tensor = self._get_per_token_logps_and_entropies(
                self.model,
                tensors.input_ids.to(device),
                tensors.attention_mask.to(device),
                tensors.completion_ids.shape[1],
                batch_size=max(tensors.input_ids.shape[0] // self.args.steps_per_generation, 1),
            )[0]
        return found

    def _loss_inputs(self, collected: Collected, advantages: Tensor, keep: Tensor, tokens: int) -> dict[str, Any]:
        tensors, device = collected.tensors, self.accelerator.device
        divisor = float(tokens)
        if self._drk.optimizer.divisor == "planned":
            # the recipe's aggregation: rows planned times 1000, so that a step does not grow when rows are rejected
            section = self._drk.rollout
            divisor = 1000.0 * section.prompts_per_step * section.samples_per_prompt * section.turns
        keep_tokens = keep[:, None].expand_as(tensors.completion_mask).to(torch.int64)
        return {
            "prompt_ids": tensors.prompt_ids.to(device),
            "prompt_mask": tensors.prompt_mask.to(device),
            "completion_ids": tensors.completion_ids.to(device),
            "completion_mask": tensors.completion_mask.to(device),
            "tool_mask": keep_tokens.to(device),
            "advantages": advantages.to(device),
            "num_items_in_batch": torch.tensor(divisor, device=device),
        }

    def _write_journal(self, trajectories: Sequence[Trajectory]) -> None:
        if self._journal is None:
            return
        step = self.state.global_step + 1
        with self._journal.open("a", encoding="utf-8") as file:
            for one in trajectories:
                for row in one.turns:
                    file.write(json.dumps(journal_row(row, one.item.task.name, step)) + "\n")


def _never_called(**_: Any) -> list[float]:
    """Stand in for the reward function that GRPOTrainer wants; rewards come with the rollouts."""
    raise TrainingError("GRPOTrainer's own scoring was called, which turn rows replace")
