"""Reading and writing the gym's nouns at wires: JSON validated by pydantic, content ids, the bundle on disk.

A *Task bundle* has one form everywhere: a JSON object with the sources, and one safetensors blob for weights and
captured inputs. On disk these are ``task.json`` and ``tensors.safetensors`` in a folder; on the wire the blob is base64
inside the JSON. Never pickle.

pydantic is imported at the first use: it costs a third of a second, and the language server and ``drk runs`` come far
without it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from drk.gym.errors import BundleError
from drk.gym.schema import Candidate, Task, Verdict

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MAX_SOURCE_BYTES = 4 * 2**20
"""Limit for one candidate, and for all sources of one task together."""
MAX_TENSOR_BYTES = 8 * 2**30


@cache
def _adapter(what: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter({"task": Task, "candidate": Candidate, "verdict": Verdict}[what])


def _parse(what: str, data: Any) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(what).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BundleError(f"not a valid {what}: {where}: {first['msg']}") from error


def task_to_json(task: Task) -> dict[str, Any]:
    """Return the wire form of ``task``; the tensors blob becomes base64 text."""
    data: dict[str, Any] = _adapter("task").dump_python(replace(task, tensors=None), mode="json")
    if task.tensors is not None:
        data["tensors"] = base64.b64encode(task.tensors).decode()
    return data


def task_from_json(data: Any) -> Task:
    """Parse and check the wire form.

    Raises:
        BundleError: the form is wrong, a path leaves the project root, or a limit is exceeded.
    """
    if not isinstance(data, dict):
        raise BundleError("not a valid task: expected a JSON object")
    blob = data.get("tensors")
    try:
        tensors = base64.b64decode(blob, validate=True) if blob is not None else None
    except (ValueError, TypeError) as error:
        raise BundleError("not a valid task: tensors: not base64") from error
    task: Task = replace(_parse("task", {**data, "tensors": None}), tensors=tensors)
    check_task(task)
    return task


def check_task(task: Task) -> None:
    """Check paths and limits of a task that came from outside.

    Raises:
        BundleError: see :func:`task_from_json`.
    """
    for path in task.files:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\\" in path or "\0" in path:
            raise BundleError(f"not a valid task: files: {path!r} leaves the project root")
    if task.entry not in task.files:
        raise BundleError(f"not a valid task: entry {task.entry!r} is not among its files")
    if sum(len(text.encode("utf-8", "surrogatepass")) for text in task.files.values()) > MAX_SOURCE_BYTES:
        raise BundleError(f"the task's sources are larger than {MAX_SOURCE_BYTES} bytes")
    if task.tensors is not None and len(task.tensors) > MAX_TENSOR_BYTES:
        raise BundleError(f"the task's tensors are larger than {MAX_TENSOR_BYTES} bytes")


def save_task(task: Task, folder: Path) -> None:
    """Write the bundle ``task.json`` (+ ``tensors.safetensors``) into ``folder``, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    data = task_to_json(replace(task, tensors=None))
    (folder / "task.json").write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    if task.tensors is not None:
        (folder / "tensors.safetensors").write_bytes(task.tensors)


def load_task(folder: Path) -> Task:
    """Read a bundle written by :func:`save_task`.

    Raises:
        BundleError: missing or malformed.
    """
    try:
        data = json.loads((folder / "task.json").read_text())
    except (OSError, ValueError) as error:
        raise BundleError(f"cannot read the task bundle in {folder}: {error}") from error
    task = task_from_json(data)
    blob = folder / "tensors.safetensors"
    return replace(task, tensors=blob.read_bytes()) if blob.exists() else task


def task_id(task: Task) -> str:
    """Return 16 hex digits that depend on everything in the task but its name and weight."""
    data = task_to_json(replace(task, tensors=None, name="", weight=1.0))
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode("utf-8", "surrogatepass"))
    if task.tensors is not None:
        digest.update(task.tensors)
    return digest.hexdigest()[:16]


def candidate_id(candidate: Candidate) -> str:
    """Return 16 hex digits of the candidate's source."""
    return hashlib.sha256(candidate.source.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def candidate_to_json(candidate: Candidate) -> dict[str, Any]:
    """Return the wire form of ``candidate``."""
    data: dict[str, Any] = _adapter("candidate").dump_python(candidate, mode="json")
    return data


def candidate_from_json(data: Any) -> Candidate:
    """Parse a candidate.

    Raises:
        BundleError: the form is wrong or the source too large.
    """
    candidate: Candidate = _parse("candidate", data)
    if len(candidate.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
        raise BundleError(f"the candidate is larger than {MAX_SOURCE_BYTES} bytes")
    return candidate


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the public JSON of ``verdict``."""
    data: dict[str, Any] = _adapter("verdict").dump_python(verdict, mode="json")
    return data


def verdict_from_json(data: Any) -> Verdict:
    """Parse a verdict (of this schema version).

    Raises:
        BundleError: the form is wrong.
    """
    verdict: Verdict = _parse("verdict", data)
    return verdict


def verdict_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a verdict, for documentation and clients."""
    return _adapter("verdict").json_schema(mode="serialization")
