"""Proposers behind one interface: given task, graph, hardware and history, they give candidates.

The loop cannot tell them apart. Found by name: ``builtin`` (the fusion compiler of :mod:`drk.assistant.synth`),
``openai:NAME``, ``vllm:FOLDER`` and ``transformers:FOLDER`` (language models, :mod:`drk.assistant.llm`), ``nano``
(this project's small one), and ``replay:PATH`` (recorded candidates or answers). ``ordered`` says whether what one call
returns stands in order of expected gain: without a GPU nothing else tells accepted candidates apart, so the search may
stop at the first one; others may name a share of the work from which on it should, ``enough_coverage``. Those that make
use of the reference's measured kernels say so by ``reads_hotspots``.

A proposer is deterministic where it can be, keeps nothing between calls, and reads the history instead: a resumed run
then goes on as the first would have. An empty list means that it has nothing more to offer. Those that hold something
(connections, a server) have ``start`` and ``close``, which :func:`opened` calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from drk.assistant.answer_parser import missing_candidate
from drk.assistant.episode import Turn
from drk.assistant.errors import UsageError, did_you_mean
from drk.assistant.hotspots import Hotspots
from drk.assistant.llm.nano_weights import INT8_FILE
from drk.gym.devices import DeviceFacts
from drk.gym.graph import Graph
from drk.gym.schema import Candidate, Task
from drk.gym.wire import candidate_id

if TYPE_CHECKING:
    from drk.assistant.llm.model_settings import ModelSettings
    from drk.assistant.synth import BuiltinProposer as FusionCompiler


@dataclass(frozen=True)
class ProposeContext:
    """What a proposer may look at. ``graph`` is null where the module could not be captured.

    ``turn`` is the step to propose for (0: one after the history's last); ``folder`` the run's, where a proposer may
    keep a journal of its own; ``hotspots`` the reference's measured kernels (null where nobody asked for them);
    ``hints`` what the user suggests; ``on_gpu`` whether candidates are judged on a GPU.
    """

    task: Task
    graph: Graph | None
    hardware: DeviceFacts
    history: tuple[Turn, ...] = ()
    limit: int = 4
    turn: int = 0
    folder: Path | None = None
    hotspots: Hotspots | None = None
    hints: tuple[str, ...] = ()
    on_gpu: bool = False

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

    def __init__(self) -> None:
        self._compiler: FusionCompiler | None = None  # it remembers what it compiled, which changes no answer

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the compiler's next variants that were not judged yet; where gradients are judged, with theirs."""
        if context.graph is None:
            return []
        if context.task.grad:
            return await asyncio.to_thread(_training_candidates, context.graph, context)
        from drk.assistant.synth import BuiltinProposer as FusionCompiler  # large, and only this proposer needs it

        compiler, graph = self._compiler or FusionCompiler(), context.graph
        self._compiler = compiler
        limit = context.limit + len(context.history)
        found = await asyncio.to_thread(
            compiler.propose,
            graph,
            hardware=context.hardware,
            history=context.history,
            limit=limit,
            graphs=context.on_gpu and not context.task.autocast,
        )
        return [one for one in found if candidate_id(one) not in context.seen][: context.limit]


def _training_candidates(graph: Graph, context: ProposeContext) -> list[Candidate]:
    """Candidates with backward kernels, or one that says why there are none."""
    from drk.assistant.synth.backward_module import TrainingProposer  # large, and only this proposer needs it

    limit = context.limit + len(context.history)
    compiler = TrainingProposer()
    found, why = compiler.propose(graph, hardware=context.hardware, history=context.history, limit=limit)
    if not found and not context.history:
        return [missing_candidate(why, proposer=compiler.name, mark=f"turn {context.turn}")]
    return [one for one in found if candidate_id(one) not in context.seen][: context.limit]


class SeededProposer:
    """Begins with another proposer's candidates and goes on with ``then``; that one begins where there are none."""

    ordered = False

    def __init__(self, first: Proposer, then: Proposer) -> None:
        self.name = then.name
        self.endpoint: str | None = getattr(then, "endpoint", None)
        self.reads_hotspots = reads_hotspots(first) or reads_hotspots(then)
        self.enough_coverage = enough_coverage(then)
        self._first = first
        self._then = then

    async def start(self) -> None:
        """Start both."""
        for one in (self._first, self._then):
            await _call_if_there(one, "start")

    async def close(self) -> None:
        """Close both."""
        for one in (self._first, self._then):
            await _call_if_there(one, "close")

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the first proposer's candidates while nothing was judged yet, else the other's."""
        found = [] if context.history else await self._first.propose(context)
        return found or await self._then.propose(context)


def reads_hotspots(proposer: Proposer) -> bool:
    """Say whether ``proposer`` makes use of the reference's measured kernels, which cost a profile."""
    return bool(getattr(proposer, "reads_hotspots", False))


def enough_coverage(proposer: Proposer) -> float:
    """Return the share of the work above which an unmeasured candidate of ``proposer`` ends its search (inf: none)."""
    return float(getattr(proposer, "enough_coverage", math.inf))


@contextlib.asynccontextmanager
async def opened(proposer: Proposer) -> AsyncIterator[Proposer]:
    """Start ``proposer`` where it can be started, and close it at the end.

    Raises:
        DrkError: it cannot be started; names the setting.
    """
    try:
        await _call_if_there(proposer, "start")
        yield proposer
    finally:
        await _call_if_there(proposer, "close")


async def _call_if_there(proposer: Proposer, name: str) -> None:
    method: Callable[[], Awaitable[None]] | None = getattr(proposer, name, None)
    if method is not None:
        await method()


def _builtin(argument: str) -> Proposer:
    if argument:
        raise UsageError(f"builtin takes no argument, not {argument!r}", help="--model builtin")
    return BuiltinProposer()


def _replay(argument: str) -> Proposer:
    if not argument:
        raise UsageError("replay needs a file", help="--model replay:candidates.jsonl")
    from drk.assistant.replay import ReplayProposer

    return ReplayProposer(Path(argument))


PROPOSERS: Mapping[str, Callable[[str], Proposer]] = {"builtin": _builtin, "replay": _replay}
"""Makers by name; each is given what stands behind the colon."""
NANO = "nano"
MODELS = ("openai", "vllm", "transformers", NANO)
"""Names of language models; what stands behind the colon is the model's name, or a checkpoint's folder."""


def make_proposer(name: str, settings: ModelSettings | None = None) -> Proposer:
    """Return the proposer that ``name`` stands for: ``builtin``, ``replay:FILE``, ``openai:NAME``, a folder, ...

    Args:
        name: a proposer's name with its argument behind a colon, or the folder of a checkpoint.
        settings: how a language model is asked; null for the usual.

    Raises:
        UsageError: unknown name, or its argument is wrong.
        ModelFault: a language model that cannot be asked: no key, no extra, no checkpoint.
    """
    head, _, argument = name.partition(":")
    if head in PROPOSERS:
        return PROPOSERS[head](argument)
    if is_model(name):
        from drk.assistant.llm.factory import make_model  # brings pydantic and jinja2

        return make_model(name, settings)
    known = (*PROPOSERS, *MODELS)
    raise UsageError(
        f"unknown proposer {head!r}", help=did_you_mean(head, known) or f"known are: {', '.join(known)}, or a folder"
    )


def is_model(name: str) -> bool:
    """Say whether ``name`` names a language model."""
    return name.partition(":")[0] in MODELS or (Path(name) / "config.json").is_file()


def is_nano(name: str) -> bool:
    """Say whether ``name`` names the nano model: ``nano``, ``nano:FOLDER``, or a folder with its quantised weights."""
    return name.partition(":")[0] == NANO or (Path(name) / INT8_FILE).is_file()
