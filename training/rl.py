"""``drk train rl``: puts tasks, gym, policy, rollouts and the turn-level trainer together, and runs them.

One event loop in the main thread holds the gym for the life of the run; it runs while trajectories are collected and
rests while the model is updated. With several processes (``accelerate launch``) each has its own gym and collects its
own share; advantages are computed over all of them. A run resumes by itself from its last whole checkpoint: the order
of tasks is fixed by the seed, each row's draws by seed, step, sample and turn.

Honest limits: a resumed GPU run is exact only as far as kernels' measured speeds repeat, since rewards depend on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig

from drk.assistant.verdict_cache import VerdictCache
from drk.gym.engine import Gym
from drk.gym.schema import Task
from drk.gym.settings import GymSettings, Limits, Timing
from drk.training.backend_choice import make_backend, sync_served_weights
from drk.training.backends import PolicyBackend
from drk.training.config import GymSection, TrainConfig
from drk.training.dataset import read_tasks
from drk.training.device_speed import ReferenceTimes
from drk.training.errors import OptionError
from drk.training.guards import standard_callbacks
from drk.training.live_table import Report
from drk.training.model_facts import write_model_facts
from drk.training.policy import load_policy, lora_settings, make_tiny
from drk.training.prompting import Prompter, PromptSettings, stop_ids
from drk.training.rollout import Clock, Collector, RolloutItem, Trajectory
from drk.training.run_folder import RunFolder, disk_errors, step_of
from drk.training.scoring import PatientJudge
from drk.training.tasks import TrainingTask, draw_tasks
from drk.training.trainer import TurnLevelTrainer
from drk.training.validation import PolicyProposer, Validation


@dataclass(frozen=True)
class Trained:
    """How a run ended: its folder, the steps made, the step that it resumed at (0: from the start)."""

    folder: Path
    final: Path
    steps: int
    resumed_at: int

    def facts(self) -> dict[str, Any]:
        """Return the outcome as JSON-able values."""
        return {
            "folder": str(self.folder),
            "model": str(self.final),
            "steps": self.steps,
            "resumed_at": self.resumed_at,
        }


def load_tasks(config: TrainConfig, *, held_out: bool = False) -> list[TrainingTask]:
    """Return the run's tasks: from a file, or drawn.

    Raises:
        DatasetError: the file cannot be read.
        OptionError: the generator cannot give so many, or the file is empty.
    """
    section = config.tasks
    if section.path and not held_out:
        found = read_tasks(Path(section.path))
        if not found:
            raise OptionError(f"{section.path} holds no task")
        return found
    return draw_tasks(
        section.held_out if held_out else section.count,
        families=section.held_out_families if held_out and section.held_out_families else section.families,
        seed=section.seed,
        rows=section.rows,
        split="held-out" if held_out else "train",
        held_out_families=section.held_out_families,
        least_elements=section.least_elements,
    )


def task_order(tasks: int, count: int, seed: int) -> list[int]:
    """Return ``count`` task numbers: shuffled passes over all of them. A longer order begins with the shorter one."""
    rng = random.Random(seed)
    order: list[int] = []
    while len(order) < count:
        order += rng.sample(range(tasks), tasks)
    return order[:count]


def gym_settings(section: GymSection) -> GymSettings:
    """Return the gym's settings for training."""
    return GymSettings(
        device=section.device,
        sandbox=section.sandbox,
        seeds=section.seeds,
        parallel=section.parallel,
        offline_compile=section.offline_compile,
        hidden_shape=section.hidden_shape,
        limits=Limits(compile_s=section.compile_s, run_s=section.run_s, total_s=section.total_s),
        timing=Timing(
            enabled=section.timing,
            min_pairs=section.min_pairs,
            max_pairs=section.max_pairs,
            max_s=section.timing_s,
            compile_baseline=section.compile_baseline,
        ),
    )


def step_sizes(config: TrainConfig, processes: int) -> int:
    """Return the samples a process and micro-batch has.

    Raises:
        OptionError: a step's samples cannot be split evenly.
    """
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    parts = processes * config.optimizer.micro_batches
    if samples % parts:
        raise OptionError(
            f"{samples} samples a step cannot be split over {processes} processes x "
            f"{config.optimizer.micro_batches} micro-batches"
        )
    return samples // parts


def trainer_arguments(config: TrainConfig, folder: RunFolder, processes: int) -> Any:
    """Return TRL's arguments; what is fixed here is what makes its loss plain turn-level REINFORCE."""
    run, optimizer = config.run, config.optimizer
    on_cpu = not torch.cuda.is_available()
    return GRPOConfig(
        output_dir=str(folder.checkpoints),
        seed=run.seed,
        max_steps=run.steps,
        per_device_train_batch_size=step_sizes(config, processes),
        gradient_accumulation_steps=optimizer.micro_batches,
        steps_per_generation=optimizer.micro_batches,
        num_generations=config.rollout.samples_per_prompt,
        num_iterations=1,
        max_completion_length=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="none",
        epsilon=optimizer.clip_low,
        epsilon_high=optimizer.clip_high,
        vllm_importance_sampling_correction=False,
        cast_lm_head_to_fp32=config.model.dtype == "bfloat16" and not config.model.lora_rank,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.scheduler,
        warmup_steps=optimizer.warmup_steps,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        max_grad_norm=optimizer.max_grad_norm,
        bf16=config.model.dtype == "bfloat16",
        gradient_checkpointing=config.model.gradient_checkpointing,
        save_strategy="steps" if run.save_every else "no",
        save_steps=run.save_every or 1,
        save_total_limit=run.keep_checkpoints,
        logging_steps=1,
        report_to=["tensorboard"] if run.tensorboard else [],
        disable_tqdm=True,
        shuffle_dataset=False,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
        **_server_arguments(config),
    )


def _server_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return what TRL needs to move weights into a vLLM server; sampling itself goes past TRL."""
    if config.rollout.backend != "vllm":
        return {}
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": config.rollout.url.removesuffix("/v1")}


class TrainingGym(Gym):
    """A gym that keeps at least ``sessions`` references loaded: those of all training tasks, if so many are asked."""

    def __init__(self, settings: GymSettings, sessions: int) -> None:
        super().__init__(settings)
        self._least = sessions

    @property
    def sessions_at_once(self) -> int:
        """How many references are kept."""
        return max(super().sessions_at_once, self._least)


class Session:
    """What lives as long as a run: the event loop, the gym in it, and the collector once there is a model."""

    def __init__(self, config: TrainConfig, runner: asyncio.Runner, gym: Any, cache_dir: Path) -> None:
        self.config = config
        self.runner = runner
        self.gym = gym
        conditions = {"gym": asdict(config.gym), "device": gym.device_facts, "torch": torch.__version__}
        cache_dir = Path(config.gym.cache_dir) if config.gym.cache_dir else cache_dir
        cache = VerdictCache(cache_dir, conditions) if config.gym.cache else None
        facts = hashlib.sha256(json.dumps(gym.device_facts, sort_keys=True, default=str).encode()).hexdigest()[:8]
        kept = cache_dir / f"reference-times-{facts}.jsonl"
        times = ReferenceTimes(gym, kept) if config.reward.speed == "device" else None
        self.judge = PatientJudge(gym, config.gym, cache=cache, times=times)
        self.backend: PolicyBackend | None = None

    def collector(self, backend: PolicyBackend, prompter: Prompter, tokenizer: Any) -> Collector:
        """Return the collector around ``backend``."""
        self.backend = backend
        return Collector(backend, self.judge, prompter, tokenizer, self.config.rollout, self.config.reward)

    def collect(
        self, collector: Collector, items: Sequence[RolloutItem], *, seed: int
    ) -> tuple[list[Trajectory], Clock]:
        """Collect, blocking."""
        return self.runner.run(collector.collect(items, seed=seed))


@contextlib.contextmanager
def open_session(config: TrainConfig, make_gym: Callable[[TrainConfig], Any]) -> Iterator[Session]:
    """Open the gym in an event loop of its own, and end both."""
    with asyncio.Runner() as runner:
        gym = make_gym(config)
        runner.run(gym.__aenter__())
        session = Session(config, runner, gym, Path(config.run.output_dir))
        try:
            yield session
        finally:
            if session.backend is not None:
                runner.run(session.backend.close())
            runner.run(gym.__aexit__(None, None, None))


def open_gym(config: TrainConfig) -> Any:
    """Return the gym that the settings name: a served one, or one here (each process on its own GPU)."""
    section = config.gym
    settings = gym_settings(section)
    if section.url:
        from drk.gym.client import RemoteGym  # needs httpx, which only served gyms need

        return RemoteGym(section.url, os.environ.get("DRK_GYM_TOKEN", ""), settings, patience_s=section.patience_s)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if section.device == "auto" and torch.cuda.is_available():
        settings = gym_settings(GymSection(**{**vars(section), "device": f"cuda:{rank}"}))
    return TrainingGym(settings, section.sessions)


def train_rl(config: TrainConfig, report: Report, *, make_gym: Callable[[TrainConfig], Any] = open_gym) -> Trained:
    """Train by reinforcement, from the start or from the last whole checkpoint.

    Raises:
        TrainingError: with what to do; nothing was trained on garbage.
        HostError: the gym could not be opened.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    folder = RunFolder(Path(config.run.output_dir), main=rank == 0, rank=rank)
    folder.open(config)
    with contextlib.closing(folder), disk_errors(folder.path):
        tasks = [one.task for one in load_tasks(config)]
        arguments = trainer_arguments(config, folder, processes)
        with open_session(config, make_gym) as session:
            path = _initial_model(session, config, tasks, folder)
            return _train(session, config, path, tasks, folder, arguments, report)


def _initial_model(session: Session, config: TrainConfig, tasks: Sequence[Task], folder: RunFolder) -> str:
    if config.model.init == "checkpoint":
        return config.model.path
    path = folder.path / "initial"
    if folder.main and not (path / "config.json").is_file():
        prompts = [task.files[task.entry] for task in tasks]
        session.runner.run(make_tiny(session.gym, tasks, prompts, config.model, path, seed=config.run.seed))
    PartialState().wait_for_everyone()
    return str(path)


def _train(
    session: Session,
    config: TrainConfig,
    path: str,
    tasks: list[Task],
    folder: RunFolder,
    arguments: Any,
    report: Report,
) -> Trained:
    model, tokenizer = load_policy(path, config.model)
    prompter = Prompter(
        tokenizer,
        PromptSettings(
            config.prompt.templates, config.prompt.policy, config.model.context_tokens, config.rollout.max_new_tokens
        ),
    )
    prompter.check(tasks)
    order = task_order(len(tasks), config.run.steps * config.rollout.prompts_per_step, config.run.seed)
    rows = datasets.Dataset.from_list([{"prompt": tasks[i].name, "task_index": i} for i in order])
    trainer: Any = None
    beside = session.gym.sharing if isinstance(session.gym, Gym) else None
    backend = make_backend(config, stop_ids(tokenizer, model), tokenizer.pad_token_id, lambda: trainer, beside)
    collector = session.collector(backend, prompter, tokenizer)
    trainer = TurnLevelTrainer(
        tasks=tasks,
        collect=lambda items, *, seed: session.collect(collector, items, seed=seed),
        settings=config,
        journal=folder.journal,
        before_collect=sync_served_weights if config.rollout.backend == "vllm" else None,
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=lora_settings(config.model),
        callbacks=standard_callbacks(folder, report, config),
    )
    trainer.remove_callback(PrinterCallback)
    if config.run.validate_every and folder.main:
        proposer = PolicyProposer(backend, prompter, tokenizer, config.rollout.max_new_tokens)
        held_out = load_tasks(config, held_out=True)
        trainer.add_callback(Validation(held_out, session.gym, proposer, config, folder, session.runner.run, report))
    done = run_trainer(trainer, folder)
    if folder.main:
        write_model_facts(done.final, config)
    return done


def run_trainer(trainer: Any, folder: RunFolder) -> Trained:
    """Train from the last whole checkpoint or the start, and save the final weights."""
    if folder.main:
        folder.remove_incomplete()
    PartialState().wait_for_everyone()
    last = folder.last_checkpoint()
    resumed_at = step_of(last) if last is not None else 0
    folder.cut_after(resumed_at)
    PartialState().wait_for_everyone()
    trainer.train(resume_from_checkpoint=str(last) if last is not None else None)
    final = folder.path / "final"
    save_final(trainer, final)
    return Trained(folder.path, final, int(trainer.state.global_step), resumed_at)


def save_final(trainer: Any, path: Path) -> None:
    """Save weights and tokenizer as a plain folder; an adapter is merged into its base."""
    if not hasattr(trainer.model, "merge_and_unload"):
        trainer.save_model(str(path))
        return
    if trainer.accelerator.is_main_process:
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        merged.save_pretrained(path)
        trainer.processing_class.save_pretrained(path)
