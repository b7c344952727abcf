"""Sampling from a vLLM server over HTTP: token ids in and out, with the log-probabilities of the sampled tokens.

Speaks ``/v1/completions`` with a list of token ids as the prompt, ``return_token_ids`` and ``logprobs: 0``, so that
what was sampled is what is trained on: text is never tokenised a second time. The server must report log-probabilities
of the distribution that it samples from (``--logprobs-mode processed_logprobs``; without it they are off by up to 0.4
at temperature 0.8), which an answer does not tell. Connections that break and servers that start anew are waited for,
and counted as ``outages``: a server that was started anew has the weights that it was started with, so the trainer
sends its own again and collects anew.

Only the standard library speaks HTTP here: in threads, one a request. Honest limits: tried against a stand-in server
that sends recorded shapes, and not against vLLM itself in this version; no streaming, no prefix hints.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from drk.training.backends import SamplerUnavailable
from drk.training.sampling import Prompt, Sampled

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
AWAY = (502, 503)
"""Answers of a proxy in front of a server that is gone, or of one that is starting."""
MAX_ANSWER_BYTES = 64 * 2**20


class ServerRefusal(SamplerUnavailable):
    """The server answered that the request is wrong: asking again would not mend it."""


class VllmBackend:
    """A server at ``url`` (ending in ``/v1``) that serves ``model``."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float,
        stop_ids: frozenset[int],
        concurrency: int = 64,
        patience_s: float = 300.0,
        timeout_s: float = 1800.0,
    ) -> None:
        self._url = url.rstrip("/") + "/completions"
        self._model = model
        self._temperature = temperature
        self._stop_ids = stop_ids
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="vllm")
        self.retries = 0
        self.outages = 0
        self.busy_s = 0.0

    def begin(self, trajectories: int) -> None:
        """Do nothing: each trajectory is answered on its own."""

    def leave(self) -> None:
        """Do nothing."""

    async def settle(self) -> None:
        """Do nothing: the server's weights change when they are sent."""

    async def close(self) -> None:
        """End the threads; requests under way are finished."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    async def generate(self, prompt: Prompt) -> Sampled:
        """Answer one prompt, through restarts of the server.

        Raises:
            SamplerUnavailable: it was away for longer than patience lasts, or what it sends cannot be used.
        """
        body = {
            "model": self._model,
            "prompt": list(prompt.ids),
            "max_tokens": prompt.max_new_tokens,
            "temperature": self._temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": prompt.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(self._stop_ids),
            "skip_special_tokens": False,
        }
        data, deadline, pause_s = json.dumps(body).encode(), time.monotonic() + self._patience_s, 0.25
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self._read(await loop.run_in_executor(self._threads, self._post, data))
            except urllib.error.HTTPError as error:
                said = error.read(2000).decode("utf-8", "replace")
                if error.code not in RETRIED:
                    raise ServerRefusal(f"the sampler refused a request ({error.code}): {said[:300]}") from error
                cause = f"HTTP {error.code}: {said[:200]}"
                self.outages += error.code in AWAY
            except (OSError, EOFError, ValueError) as error:
                # refused or broken connections, and answers that a dying server cut short
                cause = repr(error)
                self.outages += 1
            if time.monotonic() + pause_s > deadline:
                raise SamplerUnavailable(f"no sampler at {self._url} for {self._patience_s:g} s: {cause}")
            self.retries += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 10.0)

    def _post(self, data: bytes) -> Any:
        request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"})
        begun = time.monotonic()
        with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
            answer = json.loads(response.read(MAX_ANSWER_BYTES))
        self.busy_s += time.monotonic() - begun
        return answer

    def _read(self, answer: Any) -> Sampled:
        """Return what an answer holds.

        Raises:
            SamplerUnavailable: token ids or log-probabilities are missing: the server is too old, or is no vLLM.
        """
        try:
            choice = answer["choices"][0]
            ids = tuple(int(token) for token in choice["token_ids"])
            logps = tuple(float(value) for value in choice["logprobs"]["token_logprobs"])
            cut = choice["finish_reason"] == "length"
        except (KeyError, IndexError, TypeError) as error:
            raise ServerRefusal(
                f"the sampler's answer holds no token ids or log-probabilities ({error!r})",
                help="vLLM 0.22 or later, which knows return_token_ids",
            ) from error
        if len(ids) != len(logps) or not ids:
            raise ServerRefusal(f"the sampler sent {len(ids)} tokens and {len(logps)} log-probabilities")
        return Sampled(ids, logps, cut)
