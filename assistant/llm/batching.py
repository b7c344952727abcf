"""Requests that wait together are answered in one batch: what backends inside this process share.

The first to come waits one turn of the event loop, so that all samples of a step make one batch. Answering happens in a
thread; a cancelled request is finished all the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from drk.assistant.llm.messages import ModelFault, Reply, Request


class Batches:
    """Answers by ``generate``, at most ``size`` requests at a time; ``name`` is whose fault it is when that fails."""

    def __init__(
        self, name: str, generate: Callable[[Sequence[Request]], Sequence[Reply | Exception]], size: int
    ) -> None:
        self._name = name
        self._generate = generate
        self._size = size
        self._lock = asyncio.Lock()
        self._waiting: list[tuple[Request, asyncio.Future[Reply]]] = []

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation, together with all that wait by then.

        Raises:
            ModelFault: the model failed (out of memory, among others).
            ContextOverflow: the conversation does not fit.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        await asyncio.sleep(0)
        async with self._lock:
            if not answer.done():
                await self._answer_waiting()
        return await answer

    async def _answer_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        for start in range(0, len(batch), self._size):
            part = batch[start : start + self._size]
            try:
                replies = await asyncio.to_thread(self._generate, [request for request, _ in part])
            except RuntimeError as error:  # out of memory, among others
                replies = [ModelFault(f"{self._name} failed", cause=str(error)[:400])] * len(part)
            for (_, answer), reply in zip(part, replies, strict=True):
                if answer.done():
                    continue
                if isinstance(reply, Exception):
                    answer.set_exception(reply)
                else:
                    answer.set_result(reply)
