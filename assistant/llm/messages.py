"""What goes to a language model and what comes back: messages, requests, replies, and the Backend interface.

A backend answers one request at a time and may batch those that wait together. It retries what is worth retrying and
raises for the rest: :class:`ContextOverflow` when the conversation is too long for the model (the caller shortens it),
:class:`ModelFault` for everything that asking again will not mend.

Left out: log-probabilities (training has its own rollouts), tools, images, system messages (the training data has
none, and several chat templates refuse them).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from drk.assistant.errors import EnvironmentFault

Role = Literal["user", "assistant"]


class ModelFault(EnvironmentFault):
    """The model cannot be asked: no key, no extra, no endpoint, refused, or it failed too often."""

    default_kind = "model"


class ContextOverflow(Exception):
    """The conversation does not fit the model's context; shorten it and ask again."""


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True)
class Request:
    """One conversation to answer.

    ``key`` identifies the call across retries and restarts (it is sent as ``Idempotency-Key``); ``max_tokens`` bounds
    the answer; ``seed`` is what a backend that can be seeded uses.
    """

    messages: tuple[Message, ...]
    key: str = ""
    seed: int = 0
    max_tokens: int = 8192


@dataclass(frozen=True)
class Usage:
    """Tokens of one call as the backend reports them; ``completion`` includes ``reasoning``."""

    prompt: int = 0
    completion: int = 0
    reasoning: int = 0
    cached: int = 0


@dataclass(frozen=True)
class Reply:
    """One answer. ``cut`` says that it hit the length limit; ``attempts`` how often the call had to be made."""

    text: str
    usage: Usage | None = None
    cut: bool = False
    attempts: int = 1
    model: str = ""
    notes: tuple[str, ...] = field(default=())


class Backend(Protocol):
    """Anything that answers conversations. ``local`` backends cost no money."""

    name: str
    endpoint: str
    local: bool

    async def start(self) -> None:
        """Make ready, and fail at once when that is impossible.

        Raises:
            ModelFault: names the setting that is wrong.
        """
        ...

    async def complete(self, request: Request) -> Reply:
        """Answer one conversation.

        Raises:
            ContextOverflow: it does not fit.
            ModelFault: it cannot be answered.
        """
        ...

    def count_tokens(self, text: str) -> int:
        """Return the tokens of ``text``, or an estimate that is rather too high."""
        ...

    async def close(self) -> None:
        """Let go of connections, processes and memory."""
        ...


def estimate_tokens(text: str) -> int:
    """Return an estimate of the tokens of ``text`` that is rather too high: code has three to four bytes a token."""
    return len(text.encode("utf-8", "surrogatepass")) // 3 + 4
