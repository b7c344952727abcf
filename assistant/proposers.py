"""Proposers behind one interface: given task, graph, hardware and history, they give candidates.

The loop cannot tell them apart. They are found by name: ``builtin`` (the fusion compiler of :mod:`drk.assistant.synth`)
and ``replay:PATH`` (recorded candidates). ``ordered`` says whether what one call returns stands in order of expected
gain: without a GPU nothing else tells accepted candidates apart, so the search may stop at the first one.

A proposer is deterministic where it can be, keeps nothing between calls, and reads the history instead: a resumed run
then goes on as the first would have. An empty list means that it has nothing more to offer.

Left out so far: language models (``openai``, ``vllm``, ``transformers``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from drk.assistant.episode import Turn
from drk.assistant.errors import UsageError, did_you_mean
from drk.gym.devices import DeviceFacts
from drk.gym.errors import BundleError
from drk.gym.graph import Graph
from drk.gym.schema import Candidate, Task
from drk.gym.wire import candidate_from_json, candidate_id


@dataclass(frozen=True)
class ProposeContext:
    """What a proposer may look at. ``graph`` is null where the module could not be captured."""

    task: Task
    graph: Graph | None
    hardware: DeviceFacts
    history: tuple[Turn, ...] = ()
    limit: int = 4

    @property
    def seen(self) -> frozenset[str]:
        """Ids of the candidates that were judged."""
        return frozenset(candidate_id(turn.candidate) for turn in self.history)


class Proposer(Protocol):
    """Anything that writes candidates."""

    name: str
    ordered: bool

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return up to ``context.limit`` new candidates; an empty list ends the search."""
        ...


class BuiltinProposer:
    """The fusion compiler: no model, deterministic, best expected gain first. Needs a captured graph."""

    name = "builtin"
    ordered = True

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the compiler's next variants that were not judged yet."""
        if context.graph is None:
            return []
        from drk.assistant.synth import BuiltinProposer as FusionCompiler  # large, and only this proposer needs it

        compiler, graph = FusionCompiler(), context.graph
        limit = context.limit + len(context.history)
        found = await asyncio.to_thread(
            compiler.propose, graph, hardware=context.hardware, history=context.history, limit=limit
        )
        return [one for one in found if candidate_id(one) not in context.seen][: context.limit]


class ReplayProposer:
    """Gives recorded candidates in their order, each once.

    ``path`` is one ``.py`` file, a folder of them (a run's ``candidates/`` too), or a ``.jsonl`` file with one
    candidate of the wire form in each line.
    """

    ordered = False

    def __init__(self, path: Path) -> None:
        self.name = f"replay:{path}"
        self._candidates = _read_candidates(path)

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the first recorded candidates that were not judged yet."""
        return [one for one in self._candidates if candidate_id(one) not in context.seen][: context.limit]


def _read_candidates(path: Path) -> list[Candidate]:
    """Read recorded candidates.

    Raises:
        UsageError: nothing there, or not of a known form; names the file and the line.
    """
    if path.is_dir():
        files = sorted(path.glob("*.py")) or sorted((path / "candidates").glob("*.py"))
        if not files:
            raise UsageError(f"no candidates in {path}", help="a folder of .py files, or a run's folder, is expected")
        return [_read_source(file) for file in files]
    if path.suffix == ".py":
        return [_read_source(path)]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read candidates from {path}", cause=str(error)) from error
    candidates = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                candidates.append(candidate_from_json(json.loads(line)))
            except (ValueError, BundleError) as error:
                raise UsageError("not a candidate", file=str(path), line=number, cause=str(error)) from error
    if not candidates:
        raise UsageError(f"no candidates in {path}", help="one JSON object a line is expected: {'source': ...}")
    return candidates


def _read_source(path: Path) -> Candidate:
    try:
        return Candidate(path.read_text(encoding="utf-8"), proposer="replay", note=path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the candidate {path}", cause=str(error)) from error


def _replay(argument: str) -> Proposer:
    if not argument:
        raise UsageError("replay needs a file", help="--model replay:candidates.jsonl")
    return ReplayProposer(Path(argument))


def _builtin(argument: str) -> Proposer:
    if argument:
        raise UsageError(f"builtin takes no argument, not {argument!r}", help="--model builtin")
    return BuiltinProposer()


PROPOSERS: Mapping[str, Callable[[str], Proposer]] = {"builtin": _builtin, "replay": _replay}
"""Makers by name; each is given what stands behind the colon."""


def make_proposer(name: str) -> Proposer:
    """Return the proposer that ``name`` (``builtin``, ``replay:FILE``) stands for.

    Raises:
        UsageError: unknown name, or its argument is wrong.
    """
    head, _, argument = name.partition(":")
    if head not in PROPOSERS:
        known = ", ".join(PROPOSERS)
        raise UsageError(f"unknown proposer {head!r}", help=did_you_mean(head, PROPOSERS) or f"known are: {known}")
    return PROPOSERS[head](argument)
