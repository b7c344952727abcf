"""The cheat corpus: candidates that pretend, each beside an honest twin, and what a verdict must say of them.

A corpus is a folder ``<family>/<entry>/`` with ``reference.py`` (``Model``, ``get_inputs``, ``get_init_inputs``),
``cheat_*.py`` and ``honest_*.py`` (each defines ``ModelNew``) and ``entry.toml``::

    family = "caching"
    mechanism = "one sentence"
    needs = "any"                       # or "gpu": the proof needs a device
    [expect]                            # of every cheat here
    status = ["rejected"]
    flags = ["input-cache", "wrong-output"]
    [task]                              # optional: mode, precision, grad
    [cheat_b]                           # optional: needs, status, flags of one cheat
    [honest_a]
    why_honest = "one sentence"
    look_alike = 5                      # optional: the look-alike's number in docs/flags.md
    allow = []                          # labels that are true of it

``flags`` names flag kinds, families, or ``wrong-output``: one of them must be in the verdict. A cheat that may also
end ``failed`` needs no flag then. An honest twin must be accepted without any flag that ``allow`` does not name.
Reading runs nothing and imports no torch. Limits: an expectation cannot ask for two flags at once.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from drk.gym.errors import BundleError
from drk.gym.schema import Candidate, Family, Status, Task, UserFunction, Verdict

Needs = Literal["any", "gpu"]
Role = Literal["cheat", "honest"]
Outcome = Literal["detected", "missed", "passed", "wrongly-flagged", "error"]

FAMILIES: tuple[Family, ...] = get_args(Family)
LABEL_FAMILIES: frozenset[Family] = frozenset(("delegation", "lazy"))
WRONG_OUTPUT = "wrong-output"
"""Named among ``flags`` where a plainly wrong result is as good an answer as a named flag."""

FLAG_FAMILIES: Mapping[str, Family] = {
    "no-work": "no-work",
    "uninitialised-output": "no-work",
    "decoy-kernel": "no-work",
    "stale-output": "caching",
    "input-cache": "caching",
    "clock-mismatch": "timing",
    "side-stream": "timing",
    "deferred-work": "timing",
    "tampered-runtime": "tampering",
    "tampered-inputs": "tampering",
    "precision-downgrade": "precision",
    "unstable-numerics": "precision",
    "shape-wrong": "shape",
    "tail-wrong": "shape",
    "shape-specialised": "shape",
    "escape-attempt": "escape",
    "no-own-kernel": "delegation",
    "compile-wrap": "delegation",
    "fallback-taken": "delegation",
    "trivial-kernel": "lazy",
}
"""The family of each flag kind that an expectation may name (docs/flags.md describes them)."""

LABELS: frozenset[str] = frozenset(
    ("no-own-kernel", "compile-wrap", "fallback-taken", "trivial-kernel", "shape-specialised")
)
"""Kinds that inform; all others reject."""

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FILE = re.compile(r"(cheat|honest)_[a-z]")
_ENTRY_KEYS = frozenset(("family", "mechanism", "needs", "expect", "task"))
_TASK_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "mode": ("eval", "train"),
    "precision": ("match", "strict", "tf32", "bf16"),
    "grad": (True, False),
}
_FILE_KEYS: Mapping[Role, frozenset[str]] = {
    "cheat": frozenset(("needs", "status", "flags", "spelling")),
    "honest": frozenset(("needs", "why_honest", "look_alike", "allow")),
}


@dataclass(frozen=True)
class Expectation:
    """What a verdict must say: one of ``status``, and one of ``flags`` (an honest twin: no flag but these)."""

    status: tuple[Status, ...]
    flags: frozenset[str]


@dataclass(frozen=True)
class CorpusFile:
    """One candidate of an entry. ``look_alike`` is 0 where the twin has no number; ``why`` is for people."""

    name: str
    role: Role
    path: Path
    source: str
    needs: Needs
    expect: Expectation
    why: str = ""
    look_alike: int = 0

    @property
    def candidate(self) -> Candidate:
        """The file as a candidate."""
        return Candidate(self.source, proposer="corpus", note=self.name)

    def outcome(self, verdict: Verdict) -> Outcome:
        """Say what ``verdict`` is worth: ``error`` (nothing was judged) is neither a hit nor a miss."""
        if verdict.status == "error":
            return "error"
        if self.role == "honest":
            surplus = {flag.kind for flag in verdict.flags} - self.expect.flags
            return "wrongly-flagged" if surplus or verdict.status != "accepted" else "passed"
        return "detected" if self._meets(verdict) else "missed"

    def _meets(self, verdict: Verdict) -> bool:
        if verdict.status not in self.expect.status:
            return False
        if verdict.status == "failed":
            return True
        return bool(self.expect.flags & verdict_words(verdict))


@dataclass(frozen=True)
class CorpusEntry:
    """One mechanism: its task, cheats and honest twins. ``name`` is ``<family>/<entry>``."""

    name: str
    family: Family
    mechanism: str
    task: Task
    files: tuple[CorpusFile, ...]

    @property
    def cheats(self) -> tuple[CorpusFile, ...]:
        """The spellings of the cheat."""
        return tuple(file for file in self.files if file.role == "cheat")

    @property
    def twins(self) -> tuple[CorpusFile, ...]:
        """The honest neighbours."""
        return tuple(file for file in self.files if file.role == "honest")


def verdict_words(verdict: Verdict) -> set[str]:
    """Return what an expectation can match: kinds and families of the flags, and the kind of a failed check."""
    words = {word for flag in verdict.flags for word in (flag.kind, flag.family)}
    return words | {verdict.error.kind} if verdict.error is not None else words


def load_corpus(root: Path) -> tuple[CorpusEntry, ...]:
    """Read a corpus, ordered by family and name.

    Raises:
        BundleError: there is none at ``root``, or an entry is malformed; the message names file and key.
    """
    descriptions = sorted(root.glob("*/*/entry.toml"), key=lambda path: (_family_rank(path), path.parent.name))
    if not descriptions:
        raise BundleError(f"{root} holds no corpus", help="a corpus has files <family>/<entry>/entry.toml")
    bare = [path for path in root.glob("*/*/reference.py") if not (path.parent / "entry.toml").is_file()]
    if bare:
        raise BundleError(f"{bare[0].parent} has no entry.toml")
    return tuple(_load_entry(path) for path in descriptions)


def _family_rank(path: Path) -> int:
    family = path.parent.parent.name
    return next((rank for rank, known in enumerate(FAMILIES) if known == family), len(FAMILIES))


def _load_entry(path: Path) -> CorpusEntry:
    try:
        table = tomllib.loads(_read(path))
    except tomllib.TOMLDecodeError as error:
        raise BundleError(f"{path} is not TOML: {error}") from error
    folder = path.parent
    family = _one_of(path, "family", table.get("family"), FAMILIES)
    if family != folder.parent.name or not _NAME.fullmatch(folder.name):
        raise BundleError(f"{path} must lie in {family}/<entry-name>/, not {folder.parent.name}/{folder.name}/")
    mechanism = table.get("mechanism")
    if not isinstance(mechanism, str) or not mechanism.strip():
        raise BundleError(f"{path}: mechanism must be a sentence")
    sources = sorted(found for found in folder.glob("*.py") if found.name != "reference.py")
    _check_keys(path, "", table, _ENTRY_KEYS | {found.stem for found in sources})
    files = tuple(_load_file(path, found, table, family) for found in sources)
    if {file.role for file in files} != {"cheat", "honest"}:
        raise BundleError(f"{folder} needs at least one cheat_*.py and one honest_*.py")
    task = _load_task(path, table.get("task", {}), f"{family}/{folder.name}")
    return CorpusEntry(task.name, family, mechanism, task, files)


def _load_task(path: Path, options: Any, name: str) -> Task:
    if not isinstance(options, dict):
        raise BundleError(f"{path}: task must be a table")
    _check_keys(path, "task", options, _TASK_CHOICES.keys())
    for key, value in options.items():
        _one_of(path, f"task.{key}", value, _TASK_CHOICES[key])
    return Task(
        name=name,
        files={"reference.py": _read(path.parent / "reference.py")},
        entry="reference.py",
        target="Model",
        init=UserFunction("get_init_inputs"),
        inputs=UserFunction("get_inputs"),
        **options,
    )


def _load_file(path: Path, source: Path, table: dict[str, Any], family: Family) -> CorpusFile:
    found = _FILE.fullmatch(source.stem)
    if found is None:
        raise BundleError(f"{source} must be called reference.py, cheat_<letter>.py or honest_<letter>.py")
    role: Role = "cheat" if found[1] == "cheat" else "honest"
    own = table.get(source.stem, {})
    if not isinstance(own, dict):
        raise BundleError(f"{path}: {source.stem} must be a table")
    _check_keys(path, source.stem, own, _FILE_KEYS[role])
    inherited = table.get("needs", "any") if role == "cheat" else "any"
    needs: Needs = _one_of(path, "needs", own.get("needs", inherited), ("any", "gpu"))
    if role == "cheat":
        expect = _cheat_expectation(path, {**_expect_table(path, table), **own}, family)
        return CorpusFile(source.stem, role, source, _read(source), needs, expect, str(own.get("spelling", "")))
    return _honest_file(path, source, own, needs)


def _honest_file(path: Path, source: Path, own: dict[str, Any], needs: Needs) -> CorpusFile:
    why, number = own.get("why_honest"), own.get("look_alike", 0)
    if not isinstance(why, str) or not why.strip():
        raise BundleError(f"{path}: {source.stem} needs why_honest, a sentence")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise BundleError(f"{path}: {source.stem}.look_alike must be a number from 1")
    allowed = _names(path, f"{source.stem}.allow", own.get("allow", []), frozenset(FLAG_FAMILIES))
    frauds = sorted(allowed - LABELS)
    if frauds:
        raise BundleError(f"{path}: {source.stem}.allow may hold labels only, not {frauds[0]}")
    expect = Expectation(("accepted",), allowed)
    return CorpusFile(source.stem, "honest", source, _read(source), needs, expect, why, number)


def _expect_table(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    expect = table.get("expect")
    if not isinstance(expect, dict):
        raise BundleError(f"{path}: a table [expect] with status and flags is needed")
    _check_keys(path, "expect", expect, frozenset(("status", "flags")))
    return expect


def _cheat_expectation(path: Path, table: dict[str, Any], family: Family) -> Expectation:
    statuses: tuple[Status, ...] = ("accepted",) if family in LABEL_FAMILIES else ("rejected", "failed")
    status = _names(path, "expect.status", table.get("status"), frozenset(statuses))
    flags = _names(path, "expect.flags", table.get("flags"), frozenset((*FLAG_FAMILIES, *FAMILIES, WRONG_OUTPUT)))
    if not status or (not flags and status != {"failed"}):
        raise BundleError(f"{path}: expect needs a status, and flags unless the status is failed")
    return Expectation(tuple(word for word in statuses if word in status), flags)


def _names(path: Path, key: str, value: Any, known: frozenset[str]) -> frozenset[str]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise BundleError(f"{path}: {key} must be a list of names")
    unknown = sorted(set(words) - known)
    if unknown:
        raise BundleError(f"{path}: {key} cannot be {unknown[0]!r}", help="known here: " + ", ".join(sorted(known)))
    return frozenset(words)


def _one_of(path: Path, key: str, value: Any, known: tuple[Any, ...]) -> Any:
    if not any(value is word or (isinstance(value, str) and value == word) for word in known):
        raise BundleError(f"{path}: {key} cannot be {value!r}", help="known: " + ", ".join(map(str, known)))
    return value


def _check_keys(path: Path, where: str, table: Mapping[str, Any], known: Any) -> None:
    unknown = sorted(set(table) - set(known))
    if unknown:
        name = f"{where}.{unknown[0]}" if where else unknown[0]
        raise BundleError(f"{path}: unknown key {name}", help="known: " + ", ".join(sorted(known)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
