"""``drk train scratch``: a tokenizer and a small model from nothing, trained on demonstrations or on pairs in bulk.

With ``sft.path`` the model is fine-tuned by :mod:`drk.training.sft`. Else it is trained packed
(:mod:`drk.training.scratch_loop`), on shards of ``drk data pairs`` or on pairs written meanwhile. The tokenizer is made
from the same texts, or taken from a folder (``scratch.tokenizer``). The model has Llama's shape with norms on queries
and keys (Qwen3), so that ``transformers`` and vLLM load what comes out.

What comes out is a translator for the generator's grammar and what lies near it, not a general writer of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drk.training.config import TrainConfig
from drk.training.dataset import Demonstration, read_demonstrations
from drk.training.live_table import Report
from drk.training.pair_source import sample_pairs
from drk.training.pairs import Pair
from drk.training.policy import load_tokenizer
from drk.training.prompting import answer_text
from drk.training.rl import Trained
from drk.training.scratch_loop import train_packed
from drk.training.sft import train_sft
from drk.training.tiny_model import new_model
from drk.training.tokenizer import frequent_phrases, train_tokenizer

__all__ = ["make_model", "pair_tokenizer", "texts_of", "train_scratch", "train_tokenizer"]


def texts_of(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """Yield the texts that a model will read and write."""
    for one in demonstrations:
        yield one.task.task.files[one.task.task.entry]
        for turn in one.turns:
            yield answer_text(turn.candidate.source)


def pair_tokenizer(pairs: Sequence[Pair], *, vocabulary: int, phrases: int, context_tokens: int) -> Any:
    """Return the tokenizer that fits ``pairs``: their prompts and answers, and the phrases that answers repeat."""
    answers = [pair.answer for pair in pairs]
    texts = [text for pair in pairs for _, text in pair.messages] + [answer_text(answer) for answer in answers]
    found = frequent_phrases(answers, phrases)
    return train_tokenizer(texts, vocabulary=vocabulary, context_tokens=context_tokens, phrases=found)


def make_tokenizer(config: TrainConfig) -> Any:
    """Return the tokenizer that the settings name or make.

    Raises:
        TrainingError: nothing to make it from, or the folder holds none.
    """
    section, context = config.scratch, config.model.context_tokens
    if section.tokenizer:
        return load_tokenizer(section.tokenizer)
    if config.sft.path:
        texts = list(texts_of(read_demonstrations(Path(config.sft.path))))
        return train_tokenizer(texts, vocabulary=section.vocabulary, context_tokens=context)
    pairs = sample_pairs(section, config.run.seed, section.texts)
    return pair_tokenizer(pairs, vocabulary=section.vocabulary, phrases=section.phrases, context_tokens=context)


def make_model(config: TrainConfig, folder: Path) -> Path:
    """Make tokenizer and random model, save them in ``folder`` and return it.

    Raises:
        TrainingError: see :func:`make_tokenizer`.
    """
    section = config.scratch
    tokenizer = make_tokenizer(config)
    model = new_model(
        tokenizer,
        layers=section.layers,
        width=section.width,
        heads=section.heads,
        hidden=section.hidden,
        context_tokens=config.model.context_tokens,
        seed=config.run.seed,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train_scratch(config: TrainConfig, report: Report) -> Trained:
    """Make a model, unless this run has one already, and train it (one process; pairs may have writers).

    Raises:
        TrainingError: with what to do.
    """
    folder = Path(config.run.output_dir) / "initial"
    if not (folder / "config.json").is_file():
        make_model(config, folder)
    if config.sft.path:
        return train_sft(replace(config, model=replace(config.model, path=str(folder))), report)
    return train_packed(config, folder, report)
