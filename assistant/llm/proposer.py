"""A language model as a proposer: the history becomes a conversation, each sample one call, each answer a candidate.

All samples of a step get the same conversation and differ in their seed. Answers are journalled before they are used
and come back in the order of their samples. An answer without a candidate, or one that repeats a file that was judged,
stands as a candidate whose note says why (:func:`drk.assistant.answer_parser.missing_candidate`): it is a turn, it is
fed back, and it counts in the rate that the summary shows. The search ends after :data:`IDLE_STEPS` steps of nothing
but those.

A call that fails for good costs its sample only; when all of a step fail, the fault is raised. Nothing is kept between
calls but the backend: whoever resumes a run asks only for what is missing.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import math
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

from drk.assistant.answer_parser import missing_candidate, missing_reason, parse_answer
from drk.assistant.budget import BudgetSpent, Reservations
from drk.assistant.episode import Episode, best_of_history
from drk.assistant.llm.call_journal import CallJournal, CallRecord
from drk.assistant.llm.messages import Backend, ContextOverflow, Message, ModelFault, Reply, Request, Usage
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.llm.prices import PriceList, price_list, require_price
from drk.assistant.prompts import Prompts, Shape, conversation
from drk.assistant.proposers import ProposeContext
from drk.gym.schema import Candidate
from drk.gym.wire import candidate_id, task_id

IDLE_STEPS = 3
SHRINKS = 4
"""How often a conversation that the endpoint finds too long is cut by a quarter."""


@dataclass
class _Step:
    """What the calls of one step share. ``conversations`` holds them by how often they were shortened."""

    context: ProposeContext
    turn: int
    journal: CallJournal
    reservations: Reservations
    conversations: dict[int, tuple[Message, ...]] = field(default_factory=dict)


class LanguageModelProposer:
    """Proposes by asking ``backend``. Enter it by :func:`drk.assistant.proposers.opened`."""

    ordered = False

    def __init__(self, backend: Backend, settings: ModelSettings, prompts: Prompts) -> None:
        self.name = backend.name
        self.endpoint = backend.endpoint
        self.reads_hotspots = prompts.shows_hotspots
        self.enough_coverage = float(getattr(backend, "enough_coverage", math.inf))
        self._backend = backend
        self._settings = settings
        self._prompts = prompts
        self._slots = asyncio.Semaphore(settings.concurrency)

    @property
    def prices(self) -> PriceList:
        """What calls cost."""
        return price_list(self._backend, self._settings)

    async def start(self) -> None:
        """Make the backend ready.

        Raises:
            ModelFault: it cannot be; names the setting.
            UsageError: a limit on money without a known price.
        """
        require_price(self.prices, self._settings.max_cost_usd)
        await self._backend.start()

    async def close(self) -> None:
        """Let go of the backend."""
        await self._backend.close()

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return one candidate for each sample; an empty list when nothing new came for some steps.

        Raises:
            ModelFault: no sample could be had.
            BudgetSpent: the limit on money allows no further call.
            UsageError: the task does not fit the model's context.
        """
        turn = context.turn or 1 + max((one.index for one in context.history), default=0)
        if self._is_idle(context):
            return []
        journal = CallJournal(context.folder)
        limit_usd = self._settings.max_cost_usd
        step = _Step(context, turn, journal, Reservations(limit_usd, journal.spending().cost_usd))
        missing = [sample for sample in range(context.limit) if (turn, sample) not in journal.answered]
        faults = await asyncio.gather(*(self._ask(step, sample) for sample in missing), return_exceptions=True)
        records = [journal.answered[turn, s] for s in range(context.limit) if (turn, s) in journal.answered]
        for fault in faults:
            if isinstance(fault, BaseException) and (not records or not isinstance(fault, ModelFault | BudgetSpent)):
                raise fault
        return [self._candidate(record, context) for record in records]

    def _is_idle(self, context: ProposeContext) -> bool:
        steps: dict[int, bool] = {}
        for turn in context.history:
            steps[turn.index] = steps.get(turn.index, False) or missing_reason(turn.candidate) is None
        return len(steps) >= IDLE_STEPS and not any(steps[index] for index in sorted(steps)[-IDLE_STEPS:])

    async def _ask(self, step: _Step, sample: int) -> None:
        async with self._slots:
            for shrinks in range(SHRINKS + 1):
                messages = self._conversation(step, shrinks)
                try:
                    await self._call(step, sample, messages)
                    return
                except ContextOverflow as error:
                    said = str(error)
            raise ModelFault(
                f"{self.name} finds even a short conversation too long",
                cause=said,
                help="--context-tokens N: what the model takes, prompt and answer together",
            )

    def _conversation(self, step: _Step, shrinks: int) -> tuple[Message, ...]:
        if shrinks not in step.conversations:
            room = self._settings.context_tokens - self._settings.max_tokens
            shape = Shape(self._settings.policy, math.floor(room * 0.75**shrinks))
            count = self._backend.count_tokens
            step.conversations[shrinks] = conversation(self._prompts, step.context, shape, count)
        return step.conversations[shrinks]

    async def _call(self, step: _Step, sample: int, messages: tuple[Message, ...]) -> None:
        text = "\0".join(f"{message.role}\0{message.content}" for message in messages)
        sha = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        tokens = sum(self._backend.count_tokens(message.content) + 8 for message in messages)
        at_most = self.prices.cost_usd(Usage(tokens, self._settings.max_tokens))
        if not step.reservations.hold(at_most):
            raise BudgetSpent(f"another call could exceed the budget of {self._settings.max_cost_usd:g} dollars")
        paid: float | None = None
        try:
            step.journal.ask(step.turn, sample, model=self.name, prompt_sha256=sha)
            began = time.monotonic()
            reply = await self._backend.complete(self._request(step, sample, messages, sha))
            paid = self.prices.cost_usd(reply.usage)
            seconds = time.monotonic() - began
        finally:
            step.reservations.settle(at_most, paid)
        prompt = {
            "sha256": sha,
            "messages": len(messages),
            "tokens_estimated": tokens,
            "templates": self._prompts.version,
            "policy": self._settings.policy,
        }
        held = parse_answer(reply.text, cut=reply.cut).source is not None
        step.journal.answer(CallRecord(step.turn, sample, reply, paid, seconds, held, prompt))

    def _request(self, step: _Step, sample: int, messages: tuple[Message, ...], sha: str) -> Request:
        run = step.context.folder.name if step.context.folder is not None else ""
        words = (task_id(step.context.task), run, str(step.turn), str(sample), self.name, sha)
        key = hashlib.sha256("\0".join(words).encode()).hexdigest()
        seed = int(hashlib.sha256("\0".join((*words[:1], *words[2:5])).encode()).hexdigest()[:7], 16)
        return Request(messages, key[:32], seed, self._settings.max_tokens)

    def _candidate(self, record: CallRecord, context: ProposeContext) -> Candidate:
        return candidate_of(record.reply, context, proposer=self.name, turn=record.turn, sample=record.sample)


def candidate_of(reply: Reply, context: ProposeContext, *, proposer: str, turn: int, sample: int) -> Candidate:
    """Return the candidate that an answer holds, or the one that stands for an answer without any."""
    mark = f"turn {turn}, sample {sample + 1}"
    found = parse_answer(reply.text, cut=reply.cut)
    if found.source is None:
        return missing_candidate(found.reason, proposer=proposer, mark=mark)
    best = best_of_history(Episode("", context.history))
    parent = None if best is None else candidate_id(best.candidate)
    note = _note(found.source) + (" (the answer was cut off)" if found.truncated else "")
    candidate = Candidate(found.source, proposer, note.strip(), parent)
    for earlier in context.history:
        if candidate_id(earlier.candidate) == candidate_id(candidate):
            reason = f"the file is that of turn {earlier.index}, unchanged"
            return missing_candidate(reason, proposer=proposer, mark=mark)
    return candidate


def _note(source: str) -> str:
    """Return the first line of the file's docstring, cut to what a terminal may show."""
    tree = _parsed(source)
    text = ast.get_docstring(tree) if tree is not None else None
    first = text.strip().splitlines()[0] if text and text.strip() else ""
    return "".join(char for char in first if char.isprintable())[:80]


def _parsed(source: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
