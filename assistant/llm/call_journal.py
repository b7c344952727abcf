"""The journal of a run's model calls, ``calls.jsonl``: what makes a killed run go on without paying twice.

Two kinds of lines: ``asked`` before a call is made, ``answered`` when its answer is there (written and forced to disk
before it is used). A call is known by turn and sample. A resumed run takes answers from here; a call that was asked and
never answered is made again, and counted as lost: whether the provider charged for it, the journal cannot know.

An answer is kept whole (up to 4 MiB), so the file also is a transcript: ``--model replay:RUN`` reads it back. Prompts
are kept as digests; keys never. Torn last lines of a killed process are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drk.assistant.answer_parser import MAX_ANSWER_CHARS
from drk.assistant.budget import Spending
from drk.assistant.events import EventLog, make_event, read_events
from drk.assistant.llm.messages import Reply, Usage

FILE_NAME = "calls.jsonl"


@dataclass(frozen=True)
class CallRecord:
    """One answered call."""

    turn: int
    sample: int
    reply: Reply
    cost_usd: float | None = None
    seconds: float = 0.0
    held_candidate: bool = True
    prompt: Mapping[str, Any] = field(default_factory=dict)


class CallJournal:
    """The calls of one run. ``folder`` null keeps them in memory only (a search without a run folder)."""

    def __init__(self, folder: Path | None) -> None:
        self._log = None if folder is None else EventLog(folder / FILE_NAME)
        self.answered: dict[tuple[int, int], CallRecord] = {}
        self._asked = 0
        self._answers = 0
        for row in [] if folder is None else read_events(folder / FILE_NAME):
            self._read(row)

    def _read(self, row: Mapping[str, Any]) -> None:
        if row.get("event") == "asked":
            self._asked += 1
        elif row.get("event") == "answered":
            usage = None if row["usage"] is None else Usage(**row["usage"])
            reply = Reply(row["text"], usage, row["cut"], row["attempts"], row["model"], tuple(row["notes"]))
            self._add(
                CallRecord(
                    row["turn"],
                    row["sample"],
                    reply,
                    row["cost_usd"],
                    row["seconds"],
                    row["held_candidate"],
                    row["prompt"],
                )
            )

    def _add(self, record: CallRecord) -> None:
        self._answers += 1
        self.answered[record.turn, record.sample] = record

    def ask(self, turn: int, sample: int, **facts: Any) -> None:
        """Note that a call is about to be made."""
        self._asked += 1
        if self._log is not None:
            self._log.append(make_event("asked", turn=turn, sample=sample, **facts))

    def answer(self, record: CallRecord) -> None:
        """Keep an answer."""
        self._add(record)
        if self._log is not None:
            reply = record.reply
            self._log.append(
                make_event(
                    "answered",
                    turn=record.turn,
                    sample=record.sample,
                    model=reply.model,
                    text=reply.text[:MAX_ANSWER_CHARS],
                    cut=reply.cut,
                    usage=None if reply.usage is None else asdict(reply.usage),
                    cost_usd=record.cost_usd,
                    attempts=reply.attempts,
                    notes=list(reply.notes),
                    seconds=round(record.seconds, 3),
                    held_candidate=record.held_candidate,
                    prompt=dict(record.prompt),
                )
            )

    def spending(self) -> Spending:
        """Return what all calls so far took."""
        records = self.answered.values()
        usages = [record.reply.usage or Usage() for record in records]
        return Spending(
            calls=len(self.answered),
            prompt_tokens=sum(usage.prompt for usage in usages),
            completion_tokens=sum(usage.completion for usage in usages),
            cost_usd=sum(record.cost_usd or 0.0 for record in records),
            unpriced_calls=sum(record.cost_usd is None for record in records),
            lost_calls=max(0, self._asked - self._answers),
            no_candidate=sum(not record.held_candidate for record in records),
        )


def read_spending(folder: Path) -> Spending:
    """Return what the model calls of the run in ``folder`` took so far."""
    return CallJournal(folder).spending()
