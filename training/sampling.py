"""Sampling from a causal language model in this process, row by row repeatable, with the log-probabilities used.

Each row has a seed of its own and draws by inverting the cumulative distribution with one uniform number a token. What
a row says then depends neither on the rows it is batched with nor on how rows are spread over processes, but for the
last bits of floating point. The log-probabilities returned belong to the distribution that was sampled from: after
temperature, without truncation.

Honest limits: decoder-only models with a key-value cache and relative positions (rotary or none, since prompts are
padded on the left); a batch runs to its longest answer; one forward call a token. Under FSDP or ZeRO-3, where weights
are spread, use a server.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row: token ids, the seed of its draws, and how many tokens it may add."""

    ids: tuple[int, ...]
    seed: int
    max_new_tokens: int


@dataclass(frozen=True)
class Sampled:
    """One answer: its tokens (the end token included), their log-probabilities, and whether its limit cut it off."""

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    cut: bool


@torch.inference_mode()
def sample(
    model: Any, prompts: Sequence[Prompt], *, temperature: float, stop_ids: frozenset[int], pad_id: int
) -> list[Sampled]:
    """Return one answer a prompt, in order.

    Args:
        model: called with ``input_ids [B, L]``, ``attention_mask``, ``position_ids`` and its cache; gives
            ``logits [B, 1, V]`` and its cache. Not changed; the caller sets it to evaluation mode.
        prompts: at least one, none empty.
        temperature: above 0, divides the logits; 0 takes the most likely token, with log-probability at temperature 1.
        stop_ids: tokens that end an answer.
        pad_id: fills prompts on the left.
    """
    device = next(model.parameters()).device
    width = max(len(prompt.ids) for prompt in prompts)
    ids = torch.tensor([[pad_id] * (width - len(p.ids)) + list(p.ids) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p.ids)) + [1] * len(p.ids) for p in prompts], device=device)
    limits = [prompt.max_new_tokens for prompt in prompts]
    draws = draws_of(prompts, max(limits)).to(device)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    tokens: list[list[int]] = [[] for _ in prompts]
    logps: list[list[float]] = [[] for _ in prompts]
    live, cache, word = [True] * len(prompts), None, _cache_word(model)
    for step in range(max(limits)):
        out = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{word: cache},
        )
        cache = getattr(out, word)
        chosen, scores = choose(out.logits[:, -1].float(), draws[:, step], temperature)
        for row, (token, score) in enumerate(zip(chosen.tolist(), scores.tolist(), strict=True)):
            if live[row]:
                tokens[row].append(token)
                logps[row].append(score)
                live[row] = token not in stop_ids and len(tokens[row]) < limits[row]
        if not any(live):
            break
        ids = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return [
        Sampled(tuple(row), tuple(scores), row[-1] not in stop_ids) for row, scores in zip(tokens, logps, strict=True)
    ]


def _cache_word(model: Any) -> str:
    """Return the name by which the model takes its cache: transformers 5.24 renamed it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"


def draws_of(prompts: Sequence[Prompt], length: int) -> Tensor:
    """Return uniform numbers ``[B, length]``, each row from its own seed."""
    rows = []
    for prompt in prompts:
        generator = torch.Generator().manual_seed(prompt.seed)
        rows.append(torch.rand(length, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def choose(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the chosen tokens ``[B]`` and their log-probabilities ``[B]``; waits for no device.

    Args:
        logits: ``[B, V]``, float32.
        uniform: ``[B]``, float64, in [0, 1).
        temperature: see :func:`sample`.
    """
    logps = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
    if temperature > 0:
        # float64: over a vocabulary of 150,000 float32 sums would lose the tail
        cumulative = logps.double().exp().cumsum(dim=-1)
        target = (uniform * cumulative[:, -1])[:, None]
        chosen = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[-1] - 1)
    else:
        chosen = logps.argmax(dim=-1)
    return chosen, logps.gather(1, chosen[:, None]).squeeze(1)
