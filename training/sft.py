"""``drk train sft``: supervised fine-tuning on multi-turn demonstrations, loss on answers only (TRL's SFTTrainer).

Turn = row here too: each learned turn gives one row whose prompt is the conversation that rollouts would show at that
point, so that cold start and reinforcement see the same texts. By default only accepted turns are learned; what went
wrong before them stands in their prompts. Rows that do not fit are left out and counted, never cut.

Left out: packing (rows are padded; see ``drk train scratch`` for packed training of small models).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig, SFTTrainer

from drk.assistant.llm.messages import Message
from drk.training.config import TrainConfig
from drk.training.dataset import Demonstration, read_demonstrations
from drk.training.errors import OptionError
from drk.training.guards import standard_callbacks
from drk.training.live_table import Report
from drk.training.model_facts import write_model_facts
from drk.training.policy import load_policy, lora_settings
from drk.training.prompting import Prompter, PromptSettings, PromptTooLong, answer_text, encode_chat
from drk.training.rl import Trained, run_trainer
from drk.training.run_folder import RunFolder, disk_errors

Learn = Literal["accepted", "all", "last"]
IGNORED = -100
"""The label of tokens without loss, by torch's convention."""


@dataclass(frozen=True)
class SftRow:
    """One learned turn: prompt and answer, the end token included."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


def demonstration_rows(
    one: Demonstration, prompter: Prompter, tokenizer: Any, *, learn: Learn = "accepted"
) -> list[SftRow]:
    """Return the rows of one demonstration.

    Raises:
        PromptTooLong: the task alone does not fit.
    """
    rows = []
    for place, turn in enumerate(one.turns):
        wanted = {
            "accepted": turn.verdict.accepted and turn.verdict.correct,
            "all": True,
            "last": place == len(one.turns) - 1,
        }
        if not wanted[learn]:
            continue
        messages = prompter.messages(one.task.task, one.turns[:place])
        rows.append(answer_row(messages, turn.candidate.source, tokenizer))
    return rows


def answer_row(messages: Sequence[Message], source: str, tokenizer: Any) -> SftRow:
    """Return the row in which ``source`` answers ``messages``, in the form that a rollout would have."""
    prompt = encode_chat(tokenizer, messages, answer=True)
    text = answer_text(source)
    whole = encode_chat(tokenizer, [*messages, Message("assistant", text)], answer=False)
    if whole[: len(prompt)] == prompt and tokenizer.eos_token_id in whole[len(prompt) :]:
        answer = whole[len(prompt) :]
        end = answer.index(tokenizer.eos_token_id)
        return SftRow(prompt, answer[: end + 1])
    # a template whose answers do not begin where its generation prompt ends
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return SftRow(prompt, (*ids, tokenizer.eos_token_id))


def sft_prompter(config: TrainConfig, tokenizer: Any) -> Prompter:
    """Return what makes the prompts: no answer is sampled, so the whole context may be prompt, and rows are measured.

    Raises:
        UsageError: the folder of templates is missing or wrong.
    """
    return Prompter(tokenizer, PromptSettings(config.prompt.templates, config.prompt.policy, config.sft.max_tokens, 0))


def sft_rows(
    demonstrations: Sequence[Demonstration],
    prompter: Prompter,
    tokenizer: Any,
    *,
    max_tokens: int,
    learn: Learn = "accepted",
) -> tuple[list[SftRow], int]:
    """Return the rows that fit in ``max_tokens``, and how many do not."""
    rows: list[SftRow] = []
    left_out = 0
    for one in demonstrations:
        try:
            found = demonstration_rows(one, prompter, tokenizer, learn=learn)
        except PromptTooLong:
            left_out += 1
            continue
        fitting = [row for row in found if len(row.prompt_ids) + len(row.answer_ids) <= max_tokens]
        left_out += len(found) - len(fitting)
        rows += fitting
    return rows, left_out


def as_record(row: SftRow) -> dict[str, list[int]]:
    """Return a row as the trainer reads it: ids, and labels on the answer only."""
    return {
        "input_ids": [*row.prompt_ids, *row.answer_ids],
        "labels": [IGNORED] * len(row.prompt_ids) + list(row.answer_ids),
    }


def train_sft(config: TrainConfig, report: Report) -> Trained:
    """Fine-tune on the demonstrations of ``sft.path``; goes on at the last whole checkpoint.

    Raises:
        TrainingError: with what to do.
    """
    rank = int(os.environ.get("RANK", "0"))
    folder = RunFolder(Path(config.run.output_dir), main=rank == 0, rank=rank)
    folder.open(config)
    with contextlib.closing(folder), disk_errors(folder.path):
        model, tokenizer = load_policy(config.model.path, config.model)
        rows, left_out = sft_rows(
            read_demonstrations(Path(config.sft.path)),
            sft_prompter(config, tokenizer),
            tokenizer,
            max_tokens=config.sft.max_tokens,
            learn=config.sft.learn,
        )
        if not rows:
            raise OptionError(f"no row of {config.sft.path} can be learned; {left_out} were too long")
        trainer = SFTTrainer(
            model=model,
            args=sft_arguments(config, folder),
            train_dataset=datasets.Dataset.from_list([as_record(row) for row in rows]),
            processing_class=tokenizer,
            peft_config=lora_settings(config.model),
            callbacks=standard_callbacks(folder, report, config),
        )
        trainer.remove_callback(PrinterCallback)
        done = run_trainer(trainer, folder)
        write_model_facts(done.final, config)
        return done


def sft_arguments(config: TrainConfig, folder: RunFolder) -> Any:
    """Return TRL's arguments."""
    sft, run, optimizer = config.sft, config.run, config.optimizer
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu = not torch.cuda.is_available()
    parts = processes * sft.micro_batches
    if sft.batch_rows % parts:
        raise OptionError(f"sft.batch_rows {sft.batch_rows} cannot be split into {parts} parts")
    return SFTConfig(
        output_dir=str(folder.checkpoints),
        seed=run.seed,
        num_train_epochs=sft.epochs,
        per_device_train_batch_size=sft.batch_rows // parts,
        gradient_accumulation_steps=sft.micro_batches,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=sft.learning_rate,
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
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
    )
