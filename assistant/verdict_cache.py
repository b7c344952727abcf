"""Verdicts by content, across runs: the same candidate on the same task, device and versions is judged once.

The key is a digest of candidate id, task id and *conditions*: whatever else a verdict depends on (device name and
driver, torch, triton and drk versions, seeds, sandbox level, target). Files live below ``<cache>/verdicts/``, written
whole or not at all; a file that cannot be read is a miss, never an error.

Left out: eviction (a verdict takes a few KiB; ``drk runs clean --cache`` empties it). Verdicts with status ``error``
are never kept, since they say nothing about the candidate.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drk.assistant.atomic_write import write_atomically
from drk.gym.errors import BundleError
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.wire import candidate_id, task_id, verdict_from_json, verdict_to_json


class VerdictCache:
    """A folder of verdicts. ``conditions`` must be JSON-able; ``folder`` null means no cache."""

    def __init__(self, folder: Path | None, conditions: Mapping[str, Any]) -> None:
        self._folder = folder / "verdicts" if folder is not None else None
        self._conditions = json.dumps(conditions, sort_keys=True, default=str)

    def get(self, task: Task, candidate: Candidate) -> Verdict | None:
        """Return the kept verdict, or null."""
        path = self._path(task, candidate)
        if path is None:
            return None
        try:
            return verdict_from_json(json.loads(path.read_text()))
        except (OSError, ValueError, BundleError):
            return None

    def put(self, task: Task, candidate: Candidate, verdict: Verdict) -> bool:
        """Keep ``verdict``; say whether it was kept (a full or read-only disk only costs the next run time)."""
        path = self._path(task, candidate)
        if path is None or verdict.status == "error":
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(verdict_to_json(verdict)).encode())
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Remove every verdict."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, task: Task, candidate: Candidate) -> Path | None:
        if self._folder is None:
            return None
        text = "\n".join((task_id(task), candidate_id(candidate), self._conditions))
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        return self._folder / key[:2] / f"{key}.json"
