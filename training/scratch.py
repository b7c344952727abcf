"""``drk train scratch``: a tokenizer and a small model from nothing, fine-tuned on demonstrations.

The tokenizer is a byte-level BPE trained on the demonstrations' own texts: digits stand alone, so that numbers are
copied digit by digit, and identifiers are split from the blank before them. The model has Llama's shape with norms on
queries and keys. Training is that of :mod:`drk.training.sft`.

Left out so far: packing by variable-length attention, Muon, and writing data while training (a trial reached 1.5 M
tokens a second with them): this is the simple form, for models of some ten million parameters and data sets that fit on
disk. What comes out is a translator for the generator's grammar, not a general writer of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from drk.training.config import TrainConfig
from drk.training.dataset import Demonstration, read_demonstrations
from drk.training.guards import Report
from drk.training.prompting import answer_text
from drk.training.rl import Trained
from drk.training.sft import train_sft
from drk.training.tiny_model import SPECIAL, UNKNOWN, as_pretrained, new_model

PIECES = Regex(r"[A-Za-z_][A-Za-z_]*|[0-9]|\n[ ]*|[ ]+|[^A-Za-z_0-9\s]+|\s+")
"""Words, single digits, line breaks with their indentation, blanks, and runs of signs."""


def train_tokenizer(texts: Sequence[str], *, vocabulary: int, context_tokens: int) -> Any:
    """Return a byte-level BPE tokenizer with small models' roles and chat template.

    Args:
        texts: what it is trained on.
        vocabulary: entries at most, the 256 bytes and the special tokens included.
        context_tokens: what the tokenizer states as its limit.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return as_pretrained(tokenizer, context_tokens)


def texts_of(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """Yield the texts that a model will read and write."""
    for one in demonstrations:
        yield one.task.task.files[one.task.task.entry]
        for turn in one.turns:
            yield answer_text(turn.candidate.source)


def make_model(config: TrainConfig, folder: Path) -> Path:
    """Make tokenizer and random model from ``sft.path``, save them in ``folder`` and return it.

    Raises:
        DatasetError: the demonstrations cannot be read.
    """
    section = config.scratch
    texts = list(texts_of(read_demonstrations(Path(config.sft.path))))
    tokenizer = train_tokenizer(texts, vocabulary=section.vocabulary, context_tokens=config.model.context_tokens)
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
    """Make a model, unless this run has one already, and fine-tune it (one process).

    Raises:
        TrainingError: with what to do.
    """
    folder = Path(config.run.output_dir) / "initial"
    if not (folder / "config.json").is_file():
        make_model(config, folder)
    return train_sft(replace(config, model=replace(config.model, path=str(folder))), report)
