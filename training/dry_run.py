"""What a run would do, without training: the first batch, sizes, and an estimate of memory, for ``rl`` and ``sft``.

Estimates are arithmetic over parameter counts and shapes, said so in the text: weights, gradients and two moments of
AdamW, and the logits of one micro-batch. Activations and what the allocator wastes come on top. Nothing is fetched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from drk.training.config import TrainConfig
from drk.training.errors import OptionError
from drk.training.prompting import Prompter, PromptSettings
from drk.training.rl import load_tasks, step_sizes, task_order
from drk.training.tasks import TrainingTask


def describe_run(config: TrainConfig, *, processes: int = 1) -> dict[str, Any]:
    """Return the facts as JSON-able values.

    Raises:
        TrainingError: the tasks, the tokenizer or the sizes are wrong, which is what a dry run is for.
    """
    rollout, tasks = config.rollout, load_tasks(config)
    order = task_order(len(tasks), rollout.prompts_per_step, config.run.seed)
    first = [tasks[i] for i in order]
    samples = step_sizes(config, processes)
    facts: dict[str, Any] = {
        "tasks": len(tasks),
        "families": sorted({task.family for task in tasks}),
        "first_step": [task.task.name for task in first],
        "group_size": rollout.samples_per_prompt,
        "rows_per_step": rollout.prompts_per_step * rollout.samples_per_prompt * rollout.turns,
        "rows_per_micro_batch": samples * rollout.turns,
        "processes": processes,
        "gym_calls_per_step": rollout.prompts_per_step * rollout.samples_per_prompt * rollout.turns,
    }
    if config.model.init == "tiny":
        return {**facts, "model": "tiny, made at the start of the run", "first_prompt": first[0].task.files["model.py"]}
    return facts | _model_facts(config, tasks, first, samples)


def _model_facts(
    config: TrainConfig, tasks: list[TrainingTask], first: list[TrainingTask], samples: int
) -> dict[str, Any]:
    from drk.training.policy import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    prompter = Prompter(
        tokenizer,
        PromptSettings(
            config.prompt.templates, config.prompt.policy, config.model.context_tokens, config.rollout.max_new_tokens
        ),
    )
    prompter.check([task.task for task in tasks])
    lengths = [len(prompter.prompt_ids(task.task)) for task in first]
    parameters, vocabulary = model_sizes(config.model.path)
    rows, tokens = samples * config.rollout.turns, config.rollout.max_new_tokens
    return {
        "model": str(Path(config.model.path)),
        "parameters": parameters,
        "prompt_tokens": {"min": min(lengths), "max": max(lengths), "room": _room(config)},
        "memory_gb_estimate": memory_estimate_gb(config, parameters, vocabulary, rows=rows, tokens=tokens),
        "first_prompt": prompter.messages(first[0].task)[0].content,
    }


def model_sizes(path: str) -> tuple[int, int]:
    """Return a model's parameters and vocabulary, without loading its weights."""
    import torch
    import transformers

    with torch.device("meta"):
        shape = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        model = transformers.AutoModelForCausalLM.from_config(shape)
    return sum(parameter.numel() for parameter in model.parameters()), int(shape.vocab_size)


def describe_sft(config: TrainConfig, *, processes: int = 1) -> dict[str, Any]:
    """Return what ``drk train sft`` would learn, as JSON-able values.

    Raises:
        TrainingError: the demonstrations, the tokenizer or the sizes are wrong.
    """
    from drk.training.dataset import read_demonstrations
    from drk.training.policy import load_tokenizer
    from drk.training.sft import sft_prompter, sft_rows

    section = config.sft
    tokenizer = load_tokenizer(config.model.path)
    demonstrations = read_demonstrations(Path(section.path))
    rows, left_out = sft_rows(
        demonstrations, sft_prompter(config, tokenizer), tokenizer, max_tokens=section.max_tokens, learn=section.learn
    )
    parts = processes * section.micro_batches
    if section.batch_rows % parts:
        raise OptionError(f"sft.batch_rows {section.batch_rows} cannot be split into {parts} parts")
    facts: dict[str, Any] = {"demonstrations": len(demonstrations), "rows": len(rows), "left_out": left_out}
    facts |= {"learn": section.learn, "processes": processes, "rows_per_micro_batch": section.batch_rows // parts}
    if not rows:
        raise OptionError(f"no row of {section.path} can be learned; {left_out} were too long")
    lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
    parameters, vocabulary = model_sizes(config.model.path)
    return facts | {
        "steps": math.ceil(math.ceil(len(rows) / section.batch_rows) * section.epochs),
        "row_tokens": {"min": min(lengths), "max": max(lengths), "limit": section.max_tokens},
        "answer_tokens": sum(len(row.answer_ids) for row in rows),
        "model": str(Path(config.model.path)),
        "parameters": parameters,
        "memory_gb_estimate": memory_estimate_gb(
            config, parameters, vocabulary, rows=section.batch_rows // parts, tokens=max(lengths)
        ),
        "first_prompt": tokenizer.decode(rows[0].prompt_ids),
        "first_answer": tokenizer.decode(rows[0].answer_ids),
    }


def _room(config: TrainConfig) -> int:
    return config.model.context_tokens - config.rollout.max_new_tokens


def memory_estimate_gb(
    config: TrainConfig, parameters: int, vocabulary: int, *, rows: int, tokens: int
) -> dict[str, float]:
    """Return gigabytes (1e9) for the states of one unsharded process and for one micro-batch's logits in float32."""
    if config.model.lora_rank:
        base = 2 if config.model.dtype == "bfloat16" else 4
        # adapters on all linear layers: about rank x 2 x sqrt(12) / width of the weights; a hundredth is above it
        states = parameters * base + 0.01 * parameters * 16
    else:
        states = parameters * 16
    return {
        "states": round(states / 1e9, 3),
        "logits_of_a_micro_batch": round(rows * tokens * vocabulary * 4 / 1e9, 3),
    }
