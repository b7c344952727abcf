"""``transformers:CHECKPOINT``: a checkpoint from disk, inside this process.

Requests that wait together are answered in one batch, padded on the left. Nothing is ever fetched: the folder must
hold model and tokenizer, and code from it is not run. A checkpoint without a chat template gets a plain one. Sampling
is seeded by the batch's first request, so equal batches on one device give equal answers.

Honest limits: meant for small models and tests; a batch runs to its longest answer, and a cancelled request is finished
all the same. With many samples a server (``vllm:``, ``openai:``) is faster by an order of magnitude.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drk.assistant.llm.batching import Batches
from drk.assistant.llm.messages import ContextOverflow, Message, ModelFault, Reply, Request, Usage
from drk.assistant.llm.model_settings import ModelSettings

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


class TransformersBackend:
    """A causal language model of the ``transformers`` library; loaded by :meth:`start`."""

    local = True

    def __init__(self, checkpoint: str, settings: ModelSettings) -> None:
        if importlib.util.find_spec("transformers") is None:
            raise ModelFault(
                "transformers models need the train extra",
                cause="the package transformers is not installed",
                help="pip install 'drk[train]', or only: pip install transformers",
            )
        if not (Path(checkpoint) / "config.json").is_file():
            raise ModelFault(
                f"no checkpoint at {checkpoint!r}", help="--model transformers:FOLDER, with config.json and tokenizer"
            )
        self.name = f"transformers:{checkpoint}"
        self.endpoint = "this process"
        self._checkpoint = str(Path(checkpoint).resolve())
        self._settings = settings
        self._batches = Batches(self.name, self._generate, settings.concurrency)
        self._model: Any = None
        self._tokenizer: Any = None

    async def start(self) -> None:
        """Load the checkpoint.

        Raises:
            ModelFault: it cannot be loaded.
        """
        if self._model is None:
            try:
                await asyncio.to_thread(self._load)
            except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
                raise ModelFault(f"cannot load {self._checkpoint}", cause=str(error)[:400]) from error

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation, together with all that wait by then."""
        return await self._batches.complete(request)

    def count_tokens(self, text: str) -> int:
        """Return the tokens of ``text`` by the checkpoint's own tokenizer."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    async def close(self) -> None:
        """Let go of the model."""
        self._model = self._tokenizer = None

    def _load(self) -> None:
        import torch
        import transformers

        options = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(self._checkpoint, padding_side="left", **options)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype="auto", **options)
        self._tokenizer = tokenizer
        self._model = model.eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def _generate(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        import torch

        model, tokenizer = self._model, self._tokenizer
        prompts = [self._encode(request.messages) for request in requests]
        limit = min(self._settings.context_tokens, getattr(model.config, "max_position_embeddings", None) or 10**9)
        answer_tokens = max(request.max_tokens for request in requests)
        fitting = [i for i, ids in enumerate(prompts) if len(ids) + 1 < limit]
        replies: list[Reply | Exception] = [ContextOverflow(f"{len(ids)} tokens of {limit}") for ids in prompts]
        if not fitting:
            return replies
        padded = tokenizer.pad({"input_ids": [prompts[i] for i in fitting]}, return_tensors="pt").to(model.device)
        width = padded["input_ids"].shape[1]
        sampling: dict[str, Any] = {"do_sample": False}
        if self._settings.temperature > 0:
            sampling = {"do_sample": True, "temperature": self._settings.temperature, "top_p": self._settings.top_p}
        with torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(requests[0].seed)
            out = model.generate(
                **padded,
                **sampling,
                top_k=0,
                max_new_tokens=min(answer_tokens, limit - width),
                pad_token_id=tokenizer.pad_token_id,
            )
        for row, i in enumerate(fitting):
            replies[i] = self._reply(out[row, width:].tolist(), len(prompts[i]))
        return replies

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        rows = [{"role": message.role, "content": message.content} for message in messages]
        template = None if self._tokenizer.chat_template else PLAIN_TEMPLATE
        text = self._tokenizer.apply_chat_template(
            rows, chat_template=template, add_generation_prompt=True, tokenize=False
        )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _reply(self, ids: list[int], prompt_tokens: int) -> Reply:
        stops = self._model.generation_config.eos_token_id
        stops = {stops} if isinstance(stops, int) else set(stops or ())
        end = next((i for i, token in enumerate(ids) if token in stops), None)
        kept = ids if end is None else ids[:end]
        text = self._tokenizer.decode(kept, skip_special_tokens=True)
        used = len(ids) if end is None else end + 1
        return Reply(text, Usage(prompt_tokens, used), cut=end is None, model=self.name)
