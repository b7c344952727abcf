"""What an artefact's module says of itself, for ``drk check``: the task without its sources, and the evidence.

The record is JSON in comment lines that begin with ``#:``, below the header of ``<stem>_kernels.py``. Formatters leave
comments alone, and it travels with the code it is about. Sources are not in it: a check is of the code as it is now.

Left out: tensors. Trained weights are not needed for a verdict; inputs that were captured with their values cannot be
drawn again, so such an artefact cannot be checked. Artefacts of parts are checked one by one: the file that puts them
together has no record of its own.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from drk.assistant.episode import Turn, headline_interval
from drk.assistant.errors import TargetError
from drk.gym.errors import BundleError
from drk.gym.schema import Argument, Call, CapturedTensor, Interval, Nested, Task, Verdict
from drk.gym.wire import candidate_id, task_from_json, task_to_json, verdict_from_json, verdict_to_json

RECORD_VERSION = 1
START = "#: drk record"
END = "#: end of the record"
MARKER = "# What was verified."
"""First words of what follows the candidate's source in an artefact."""
_WIDTH = 110
_EVIDENCE = ("evidence", "reached", "correct", "honest", "speedups", "headline", "latency_ms", "coverage", "weights")
_MACHINE = ("gpu", "torch", "triton", "cuda", "drk")


@dataclass(frozen=True)
class Record:
    """What an artefact was verified as. ``task`` holds no sources; ``verdict`` is the evidence without its details."""

    task: Task
    verdict: Verdict
    candidate_id: str

    @property
    def speedup(self) -> Interval | None:
        """The speed-up over the fastest baseline then, null where nothing was measured."""
        return headline_interval(self.verdict)

    @property
    def gpu(self) -> str:
        """The GPU that measured it, or an empty string."""
        return str(self.verdict.environment.get("gpu") or "")


def record_lines(task: Task, best: Turn) -> list[str]:
    """Return the comment lines for an artefact's module."""
    bare = replace(task, files={task.entry: ""}, tensors=None, weight=1.0)
    told = verdict_to_json(best.verdict)
    verdict = {key: told[key] for key in _EVIDENCE}
    verdict["environment"] = {key: told["environment"][key] for key in _MACHINE if key in told["environment"]}
    data = {
        "version": RECORD_VERSION,
        "task": task_to_json(bare),
        "verdict": {"status": "accepted", **verdict},
        "candidate_id": candidate_id(best.candidate),
    }
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    text = text.replace(" ", "\\u0020")  # blanks stand in strings only; at a chunk's edge an editor might strip them
    chunks = [text[start : start + _WIDTH] for start in range(0, len(text), _WIDTH)]
    return [START, *(f"#: {chunk}" for chunk in chunks), END]


def is_artefact(text: str, header: str) -> bool:
    """Say whether a file is an artefact that holds kernels (not one that only puts parts together)."""
    return text.startswith(header) and not text.startswith(f"{header} for parts of")


def read_record(text: str, file: str = "") -> Record:
    """Return the record of an artefact's module.

    Raises:
        TargetError: kind ``record``: there is none, or it cannot be read.
    """
    lines = text.splitlines()
    if START not in lines or END not in lines:
        raise TargetError(
            "the file holds no record of what was verified",
            kind="record",
            file=file,
            cause="it was taken out, or an earlier drk wrote the file",
            help="run drk optimize again",
        )
    chunks = [line.removeprefix("#:").strip() for line in lines[lines.index(START) + 1 : lines.index(END)]]
    try:
        data = json.loads("".join(chunks))
        if data["version"] != RECORD_VERSION:
            raise ValueError(f"its version is {data['version']!r}, this drk reads {RECORD_VERSION}")
        record = Record(task_from_json(data["task"]), verdict_from_json(data["verdict"]), str(data["candidate_id"]))
    except (ValueError, KeyError, TypeError, RecursionError, BundleError) as error:
        raise TargetError("the record cannot be read", kind="record", file=file, cause=str(error)) from error
    if isinstance(record.task.inputs, Call) and any(map(_captured, _arguments(record.task.inputs))):
        raise TargetError(
            "the inputs were captured from a run, and did not travel with the file", kind="record-inputs", file=file
        )
    return record


def _arguments(call: Call) -> list[Argument]:
    return [*call.args, *call.kwargs.values()]


def _captured(argument: Argument) -> bool:
    if isinstance(argument, Nested):
        return any(map(_captured, argument.items))
    return isinstance(argument, CapturedTensor)


def committed_candidate(text: str, file: str = "") -> str:
    """Return the candidate's source as it stands in an artefact's module: what is below the record.

    Raises:
        TargetError: kind ``record``: the places that bound it are gone.
    """
    found = re.search(rf"^{re.escape(END)}\n(.*?)\n# -{{20,}}\n{re.escape(MARKER)}", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise TargetError("the kernels in the file cannot be told from the rest", kind="record", file=file)
    return found[1].strip() + "\n"


def machine(verdict: Verdict) -> dict[str, Any]:
    """Return device and versions of a verdict."""
    return {key: verdict.environment[key] for key in _MACHINE if verdict.environment.get(key)}
