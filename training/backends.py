"""Where answers come from: the :class:`PolicyBackend` interface, and the backend that samples in this process.

:class:`WaveBackend` waits until every live trajectory has asked, then samples all of them as one batch in an order that
does not depend on timing. That makes a run repeatable, and keeps the GPU free of generation while kernels are timed on
it; its price is that the slowest judgement of a turn holds the others up. A server (:mod:`drk.training.vllm_backend`)
answers each trajectory on its own, and so does :mod:`drk.training.continuous_backend`.

Who does not know how many will ask (validation) says 0: what waits while a batch is sampled makes the next one.

Small models of known shape are decoded on a GPU by :mod:`drk.training.decode`, everything else by
:mod:`drk.training.sampling`; :meth:`WaveBackend.facts` tells by which, and why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from drk.training.decode import Decoder
from drk.training.decode_model import why_not
from drk.training.errors import TrainingError
from drk.training.sampling import Prompt, Sampled, sample


class SamplerUnavailable(TrainingError):
    """The sampler did not answer, for longer than it may."""


class PolicyBackend(Protocol):
    """Anything that answers prompts with token ids and log-probabilities.

    ``busy_s`` counts the seconds of sampling, ``outages`` the times that the sampler was away and may have come back
    with other weights.
    """

    busy_s: float
    outages: int

    def begin(self, trajectories: int) -> None:
        """Say how many trajectories will ask; 0: nobody knows, so nobody is waited for."""
        ...

    def leave(self) -> None:
        """Say that one of them asks no more."""
        ...

    async def generate(self, prompt: Prompt) -> Sampled:
        """Answer one prompt.

        Raises:
            SamplerUnavailable: it cannot be answered.
        """
        ...

    async def settle(self) -> None:
        """Wait until nothing is sampled any more (for those, too, who were cut off): the weights may then change."""
        ...

    async def close(self) -> None:
        """Let go of what is held."""
        ...


Waiting = tuple[Prompt, "asyncio.Future[Sampled]"]


class WaveBackend:
    """Samples with the model that is trained. ``model`` gives it, unwrapped, at the time of each wave.

    Args:
        model: see above.
        temperature: above 0 divides the logits; 0 takes the most likely token.
        stop_ids: tokens that end an answer.
        pad_id: the tokenizer's.
        batch_rows: rows at a time, at most.
        context: surrounds each wave: autocast, where training has it.
        decoder: samples what it can; None: nothing.
        beside: surrounds each wave, and keeps kernels from being timed on its GPU meanwhile; then each answer is given
            when it is there. None: answers are given when their wave is over, so that nobody is judged meanwhile.
    """

    share = 1.0
    """Of the live trajectories, how many a wave waits for. Below 1 a part is sampled while the others are still judged;
    who shares a wave then depends on timing, and the last bits of log-probabilities with it."""

    def __init__(
        self,
        model: Callable[[], Any],
        *,
        temperature: float,
        stop_ids: frozenset[int],
        pad_id: int,
        batch_rows: int = 256,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        decoder: Decoder | None = None,
        beside: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    ) -> None:
        self._model = model
        self._temperature = temperature
        self._stop_ids = stop_ids
        self._pad_id = pad_id
        self._batch_rows = batch_rows
        self._context = context
        self._decoder = decoder
        self._beside = beside
        self._why_not = "nothing was sampled yet"
        self.busy_s = 0.0
        self.outages = 0
        self._live = 0
        self._waiting: list[Waiting] = []
        self._waves: set[asyncio.Task[None]] = set()

    def facts(self) -> dict[str, Any]:
        """Return what sampling took: figures of the decoder, or why it was not used."""
        if self._decoder is None or self._why_not:
            return {"decoder": False, "why_not": self._why_not}
        return {"decoder": True, **self._decoder.stats.facts()}

    def begin(self, trajectories: int) -> None:
        """Say how many trajectories will ask."""
        self._live = trajectories

    def leave(self) -> None:
        """Say that one asks no more; the others may have waited for it."""
        self._live -= 1
        self._start_when_all_wait()

    async def generate(self, prompt: Prompt) -> Sampled:
        """Answer with the next wave."""
        answer: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt, answer))
        self._start_when_all_wait()
        return await answer

    async def settle(self) -> None:
        """Wait for waves under way: a thread goes on also when those who asked were cut off."""
        await asyncio.gather(*self._waves, return_exceptions=True)

    async def close(self) -> None:
        """End waves that nobody waits for."""
        for wave in self._waves:
            wave.cancel()
        await asyncio.gather(*self._waves, return_exceptions=True)
        if self._decoder is not None:
            self._decoder.release()

    def _start_when_all_wait(self) -> None:
        # who was cancelled while waiting has left already
        self._waiting = [one for one in self._waiting if not one[1].done()]
        if not self._waiting or len(self._waiting) < self.share * self._live or self._waves:
            return
        batch, self._waiting = self._waiting, []
        batch.sort(key=lambda one: one[0].seed)
        wave = asyncio.get_running_loop().create_task(self._answer(batch))
        self._waves.add(wave)
        wave.add_done_callback(self._wave_is_over)

    def _wave_is_over(self, wave: asyncio.Task[None]) -> None:
        self._waves.discard(wave)
        if not wave.cancelled():
            self._start_when_all_wait()

    async def _answer(self, batch: list[Waiting]) -> None:
        self._why_not = self._reason()
        size = self._batch_rows if self._why_not else len(batch)
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            hear = self._giver([future for _, future in part])
            try:
                async with nullcontext() if self._beside is None else self._beside():
                    answers = await asyncio.to_thread(self._sample, [prompt for prompt, _ in part], hear)
            except RuntimeError as error:  # out of memory, among others: one batch fails, with its cause
                fault = SamplerUnavailable(f"sampling failed: {error}", help="lower rollout.batch_rows")
                for _, future in part:
                    if not future.done():
                        future.set_exception(fault)
                continue
            for (_, future), answer in zip(part, answers, strict=True):
                _give(future, answer)

    def _reason(self) -> str:
        """Return why the decoder does not sample this wave; empty where it does."""
        if self._decoder is None:
            return "there is no decoder"
        model = self._model()
        if not self._decoder.takes(next(model.parameters()).device):
            return "the model is not on a GPU"
        with self._context():
            if torch.is_autocast_enabled(next(model.parameters()).device.type):
                return "weights are float32 under autocast"
        return why_not(model)

    def _giver(self, futures: Sequence[asyncio.Future[Sampled]]) -> Callable[[int, Sampled], None]:
        """Return what hears of answers in the sampling thread, and gives them in the loop's where that is wanted."""
        loop = asyncio.get_running_loop()

        def hear(number: int, answer: Sampled) -> None:
            if self._beside is not None:
                loop.call_soon_threadsafe(_give, futures[number], answer)

        return hear

    def _sample(self, prompts: list[Prompt], hear: Callable[[int, Sampled], None]) -> list[Sampled]:
        model = self._model()
        training, begun = model.training, time.monotonic()
        model.eval()
        try:
            with self._context():
                if self._decoder is not None and not self._why_not:
                    return self._decoder.sample(
                        model, prompts, temperature=self._temperature, stop_ids=self._stop_ids, heard=hear
                    )
                return sample(
                    model, prompts, temperature=self._temperature, stop_ids=self._stop_ids, pad_id=self._pad_id
                )
        finally:
            model.train(training)
            self.busy_s += time.monotonic() - begun


def _give(future: asyncio.Future[Sampled], answer: Sampled) -> None:
    if not future.done():  # who asked may be gone
        future.set_result(answer)
