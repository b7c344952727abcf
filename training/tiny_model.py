"""Small models made here: a random one whose tokens are whole answers, for tests and for the recipe ``nano-cpu``.

:func:`answer_tokenizer` has one token for each of a few given answers, a few words by which prompts differ, and one
token for everything unknown. A random model with such a vocabulary draws whole kernels, good and bad ones, so that
rollouts reach the real gym and learning shows in a few steps. It is a model of the plumbing, not of a kernel writer.
:func:`new_model` makes the model: Llama's shape with norms on queries and keys (Qwen3 in ``transformers``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from drk.training.prompting import CHAT_TEMPLATE

PAD, UNKNOWN, END, USER, ASSISTANT = "<|pad|>", "<|unknown|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, UNKNOWN, END, USER, ASSISTANT)


def as_pretrained(tokenizer: Tokenizer, context_tokens: int) -> Any:
    """Return a ``transformers`` tokenizer around ``tokenizer``, with the roles and chat template of small models."""
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        padding_side="left",
        model_max_length=context_tokens,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def answer_tokenizer(prompts: Sequence[str], answers: Sequence[str], *, words: int = 16, context_tokens: int) -> Any:
    """Return a tokenizer with one token an answer and the ``words`` that tell the prompts apart best.

    Args:
        prompts: texts; words that stand in all of them tell nothing and are left out.
        answers: distinct texts; each becomes one token, found wherever it stands.
        words: at most so many words.
        context_tokens: what the tokenizer states as its limit.
    """
    counts: dict[str, int] = {}
    for prompt in prompts:
        for word in set(re.findall(r"[A-Za-z_]\w*", prompt)):
            counts[word] = counts.get(word, 0) + 1
    telling = sorted(word for word, count in counts.items() if count < len(prompts) or len(prompts) == 1)
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *telling[:words]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(answer, normalized=False) for answer in answers])
    # fences must stand on lines of their own, also behind a word or another answer
    opened = decoders.Replace(Regex("^```"), "\n```")
    closed = decoders.Replace(Regex("```$"), "```\n")
    tokenizer.decoder = decoders.Sequence([opened, closed, decoders.Fuse()])
    return as_pretrained(tokenizer, context_tokens)


def new_model(
    tokenizer: Any, *, layers: int, width: int, heads: int, context_tokens: int, seed: int, hidden: int = 0
) -> Any:
    """Return a random causal language model in float32 for ``tokenizer``; equal seeds give equal weights."""
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=hidden or 3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3ForCausalLM(config)
