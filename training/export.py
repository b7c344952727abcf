"""Demonstrations as plain conversations, for other trainers: JSONL of messages, or a folder of ``datasets``.

One record a demonstration: ``messages`` (user and assistant in turn, as ``drk optimize`` shows them to a model: the
task, answers in a fenced block, the digest of each verdict), where it comes from, and by turn whether it was accepted
and how fast it was (null: not measured). What is learned from which turn is the reader's choice.

Honest limit: digests are those of one gym run; a model that is asked later sees others. ``drk train sft`` reads the
demonstrations themselves, not this.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drk.assistant.episode import headline_interval
from drk.assistant.prompts import Prompts, Shape, conversation
from drk.assistant.proposers import ProposeContext
from drk.gym.devices import device_facts
from drk.training.dataset import Demonstration
from drk.training.prompting import answer_text, template_prompts

ROOM_TOKENS = 10**9
"""Nothing is cut from a conversation here: who reads it knows the context it is for."""


def conversation_record(one: Demonstration, prompts: Prompts, *, target: str = "sm_90") -> dict[str, Any]:
    """Return one demonstration as a JSON-able record."""
    context = ProposeContext(one.task.task, None, device_facts(target), one.turns[:-1])
    messages = [
        {"role": message.role, "content": message.content}
        for message in conversation(prompts, context, Shape("append-all", ROOM_TOKENS))
    ]
    messages.append({"role": "assistant", "content": answer_text(one.turns[-1].candidate.source)})
    intervals = [headline_interval(turn.verdict) for turn in one.turns]
    return {
        "messages": messages,
        "task": one.task.task.name,
        "family": one.task.family,
        "signature": one.task.signature,
        "accepted": [turn.verdict.accepted for turn in one.turns],
        "speedup_low": [None if interval is None else interval.low for interval in intervals],
        "templates": prompts.version,
    }


def export_demonstrations(demonstrations: Sequence[Demonstration], out: Path, *, templates: str = "full") -> int:
    """Write conversations to ``out`` and return their number: JSONL by its suffix, else a folder of ``datasets``.

    Raises:
        UsageError: the folder of templates is missing or wrong.
        ModuleNotFoundError: a folder is asked for, and ``datasets`` (the ``train`` extra) is not installed.
    """
    prompts = template_prompts(templates)
    records = [conversation_record(one, prompts) for one in demonstrations]
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    else:
        import datasets  # only where a folder is asked for: it takes seconds to import

        datasets.Dataset.from_list(records).save_to_disk(out)
    return len(records)
