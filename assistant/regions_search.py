"""Searches the regions of a large module one by one; each win is judged alone, then all of them in the whole module.

:class:`RegionsProposer` stands before another proposer, which begins wherever the whole module was captured. A large
module is cut where the first step brought no win, any other where no candidate was right; one that could not be
captured is cut at once, and so is one whose candidates hold more kernels than could be compiled in a sensible time.
Cutting records how the module's parts are called, picks regions (:mod:`drk.assistant.regions_choice`), runs a search of
its own for each of them in ``regions/<n>-<path>/`` of the run folder, and offers one candidate for the whole module
that holds all wins, then smaller sets where that is not accepted. Afterwards the other proposer goes on with the whole.

What was found is kept in ``regions.json``; a resumed run reads it, or goes on with the regions' own journals.

Left out: regions searched in parallel, and winners that only win together.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from drk.assistant.artefact_regions import RegionWin
from drk.assistant.budget import Budget
from drk.assistant.episode import Turn, is_usable
from drk.assistant.events import Event, make_event
from drk.assistant.outcome import decide, is_win
from drk.assistant.proposers import ProposeContext, Proposer, enough_coverage, reads_hotspots
from drk.assistant.regions_choice import MAX_REGIONS, Region, below, choose_regions, read_parts
from drk.assistant.regions_source import RegionSource, compose
from drk.assistant.runs import Run
from drk.assistant.search import USER, Judge, Search
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.errors import BundleError, TaskError
from drk.gym.graph import Graph, graph_from_json
from drk.gym.schema import Candidate, Task
from drk.gym.wire import candidate_id, save_task

NAME = "regions"
FOLDER = "regions"
RESULT = "regions.json"
LARGE_NODES = 120
"""A graph with more operations than this is cut into regions where the first whole candidates bring no win."""
FIRST_STEP = 2
"""How many candidates for such a graph are judged before: each takes long to write and to compile."""
MAX_WHOLE_KERNELS = 64
"""A candidate with more kernels than this is not judged before the regions: its first call compiles them all."""
TIME_SHARE = 0.6
"""What regions may take of the time budget; the rest is for the whole module."""
_KERNEL = "@triton.jit"


class PartsGym(Judge, Protocol):
    """The part of :class:`drk.gym.Gym` that is needed here."""

    async def parts(self, task: Task) -> list[dict[str, Any]]:
        """Return how the parts of the reference are called; raises TaskError."""
        ...

    async def capture(self, task: Task) -> dict[str, Any]:
        """Return the graph's JSON; raises TaskError."""
        ...

    async def inspect(self, task: Task) -> Any:
        """Load and run the reference once; raises TaskError."""
        ...


@dataclass(frozen=True)
class RegionsWork:
    """What searching regions needs: ``emit`` receives notes, which are journalled by ``tell`` first."""

    run: Run
    gym: PartsGym
    cache: VerdictCache
    budget: Budget
    tell: Callable[[Event], None]
    stop: asyncio.Event
    on_gpu: bool
    at_once: int = 1


@dataclass(frozen=True)
class Won:
    """A region's answer; ``source`` is null where nothing was won. ``folder`` is its run folder, by name."""

    region: Region
    status: str
    reason: str
    folder: str
    number: int = 0
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the row of ``regions.json`` and of the result."""
        return {
            "paths": list(self.region.paths),
            "type": self.region.kind,
            "share": round(self.region.share, 4),
            "status": self.status,
            "reason": self.reason,
            "folder": self.folder,
            "number": self.number,
        }


class RegionsProposer:
    """Offers candidates that are put together from regions' wins, then what ``then`` offers."""

    def __init__(self, then: Proposer, work: RegionsWork) -> None:
        self.name = then.name
        self.ordered = then.ordered
        self.endpoint: str | None = getattr(then, "endpoint", None)
        self.reads_hotspots = reads_hotspots(then)
        self.enough_coverage = enough_coverage(then)
        self._then = then
        self._work = work

    async def propose(self, context: ProposeContext) -> list[Candidate]:
        """Return the next whole candidate that was not judged, else the other proposer's."""
        if is_large(context.task, context.graph) and _is_first(context):
            first = await self._then.propose(replace(context, limit=min(FIRST_STEP, context.limit)))
            if first and all(one.source.count(_KERNEL) <= MAX_WHOLE_KERNELS for one in first):
                return first
        cut_first = needs_regions(context.task, context.graph, context.history)
        offered = [] if cut_first else await self._from_then(context)
        whole_is_right = not cut_first and any(is_usable(turn.verdict) for turn in context.history)
        if offered or whole_is_right:
            return offered
        composed = [turn for turn in context.history if turn.candidate.proposer == NAME]
        if not any(is_usable(turn.verdict) for turn in composed):
            for candidate in whole_candidates(await self.wins(context)):
                if candidate_id(candidate) not in context.seen:
                    return [candidate]
        return await self._from_then(context) if cut_first else []

    async def _from_then(self, context: ProposeContext) -> list[Candidate]:
        rest = tuple(turn for turn in context.history if turn.candidate.proposer != NAME)
        return await self._then.propose(replace(context, history=rest))

    async def wins(self, context: ProposeContext) -> list[Won]:
        """Search the regions, or read what an earlier start of this run found."""
        kept = self._work.run.folder / RESULT
        if kept.exists():
            return read_wins(self._work.run.folder)
        try:
            rows = await self._work.gym.parts(context.task)
        except (TaskError, BundleError) as error:
            self._note(f"the module's parts could not be looked at: {error}")
            return []
        parts = read_parts(rows, context.graph, context.hardware)
        waiting = choose_regions(parts)
        total = sum(region.share for region in waiting) or 1.0
        found: list[Won] = []
        while waiting and len(found) < MAX_REGIONS:
            region = waiting.pop(0)
            won = await self._search(region, context, len(found) + 1, region.share / total)
            if won is None:
                waiting = sorted([*waiting, *below(parts, region)], key=lambda one: -one.share)
            else:
                found.append(won)
        rows_out = [won.to_json() for won in found]
        self._work.run.write(RESULT, (json.dumps({"regions": rows_out}, indent=1) + "\n").encode())
        return found

    async def _search(self, region: Region, context: ProposeContext, number: int, share: float) -> Won | None:
        """Search one region; null where it cannot be captured and its parts should be looked at instead."""
        task = region_task(context.task, region)
        folder = f"{number:02d}-{_slug(region.paths[0])}"
        run = part_run(self._work.run.folder / FOLDER / folder, task)
        places = "" if len(region.paths) == 1 else f" and {len(region.paths) - 1} alike"
        told = f"part {region.paths[0]}{places} ({region.kind}, {region.share:.0%} of the time)"
        try:
            graph = await look(self._work.gym, run, task)
        except (TaskError, BundleError) as error:
            self._note(f"{told}: not captured, {error.message}"[:300])
            return None
        budget = self._work.budget
        seconds = budget.max_time_s * TIME_SHARE * share
        search = Search(
            run,
            task,
            judge=self._work.gym,
            proposer=self._then,
            cache=self._work.cache,
            budget=replace(budget, max_time_s=seconds),
            emit=lambda _event: None,
            stop=self._work.stop,
            on_gpu=self._work.on_gpu,
            at_once=self._work.at_once,
        )
        outcome = decide(await search.turns(graph, context.hardware))
        self._note(f"{told}: {outcome.status}, {outcome.reason}"[:300])
        if outcome.best is None or outcome.status not in ("optimised", "unmeasured"):
            return Won(region, outcome.status, outcome.reason, folder)
        return Won(region, outcome.status, outcome.reason, folder, _number(run, outcome.best), _source(outcome.best))

    def _note(self, text: str) -> None:
        self._work.tell(make_event("note", text=text))


def is_large(task: Task, graph: Graph | None) -> bool:
    """Say whether a module was captured and has many operations. Functions have no parts."""
    return task.target_kind != "function" and graph is not None and len(graph.nodes) > LARGE_NODES


def _is_first(context: ProposeContext) -> bool:
    """Say whether nothing but a user's candidates was proposed so far; history lacks what could not be judged."""
    by_user = any(turn.candidate.proposer == USER for turn in context.history)
    others = any(turn.candidate.proposer != USER for turn in context.history)
    return not others and context.turn <= 1 + by_user


def needs_regions(task: Task, graph: Graph | None, history: Sequence[Turn] = ()) -> bool:
    """Say whether a module is cut now: it could not be captured, or it is large and nothing whole was a win so far."""
    if task.target_kind == "function":
        return False
    whole = [turn for turn in history if turn.candidate.proposer != NAME]
    return graph is None or (is_large(task, graph) and not any(is_win(turn.verdict) for turn in whole))


def whole_candidates(wins: list[Won]) -> list[Candidate]:
    """Return whole candidates, with all wins first, then with fewer, the largest shares kept."""
    found = []
    for used in _sets(wins):
        paths = ", ".join(path for won in used for path in won.region.paths)
        source = compose([_region_source(won) for won in used])
        found.append(Candidate(source, proposer=NAME, note=f"kernels in {paths}"[:200]))
    return found


def region_task(whole: Task, region: Region) -> Task:
    """Return the task of a region: the whole's, with the part's path and its recorded call."""
    path = ".".join(filter(None, (whole.submodule, region.paths[0])))
    return replace(whole, name=f"{whole.name}.{region.paths[0]}", submodule=path, inputs=region.call, weight=1.0)


def part_run(folder: Path, task: Task) -> Run:
    """Return the run folder of a region inside the whole's, made where it is not there."""
    for name in ("candidates", "verdicts"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if not (folder / "task").exists():
        save_task(task, folder / "task")
    return Run(folder)


async def look(gym: PartsGym, run: Run, task: Task) -> Graph:
    """Return the region's graph, captured now or by an earlier start, beside the shapes that it is judged at.

    Raises:
        TaskError: it cannot be captured.
    """
    kept = run.folder / "graph.json"
    if not kept.exists():
        inspection = await gym.inspect(task)
        data = await gym.capture(task)
        shapes = [row["shape"] for row in inspection.inputs]
        run.write("graph.json", json.dumps({"graph": data, "judged": shapes}).encode())
    return graph_from_json(json.loads(kept.read_text())["graph"])


def region_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``regions.json`` of a run folder; empty where the module was not cut."""
    kept = folder / RESULT
    rows: list[dict[str, Any]] = json.loads(kept.read_text())["regions"] if kept.exists() else []
    return rows


def region_wins(folder: Path, source: str) -> list[RegionWin]:
    """Return the regions that are in the whole candidate with this source."""
    wins = read_wins(folder)
    used = next((used for used in _sets(wins) if compose([_region_source(won) for won in used]) == source), [])
    runs = [(Run(folder / FOLDER / won.folder), won) for won in used]
    return [RegionWin(run, best_turn(run, won.number), won.region.paths) for run, won in runs]


def _sets(wins: list[Won]) -> list[list[Won]]:
    """Return what is tried together: all wins, then fewer, the largest shares kept."""
    won = [one for one in wins if one.source is not None]
    return [won[:size] for size in dict.fromkeys([len(won), (len(won) + 1) // 2, 1])] if won else []


def _region_source(won: Won) -> RegionSource:
    return RegionSource(won.region.paths, won.source or "")


def read_wins(folder: Path) -> list[Won]:
    """Return what ``regions.json`` of a run folder holds, with the winners' sources."""
    return [_won(row, folder) for row in region_rows(folder)]


def _won(row: Mapping[str, Any], folder: Path) -> Won:
    run = Run(folder / FOLDER / row["folder"])
    call = run.task().inputs
    assert call.kind == "call"
    source = None
    if row["number"]:
        source = (run.folder / "candidates" / f"{row['number']:03d}.py").read_text(encoding="utf-8")
    region = Region(tuple(row["paths"]), row["type"], call, row["share"])
    return Won(region, row["status"], row["reason"], row["folder"], row["number"], source)


def best_turn(run: Run, number: int) -> Turn:
    """Return a region's winning turn as its run recorded it."""
    proposals = [one for step in run.proposals().values() for one in step]
    proposal = next(one for one in proposals if one.number == number)
    recorded = run.verdict(proposal)
    assert recorded is not None
    return Turn(proposal.turn, proposal.candidate, recorded[0], recorded[1], proposal.sample)


def _number(run: Run, best: Turn) -> int:
    proposals = [one for step in run.proposals().values() for one in step]
    return next(one.number for one in proposals if candidate_id(one.candidate) == candidate_id(best.candidate))


def _source(best: Turn) -> str:
    return best.candidate.source


def _slug(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")[:40] or "part"
