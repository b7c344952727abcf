"""Conversations as token ids: the same texts that ``drk optimize`` sends, through the policy's own chat template.

``full`` uses the shipped templates of :mod:`drk.assistant.prompts`; ``bare`` shows the module's file and the digest and
nothing else, for small models whose context is short; a folder replaces templates by name. A prompt that leaves no room
for an answer is found before anything is generated: older turns go first, and a task that does not fit alone raises.

Turns are told apart by their own prompts: what the policy said is shown as the file that was judged, so that the
prompt of turn two is no continuation of turn one's tokens. One row is one turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drk.assistant.episode import Turn
from drk.assistant.errors import UsageError
from drk.assistant.llm.messages import Message
from drk.assistant.prompts import Prompts, Shape, conversation, fenced
from drk.assistant.proposers import ProposeContext
from drk.gym.devices import DeviceFacts, device_facts
from drk.gym.schema import Task
from drk.training.errors import TrainingError

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""What models made here use, and a tokenizer that has none."""

BARE_TEMPLATES = Path(__file__).parent / "templates"


def template_prompts(templates: str) -> Prompts:
    """Return the prompts of ``full``, ``bare``, or a folder.

    Raises:
        UsageError: the folder is missing or wrong.
    """
    if templates == "full":
        return Prompts(None)
    return Prompts(BARE_TEMPLATES if templates == "bare" else Path(templates))


class PromptTooLong(TrainingError):
    """The task alone leaves no room for an answer in the model's context."""


@dataclass(frozen=True)
class PromptSettings:
    """``templates`` as in :class:`drk.training.config.PromptSection`; ``target`` names the GPU that is written for."""

    templates: str = "full"
    policy: str = "append-all"
    context_tokens: int = 18432
    max_new_tokens: int = 8192
    target: str = "sm_90"


class Prompter:
    """Turns a task and its history into token ids. ``tokenizer`` is a ``transformers`` tokenizer.

    Raises:
        UsageError: the folder of templates is missing or wrong.
    """

    def __init__(self, tokenizer: Any, settings: PromptSettings) -> None:
        self._prompts = template_prompts(settings.templates)
        self._tokenizer = tokenizer
        self._settings = settings
        self._hardware: DeviceFacts = device_facts(settings.target)
        self.version = self._prompts.version

    def messages(self, task: Task, history: Sequence[Turn] = ()) -> tuple[Message, ...]:
        """Return the conversation before the next answer.

        Raises:
            PromptTooLong: the task alone does not fit.
        """
        settings = self._settings
        room = settings.context_tokens - settings.max_new_tokens
        context = ProposeContext(task, None, self._hardware, tuple(history))
        try:
            return conversation(self._prompts, context, Shape(settings.policy, room), self._count)
        except UsageError as error:
            raise PromptTooLong(
                f"{task.name}: {error.message}", help="raise model.context_tokens, or use prompt.templates = 'bare'"
            ) from error

    def prompt_ids(self, task: Task, history: Sequence[Turn] = ()) -> tuple[int, ...]:
        """Return the next turn's prompt.

        Raises:
            PromptTooLong: see :meth:`messages`.
        """
        ids = encode_chat(self._tokenizer, self.messages(task, history), answer=True)
        room = self._settings.context_tokens - self._settings.max_new_tokens
        if len(ids) > room:  # the chat template itself takes tokens
            raise PromptTooLong(f"{task.name}: the prompt takes {len(ids)} tokens, and only {room} are there for it")
        return ids

    def check(self, tasks: Sequence[Task]) -> None:
        """Look at every task's first prompt, before a run begins rather than in its middle.

        Raises:
            PromptTooLong: which tasks leave no room for an answer.
        """
        found, why = [], None
        for task in tasks:
            try:
                self.prompt_ids(task)
            except PromptTooLong as error:
                found.append(task.name)
                why = why or error
        if why is not None:
            raise PromptTooLong(
                f"{len(found)} of {len(tasks)} tasks leave no room to answer: {', '.join(found[:5])} ({why.message})",
                help="leave them out, raise model.context_tokens, or use prompt.templates = 'bare'",
            )

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_chat(tokenizer: Any, messages: Sequence[Message], *, answer: bool) -> tuple[int, ...]:
    """Return a conversation's token ids; with ``answer``, up to where the next answer begins."""
    rows = [{"role": message.role, "content": message.content} for message in messages]
    template = None if tokenizer.chat_template else CHAT_TEMPLATE
    text = tokenizer.apply_chat_template(rows, chat_template=template, add_generation_prompt=answer, tokenize=False)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer_text(source: str) -> str:
    """Return how an assistant's answer shows a file, in conversations and in demonstrations alike."""
    return fenced(source, "python")


def stop_ids(tokenizer: Any, model: Any) -> frozenset[int]:
    """Return the ids that end an answer: the tokenizer's and the model's end tokens.

    Raises:
        TrainingError: one of them is a plain word, so that a kernel containing it would end early.
    """
    declared = getattr(model.generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *([declared] if isinstance(declared, int) else declared or [])} - {None}
    special = set(tokenizer.all_special_ids) | set(getattr(tokenizer, "added_tokens_decoder", {}))
    for one in ids - special:
        if tokenizer.decode([one]).strip():
            raise TrainingError(f"the end token {one} is the plain text {tokenizer.decode([one])!r}")
    return frozenset(ids)
