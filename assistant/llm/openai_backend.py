"""Chat completions over any OpenAI-compatible endpoint (hosted models, vLLM, a team's own), by the ``openai`` client.

The client's own retries are off: here each one honours ``Retry-After``, stays within the settings, and carries the
same ``Idempotency-Key``, so that an endpoint that knows it does not charge twice. Tried again: no connection, timeouts,
408, 409, 429, 5xx, and answers that are no completion. Not tried again: refused keys, unknown models, spent quotas.
Parameters that an endpoint refuses (``max_completion_tokens`` or ``max_tokens``, ``seed``, ``temperature``, ...) are
exchanged or left out, and said so in the reply's notes.

Whole answers are asked for unless ``stream`` is set, which helps where proxies drop quiet connections.
"""

from __future__ import annotations

import asyncio
import email.utils
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drk.assistant.answer_parser import MAX_ANSWER_CHARS
from drk.assistant.llm.keys import DEFAULT_KEY_VARIABLE, find_key, redact, without_key
from drk.assistant.llm.messages import ContextOverflow, ModelFault, Reply, Request, Usage, estimate_tokens
from drk.assistant.llm.model_settings import OPENAI_URL, ModelSettings

if TYPE_CHECKING:
    import openai

CHECK_TIMEOUT_S = 10.0
LONGEST_WAIT_S = 300.0
"""An endpoint that asks to wait longer than this has failed."""
_RETRIED = frozenset((408, 409, 425, 429))
_OVERFLOW_WORDS = ("context_length", "context length", "maximum context", "max_model_len", "too many tokens")
_QUOTA_WORDS = ("insufficient_quota", "billing")


class _TryAgain(Exception):
    """Asking again may help; ``wait_s`` is what the endpoint asked for, null where it did not say."""

    def __init__(self, why: str, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class OpenAIBackend:
    """One model at one endpoint. ``key`` is looked up by :func:`drk.assistant.llm.keys.find_key` unless given."""

    local = False

    def __init__(self, model: str, settings: ModelSettings, *, key: str | None = None) -> None:
        if importlib.util.find_spec("openai") is None:
            raise ModelFault(
                "openai models need the llm extra",
                cause="the package openai is not installed",
                help="pip install 'drk[llm]'",
            )
        self.name = f"openai:{model}"
        self.endpoint = settings.base_url or OPENAI_URL
        self._model = model
        self._settings = settings
        self._key = find_key(settings) if key is None else key
        self._client: openai.AsyncOpenAI | None = None
        # the newer name at OpenAI itself, whose newer models insist on it; the name that everyone knows elsewhere
        self._limit_name = "max_completion_tokens" if not settings.base_url else "max_tokens"
        self._left_out: set[str] = set()

    async def start(self) -> None:
        """Ask the endpoint for its models.

        Raises:
            ModelFault: it cannot be reached or refuses the key. An endpoint that has no such list passes.
        """
        import openai

        try:
            await self._connect().models.list(timeout=CHECK_TIMEOUT_S)
        except openai.APIConnectionError as error:
            raise self._unreachable(error) from None
        except openai.APIStatusError as error:
            if error.status_code in (401, 403):
                raise self._refused_key(error) from None
        except openai.OpenAIError:
            return

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation; see :class:`drk.assistant.llm.messages.Backend`."""
        pause_s = self._settings.backoff_s
        why = ""
        for attempt in range(1, self._settings.attempts + 1):
            try:
                return await self._ask(request, attempt)
            except _TryAgain as again:
                why = str(again)
                if again.wait_s is not None and again.wait_s > LONGEST_WAIT_S:
                    raise ModelFault(f"{self.endpoint} asks to wait {again.wait_s:.0f} s", cause=why) from None
                if attempt < self._settings.attempts:
                    await asyncio.sleep(pause_s if again.wait_s is None else again.wait_s)
                pause_s = min(2 * pause_s, 30.0)
        raise ModelFault(
            f"{self.name} failed {self._settings.attempts} times", cause=why, help=f"is {self.endpoint} well?"
        )

    def count_tokens(self, text: str) -> int:
        """Return an estimate: endpoints do not share their tokenisers."""
        return estimate_tokens(text)

    async def close(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def _connect(self) -> openai.AsyncOpenAI:
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                api_key=self._key,
                base_url=self.endpoint,
                timeout=self._settings.timeout_s,
                max_retries=0,
            )
        return self._client

    async def _ask(self, request: Request, attempt: int) -> Reply:
        import openai

        try:
            while True:
                try:
                    # the client bounds each read, not the whole call: a server that drips bytes would hold it for ever
                    async with asyncio.timeout(self._settings.timeout_s):
                        return await self._call(request, attempt)
                except openai.BadRequestError as error:
                    if not self._adapt(error):
                        raise
        except (openai.APITimeoutError, TimeoutError):
            raise _TryAgain(f"no answer within {self._settings.timeout_s:g} s") from None
        except openai.APIConnectionError as error:
            raise _TryAgain(f"no connection: {self._clean(error.__cause__ or error)}") from None
        except openai.APIStatusError as error:
            raise self._sorted_out(error) from None
        except (openai.OpenAIError, ValueError) as error:
            raise _TryAgain(f"the answer is no completion: {self._clean(error)}") from None
        except _transport_errors() as error:
            raise _TryAgain(f"the connection broke: {self._clean(error)}") from None

    async def _call(self, request: Request, attempt: int) -> Reply:
        parameters: dict[str, Any] = {
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
            "seed": request.seed,
            self._limit_name: request.max_tokens,
        }
        kept = {name: value for name, value in parameters.items() if name not in self._left_out}
        headers = {"Idempotency-Key": request.key} if request.key else {}
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        create: Callable[..., Any] = self._connect().chat.completions.create
        common = {"model": self._model, "messages": messages, "extra_headers": headers, **kept}
        if self._settings.stream:
            extra = {} if "stream_options" in self._left_out else {"stream_options": {"include_usage": True}}
            text, cut, usage, model = await _read_stream(await create(**common, **extra, stream=True))
        else:
            text, cut, usage, model = _read_whole(await create(**common))
        notes = tuple(f"{name} is refused by the endpoint and was left out" for name in sorted(self._left_out))
        return Reply(without_key(text, self._key), usage, cut, attempt, model or self._model, notes)

    def _adapt(self, error: openai.BadRequestError) -> bool:
        """Exchange or leave out the parameter that was refused; say whether that is worth another try."""
        said = f"{error.param or ''} {error.message}".lower()
        if any(word in said for word in _OVERFLOW_WORDS):
            return False
        if self._limit_name in said and self._limit_name not in self._left_out:
            other = {"max_tokens": "max_completion_tokens", "max_completion_tokens": "max_tokens"}[self._limit_name]
            if "unsupported" in said or "not supported" in said or "unknown" in said or "unrecognized" in said:
                self._left_out.add(self._limit_name)  # as a mark: the same name is not tried a second time
                self._limit_name = other
                return other not in self._left_out
        for name in ("stream_options", "temperature", "top_p", "seed"):
            if name in said and name not in self._left_out:
                self._left_out.add(name)
                return True
        return False

    def _sorted_out(self, error: openai.APIStatusError) -> Exception:
        """Return what an HTTP status means for the caller."""
        status, said = error.status_code, self._clean(error)
        lowered = f"{said} {error.code or ''}".lower()
        if status in (400, 413, 422) and any(word in lowered for word in _OVERFLOW_WORDS):
            return ContextOverflow(said)
        if status in (401, 403):
            return self._refused_key(error)
        if status == 404:
            return ModelFault(f"{self.endpoint} has no {self._model!r}", cause=said, help="--model openai:NAME")
        if status == 429 and any(word in lowered for word in _QUOTA_WORDS):
            return ModelFault(f"the quota at {self.endpoint} is spent", cause=said)
        if status in _RETRIED or status >= 500:
            return _TryAgain(f"HTTP {status}: {said}", _wait_s(error.response.headers))
        return ModelFault(f"{self.endpoint} refused the request (HTTP {status})", cause=said)

    def _refused_key(self, error: openai.APIStatusError) -> ModelFault:
        name = self._settings.api_key_env or DEFAULT_KEY_VARIABLE
        return ModelFault(
            f"{self.endpoint} refused the key in {name} (HTTP {error.status_code})",
            cause=self._clean(error),
            help=f"set {name} to a key of this endpoint, or name another variable: --api-key-env",
        )

    def _unreachable(self, error: Exception) -> ModelFault:
        return ModelFault(
            f"cannot reach {self.endpoint}",
            cause=self._clean(error.__cause__ or error),
            help="--base-url http://HOST:PORT/v1 names the endpoint",
        )

    def _clean(self, error: BaseException) -> str:
        text = str(getattr(error, "message", "") or error) or type(error).__name__
        return redact(" ".join(text.split())[:400], self._key)


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP library below the client, which come through bare while a stream is read."""
    names = [name for name in ("httpx2", "httpx") if importlib.util.find_spec(name) is not None]
    return tuple(importlib.import_module(name).HTTPError for name in names)


def _read_whole(answer: Any) -> tuple[str, bool, Usage | None, str]:
    choices = getattr(answer, "choices", None)
    if not choices:
        raise ValueError("it has no choices")
    message = getattr(choices[0], "message", None)
    text = _text_of(getattr(message, "content", None))
    if message is None or (not text and getattr(message, "tool_calls", None)):
        text = ""  # an answer that only calls tools holds no candidate; the next turn says so
    return (
        text[: MAX_ANSWER_CHARS + 1],
        choices[0].finish_reason == "length",
        _usage_of(answer),
        str(answer.model or ""),
    )


async def _read_stream(stream: Any) -> tuple[str, bool, Usage | None, str]:
    """Collect a stream; one that ends without a finish reason was torn.

    Raises:
        ValueError: it was torn.
    """
    parts: list[str] = []
    size, finish, usage, model = 0, None, None, ""
    async with stream:
        async for chunk in stream:
            usage = _usage_of(chunk) or usage
            model = str(getattr(chunk, "model", "") or model)
            for choice in chunk.choices or []:
                parts.append(_text_of(getattr(choice.delta, "content", None)))
                size += len(parts[-1])
                finish = choice.finish_reason or finish
            if size > MAX_ANSWER_CHARS:
                finish = "length"
                break
    if finish is None:
        raise ValueError("the stream was torn")
    return "".join(parts), finish == "length", usage, model


def _text_of(content: Any) -> str:
    """Return the text of a content field: a string, null, or a list of parts as some servers send it."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _usage_of(answer: Any) -> Usage | None:
    usage = getattr(answer, "usage", None)
    if usage is None:
        return None
    details = getattr(usage, "completion_tokens_details", None)
    prompt_details = getattr(usage, "prompt_tokens_details", None)
    return Usage(
        prompt=_count(usage, "prompt_tokens"),
        completion=_count(usage, "completion_tokens"),
        reasoning=_count(details, "reasoning_tokens"),
        cached=_count(prompt_details, "cached_tokens"),
    )


def _count(holder: Any, name: str) -> int:
    value = getattr(holder, name, 0)
    return value if type(value) is int and value >= 0 else 0


def _wait_s(headers: Any) -> float | None:
    """Return the seconds that ``Retry-After`` asks for (a number, or a date), or null."""
    text = headers.get("retry-after", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
