"""The model and tokenizer of a run: loaded from a folder, or made small and random (``model.init = "tiny"``).

Weights are float32 and ``bfloat16`` is autocast around them, since steps of 1e-6 vanish in bfloat16 weights; with LoRA
the frozen base is loaded in the run's own dtype. Code from a checkpoint is never run. Left out: quantised models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from drk.gym.schema import Task
from drk.training.config import ModelSection
from drk.training.errors import TrainingError
from drk.training.faults import insert_fault
from drk.training.prompting import CHAT_TEMPLATE, answer_text
from drk.training.tiny_model import answer_tokenizer, new_model
from drk.training.trajectories import TeachingGym, builtin_candidates


class ModelError(TrainingError):
    """The model or its tokenizer cannot be loaded or made."""


def load_policy(path: str, section: ModelSection) -> tuple[Any, Any]:
    """Return model and tokenizer from ``path``, a folder or a name that is already on this machine or can be fetched.

    Raises:
        ModelError: they cannot be loaded.
    """
    dtype = torch.bfloat16 if section.lora_rank and section.dtype == "bfloat16" else torch.float32
    tokenizer = load_tokenizer(path)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load the model {path!r}: {str(error)[:300]}", help="model.path = a folder") from error
    return model, tokenizer


def load_tokenizer(path: str) -> Any:
    """Return the tokenizer in ``path``, with a padding token and a chat template.

    Raises:
        ModelError: it cannot be loaded, or has no end token.
    """
    if not path:
        raise ModelError("no model was named", help="--set model.path=FOLDER")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left", trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"cannot load the tokenizer of {path!r}: {str(error)[:300]}", help="model.path = a folder"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path!r} has no end token, so no answer would ever end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def lora_settings(section: ModelSection) -> Any:
    """Return peft's settings, or None where ``lora_rank`` is 0."""
    if not section.lora_rank:
        return None
    import peft  # only where it is used: peft takes a second to import

    return peft.LoraConfig(
        r=section.lora_rank, lora_alpha=section.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )


async def make_tiny(
    gym: TeachingGym, tasks: Sequence[Task], prompts: Sequence[str], section: ModelSection, folder: Path, *, seed: int
) -> None:
    """Make a random model whose tokens are whole answers to ``tasks``, right and wrong ones, and save it in ``folder``.

    Raises:
        ModelError: there is nothing that it could answer.
        HostError: the host failed.
    """
    answers: list[str] = []
    for task in tasks:
        found = await builtin_candidates(gym, task, limit=1)
        if not found:
            continue
        faults = [insert_fault(found[0].source, kind, seed=seed) for kind in ("wrong", "compile", "syntax")]
        sources = [found[0].source, *(fault.source for fault in faults if fault is not None)]
        answers += [answer_text(source) for source in sources]
    distinct = list(dict.fromkeys(answers))
    if not distinct:
        raise ModelError("the builtin proposer has no candidate for any task", help="tasks.families = ['pointwise']")
    tokenizer = answer_tokenizer(prompts, distinct, context_tokens=section.context_tokens)
    model = new_model(
        tokenizer,
        layers=section.layers,
        width=section.width,
        heads=section.heads,
        context_tokens=section.context_tokens,
        seed=seed,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
