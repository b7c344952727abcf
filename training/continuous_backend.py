"""Sampling in this process by transformers' continuous batching: each trajectory is answered on its own, none waits.

Where judging takes long and unevenly, waves (:class:`drk.training.backends.WaveBackend`) leave the sampler idle; here a
trajectory asks for its next turn as soon as its kernel was judged. The log-probabilities are those of the processed
distribution (after temperature), as the library returns them. One manager lives from the first request of a collection
to its end, so that no cached prefix outlives the weights that it was computed with.

Honest limits: what is drawn depends on which requests share a batch, and so on the gym's timing: a run does not repeat,
and a resumed one is not exact. Sampling and timing must not share a GPU (:mod:`drk.training.backend_choice` refuses
it). Tried on CPU with transformers 5.13, 5.20 and 5.24, in float32 and with LoRA; not on a GPU, where the size of the
cache is left to the library (at most half of the free memory), without CUDA graphs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import configuration_utils

from drk.training.backends import SamplerUnavailable
from drk.training.errors import OptionError
from drk.training.sampling import Prompt, Sampled

STOP_S = 60.0
"""How long the library's thread may take to end after its last step."""
GPU_SHARE = 0.5
"""Of a GPU's free memory, for keys and values."""


class ContinuousBackend:
    """Samples with the model that is trained, one request a prompt. ``model`` gives it, unwrapped, at each collection.

    Args:
        model: returns a ``transformers`` model, or a peft model around one.
        temperature: above 0 divides the logits; 0 takes the most likely token.
        stop_ids: tokens that end an answer.
        pad_id: the tokenizer's.
        context_tokens: the longest prompt with its answer.
        rows: requests at a time, at most; both size the cache on a CPU.

    Raises:
        OptionError: this version of transformers does not return log-probabilities.
    """

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        temperature: float,
        stop_ids: frozenset[int],
        pad_id: int,
        context_tokens: int,
        rows: int = 64,
    ) -> None:
        self._model = model
        self._stop_ids = stop_ids
        self._context_tokens = context_tokens
        self._rows = rows
        draws: dict[str, Any] = {"do_sample": temperature > 0, "top_k": 0, "top_p": 1.0}
        if temperature > 0:
            draws["temperature"] = temperature
        self._generation = GenerationConfig(**draws, eos_token_id=sorted(stop_ids), pad_token_id=pad_id)
        self._config_type = _config_type()
        self._manager: Any = None
        self._sampling: Any = None
        self._training = False
        self._numbers = itertools.count()
        self._open = 0
        self._since = 0.0
        self.busy_s = 0.0
        self.outages = 0

    def begin(self, trajectories: int) -> None:
        """Do nothing: each trajectory is answered on its own."""

    def leave(self) -> None:
        """Do nothing."""

    async def settle(self) -> None:
        """End the manager and give the model back to training; its next collection samples with its new weights."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        await asyncio.to_thread(_end, manager)
        self._sampling.train(self._training)
        self._sampling = None

    async def close(self) -> None:
        """End what is under way."""
        await self.settle()

    async def generate(self, prompt: Prompt) -> Sampled:
        """Answer one prompt.

        Raises:
            SamplerUnavailable: the library failed, by lack of memory for example.
        """
        manager, loop = self._running(prompt.seed), asyncio.get_running_loop()
        name = f"row-{next(self._numbers)}"
        answer: asyncio.Future[Any] = loop.create_future()

        def take(found: Any) -> None:
            if not answer.done():
                answer.set_result(found)

        manager.register_result_handler(name, take)
        taken = manager.add_request(
            list(prompt.ids), name, max_new_tokens=prompt.max_new_tokens, eos_token_id=sorted(self._stop_ids)
        )
        if taken is None:
            raise SamplerUnavailable("continuous batching takes no requests any more", help="see its log above")
        self._count(1)
        try:
            found = await answer
        finally:
            self._count(-1)
            if not answer.done() or answer.cancelled():
                manager.cancel_request(name)
        if found.error is not None or not found.generated_tokens:
            raise SamplerUnavailable(f"continuous batching failed: {found.error}", help="lower rollout.concurrency")
        ids = tuple(found.generated_tokens)
        return Sampled(ids, tuple(found.logprobs), cut=ids[-1] not in self._stop_ids)

    def _count(self, change: int) -> None:
        """Count requests; time runs while there is one."""
        if self._open == 0:
            self._since = time.monotonic()
        self._open += change
        if self._open == 0:
            self.busy_s += time.monotonic() - self._since

    def _running(self, seed: int) -> Any:
        """Return the manager of this collection, started by its first request."""
        if self._manager is None:
            model = self._model()
            self._sampling = model.get_base_model() if hasattr(model, "get_base_model") else model
            self._training = self._sampling.training
            self._manager = self._sampling.init_continuous_batching(
                self._generation, self._settings(self._sampling.device, seed)
            )
            self._manager.start()
        return self._manager

    def _settings(self, device: torch.device, seed: int) -> Any:
        known: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(self._config_type)}
        values: dict[str, Any] = {
            "return_logprobs": True,
            "seed": seed % 2**31,
            "max_requests_per_batch": self._rows,
            # other attention than the trainer's would widen the mismatch
            "auto_switch_to_flash": False,
            "use_cuda_graph": False,
            "use_async_batching": False,
        }
        if device.type == "cuda":
            values["max_memory_percent"] = GPU_SHARE
        else:  # the library would take nearly all memory
            page = known["page_size"] if "page_size" in known else known["block_size"]
            values["num_blocks"] = self._rows * math.ceil(self._context_tokens / page) + 1
            values["max_batch_tokens"] = max(self._context_tokens, 256)
        return self._config_type(**{name: value for name, value in values.items() if name in known})


def _config_type() -> Any:
    found = getattr(configuration_utils, "ContinuousBatchingConfig", None)
    names = {field.name for field in dataclasses.fields(found)} if found is not None else set()
    if not {"return_logprobs", "num_blocks"} <= names:
        raise OptionError(
            "this version of transformers returns no log-probabilities from continuous batching",
            help="pip install 'transformers>=5.13', or rollout.backend = 'generate'",
        )
    return found


def _end(manager: Any) -> None:
    """Stop the library's thread, without waiting for requests that nobody wants any more."""
    manager.stop(block=True, timeout=STOP_S, hard_stop=True)
    manager.destroy()
