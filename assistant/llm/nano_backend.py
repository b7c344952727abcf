"""``nano``: the small model inside this process, with drk's own reader of its weights; needs no extra.

A folder holds ``config.json``, weights (:mod:`drk.assistant.llm.nano_weights`), the tokenizer and ``drk_model.json``.
Weights become float32 on the CPU and bfloat16 on a GPU; nothing is fetched, and no code of the folder is run. Each
answer is drawn from its own seed, so that it does not depend on what is answered beside it (but for the last bits of
floating point). Temperature 0 takes the most likely token.

Honest limits: one forward call a token, without CUDA graphs; for thousands of answers training's own sampler is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drk.assistant.llm.batching import Batches
from drk.assistant.llm.messages import ContextOverflow, ModelFault, Reply, Request, Usage
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.nano_network import Cache, NanoNetwork, NetworkShape
from drk.assistant.llm.nano_tokenizer import NanoTokenizer
from drk.assistant.llm.nano_weights import read_config, read_weights, weights_file

if TYPE_CHECKING:
    from torch import Tensor

GROWTH = 64
"""Columns of the cache that are looked at grow by so many at a time."""


class NanoBackend:
    """A small model from ``folder``; loaded by :meth:`start`.

    Raises:
        ModelFault: the folder holds no model.
    """

    local = True
    endpoint = "this process"
    enough_coverage = 0.95
    """Without a GPU a right answer that leaves nothing to torch is as good as any other: nobody can measure more."""

    def __init__(self, folder: Path, settings: ModelSettings, *, name: str = "nano", device: str = "") -> None:
        if weights_file(folder) is None or not (folder / "config.json").is_file():
            raise ModelFault(
                f"no model of the nano model's kind in {folder}", help="config.json and weights must be there"
            )
        self.name = name
        self._folder = folder.resolve()
        self._settings = settings
        self._device = device
        self._batches = Batches(name, self._generate, settings.concurrency)
        self._loaded: tuple[NanoNetwork, NanoTokenizer] | None = None

    async def start(self) -> None:
        """Load weights and tokenizer.

        Raises:
            ModelFault: they cannot be loaded.
        """
        if self._loaded is None:
            self._loaded = await asyncio.to_thread(self._load)

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation, together with all that wait by then."""
        return await self._batches.complete(request)

    def count_tokens(self, text: str) -> int:
        """Return the tokens of ``text``."""
        return len(self._parts()[1].encode(text))

    async def close(self) -> None:
        """Let go of the model."""
        self._loaded = None

    def _parts(self) -> tuple[NanoNetwork, NanoTokenizer]:
        if self._loaded is None:
            raise ModelFault(f"{self.name} was not started")
        return self._loaded

    def _load(self) -> tuple[NanoNetwork, NanoTokenizer]:
        import torch

        device = self._device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        tokenizer = NanoTokenizer(self._folder)
        shape = NetworkShape.read(read_config(self._folder))
        if len(tokenizer) > shape.vocabulary:
            raise ModelFault(f"the tokenizer in {self._folder} has more tokens than the model", help="fetch it again")
        return NanoNetwork(read_weights(self._folder, dtype, device), shape), tokenizer

    def _generate(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        network, tokenizer = self._parts()
        limit = min(self._settings.context_tokens, network.shape.context)
        prompts = [tuple(tokenizer.encode_chat(request.messages)) for request in requests]
        replies: list[Reply | Exception] = [ContextOverflow(f"{len(ids)} tokens of {limit}") for ids in prompts]
        fitting = [i for i, ids in enumerate(prompts) if len(ids) < limit]
        if fitting:
            rooms = [min(requests[i].max_tokens, limit - len(prompts[i])) for i in fitting]
            answers = self._answers([prompts[i] for i in fitting], rooms, [requests[i].seed for i in fitting])
            for i, ids in zip(fitting, answers, strict=True):
                ended = bool(ids) and ids[-1] == tokenizer.end
                text = tokenizer.decode(ids)
                replies[i] = Reply(text, Usage(len(prompts[i]), len(ids)), cut=not ended, model=self.name)
        return replies

    def _answers(
        self, prompts: Sequence[tuple[int, ...]], rooms: Sequence[int], seeds: Sequence[int]
    ) -> list[list[int]]:
        """Return the ids of one answer a prompt, the end token included; row ``i`` has at most ``rooms[i]``."""
        import torch

        network, tokenizer = self._parts()
        with torch.inference_mode(), _one_thread(network.device.type):
            draws = torch.stack([_draws(seed, max(rooms)) for seed in seeds]).to(network.device)
            lengths = [len(prompt) for prompt in prompts]
            cache = network.cache(len(prompts), max(a + b for a, b in zip(lengths, rooms, strict=True)))
            logits = self._read_prompts(prompts, network, cache)
            positions = torch.tensor(lengths, device=network.device)
            answers: list[list[int]] = [[] for _ in prompts]
            live = list(range(len(prompts)))
            for step in range(max(rooms)):
                chosen = self._choose(logits, draws[live, step])
                kept = []
                for place, (row, token) in enumerate(zip(live, chosen.tolist(), strict=True)):
                    answers[row].append(token)
                    if token != tokenizer.end and len(answers[row]) < rooms[row]:
                        kept.append(place)
                if not kept:
                    break
                if len(kept) < len(live):  # rows that are done go
                    live = [live[place] for place in kept]
                    cache, chosen, positions = cache.rows(kept), chosen[kept], positions[kept]
                longest = max(lengths[row] for row in live) + step + 1
                length = min(cache.length, -(-longest // GROWTH) * GROWTH)
                logits = network.read_token(chosen, positions, cache, length)
                positions = positions + 1
        return answers

    @staticmethod
    def _read_prompts(prompts: Sequence[tuple[int, ...]], network: NanoNetwork, cache: Cache) -> Tensor:
        """Read each distinct prompt once; return the logits after it for each row."""
        import torch

        logits: list[Tensor | None] = [None] * len(prompts)
        for prompt in dict.fromkeys(prompts):
            rows = [row for row, one in enumerate(prompts) if one == prompt]
            places = torch.tensor(rows, device=network.device)
            found = network.read_prompt(torch.tensor(prompt, device=network.device), cache, places)
            for row in rows:
                logits[row] = found
        return torch.stack([one for one in logits if one is not None])

    def _choose(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Return one token a row, ``[B]``."""
        import torch

        temperature, top_p = self._settings.temperature, self._settings.top_p
        if temperature <= 0:
            return logits.argmax(dim=-1)
        shares = torch.softmax(logits.double() / temperature, dim=-1)
        if top_p < 1:
            ordered, places = shares.sort(dim=-1, descending=True)
            ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0.0
            shares = torch.zeros_like(shares).scatter(1, places, ordered)
        sums = shares.cumsum(dim=-1)
        return (
            torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True).squeeze(1).clamp(max=sums.shape[1] - 1)
        )


@contextlib.contextmanager
def _one_thread(device: str) -> Iterator[None]:
    """Keep torch to one thread on a CPU: products so small gain little from more, and lose much on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draws(seed: int, count: int) -> Tensor:
    import torch

    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
