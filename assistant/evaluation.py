"""``drk eval`` as a function: every proposer over many problems, by turns and samples, resumable (DESIGN 9).

A *problem* is a file in KernelBench form (or whatever ``drk optimize`` takes), a *sample* one independent episode on it
with its own run folder; the loop is that of ``drk optimize``, with one candidate a turn where models are compared and
several that are judged together for the builtin proposer. What a sample found is kept in its run, so an evaluation that
was killed or interrupted goes on with nothing asked or judged twice. Figures and the report are made by
:mod:`drk.assistant.eval_report` from the same rows.

A sample ends before its turns and its time are used up where further candidates cannot matter: the best comes near the
roofline, or (ordered proposers on a GPU) a whole turn brought nothing better.

Problems that cannot be read or whose reference cannot be judged are listed as unusable and left out of all
denominators; samples that could not be judged (host faults, a model that failed) are listed too, and make the report
*partial*. Left out: several machines, and choosing problems by difficulty.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drk.assistant.atomic_write import write_atomically
from drk.assistant.budget import Budget, Spending, gpu_seconds
from drk.assistant.episode import Turn
from drk.assistant.errors import DrkError, UsageError
from drk.assistant.hotspots import Hotspots, hotspots_from_json, measure_hotspots
from drk.assistant.intake import resolve_target
from drk.assistant.llm.call_journal import read_spending
from drk.assistant.optimize import OptimizeGym, cache_conditions, hardware_facts
from drk.assistant.outcome import is_win
from drk.assistant.prompts import family_of
from drk.assistant.proposers import Proposer, reads_hotspots
from drk.assistant.runs import create_run, list_runs
from drk.assistant.search import Advice, Search
from drk.assistant.search_clock import until_stopped
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.errors import BundleError, HostError, TaskError
from drk.gym.graph import Graph, graph_from_json
from drk.gym.kernels import ReferenceProfile
from drk.gym.schema import Candidate, Task, Verdict

SUBSET = 20
"""Problems of the fixed subset for short evaluations."""
CANDIDATES = 4
"""Candidates of a turn of a proposer whose candidates do not depend on one another's verdicts (builtin)."""
PATIENCE = 1
"""Turns without a better candidate after which an ordered proposer's sample ends."""


@dataclass(frozen=True)
class Problem:
    """One problem; ``group`` is the folder below the one that was given (``level1``), or empty."""

    name: str
    group: str
    task: Task


@dataclass(frozen=True)
class EvalPlan:
    """What to evaluate and how; ``max_time_s`` and the limit on money hold for each sample.

    ``candidates`` are proposed, and judged together, in each turn. ``problems_at_once`` must not be above the number of
    references that the gym keeps: it would close one in use.
    """

    problems: tuple[Problem, ...]
    unusable: Mapping[str, str] = field(default_factory=dict)
    turns: int = 1
    candidates: int = 1
    samples: int = 1
    workers: int = 2
    problems_at_once: int = 4
    max_time_s: float = 600.0
    max_cost_usd: float | None = None
    target: str = "sm_90"
    judging: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None


@dataclass(frozen=True)
class Pace:
    """Seconds from when a problem was begun: to its first verdict and first win (null: none now), and to its end."""

    first_verdict_s: float | None
    first_win_s: float | None
    end_s: float


@dataclass(frozen=True)
class SampleResult:
    """What one sample came to. ``fault`` says why it could not be judged; it then counts in no figure."""

    problem: str
    sample: int
    turns: tuple[Turn, ...] = ()
    ended: str = ""
    fault: str = ""
    spending: Spending = field(default_factory=Spending)
    pace: Pace | None = None


@dataclass(frozen=True)
class EvalResult:
    """All samples in the order of problems; ``families`` by problem; problems that turned out unusable with reasons."""

    samples: tuple[SampleResult, ...]
    families: Mapping[str, str]
    unusable: Mapping[str, str]
    seconds: float
    interrupted: bool = False


def find_problems(
    where: Path, *, limit: int | None = None, settings: Mapping[str, Any] | None = None
) -> tuple[tuple[Problem, ...], dict[str, str]]:
    """Read the problems of a folder of Python files, or of a list with one target a line.

    Args:
        where: the folder (searched to its depths), or the list (``#`` begins a comment).
        limit: take so many, spread evenly over the sorted names: always the same ones.
        settings: ``mode``, ``precision``, ``tolerance`` for every task.

    Returns:
        Problems in the order of their names, and the reasons for those that cannot be used.

    Raises:
        UsageError: there is no such folder or list, or nothing in it.
    """
    targets = _targets(where)
    if limit is not None and len(targets) > limit:
        targets = [targets[i * len(targets) // limit] for i in range(limit)]
    problems: list[Problem] = []
    unusable: dict[str, str] = {}
    for name, group, target in targets:
        try:
            task = resolve_target(target, **(settings or {}))
            problems.append(Problem(name, group, replace(task, name=name)))
        except DrkError as error:
            unusable[name] = error.message + (f": {error.cause}" if error.cause else "")
    return tuple(problems), unusable


def _targets(where: Path) -> list[tuple[str, str, str]]:
    """Return (name, group, target) of everything below ``where``, sorted by name."""
    if where.is_dir():
        files = [path for path in where.rglob("*.py") if not path.name.startswith(("_", "test_", "conftest"))]
        found = [_named(path.relative_to(where), str(path)) for path in files if "." not in path.parent.name]
    elif where.is_file() and where.suffix != ".py":
        lines = [line.strip() for line in where.read_text(encoding="utf-8").splitlines()]
        texts = [line for line in lines if line and not line.startswith("#")]
        found = [_named(Path(text), str(where.parent / text)) for text in texts]
    else:
        raise UsageError(f"no problems at {where}", help="a folder of Python files, or a list with one target a line")
    if not found:
        raise UsageError(f"there are no problems in {where}", help="files in KernelBench form: Model and get_inputs")
    names = [name for name, _, _ in found]
    if doubled := next((name for name in names if names.count(name) > 1), ""):
        raise UsageError(f"two problems in {where} are called {doubled}")
    return sorted(found)


def _named(path: Path, target: str) -> tuple[str, str, str]:
    parts = path.with_suffix("").parts if path.suffix == ".py" else path.parts
    name = ".".join(parts).replace(":", "-").lstrip(".")
    return name, parts[0] if len(parts) > 1 else "", target


async def evaluate(
    plan: EvalPlan,
    folder: Path,
    gym: OptimizeGym,
    proposer: Proposer,
    *,
    tell: Callable[[SampleResult], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> EvalResult:
    """Evaluate ``proposer`` on all problems of ``plan``; runs are kept, and resumed, below ``folder``.

    Args:
        plan: what to do.
        folder: holds ``runs/`` and ``problems/``.
        gym: an entered gym.
        proposer: an opened proposer.
        tell: is called with every sample that is done.
        stop: when set, samples under way end; what was judged is kept.

    Raises:
        HostError: the gym failed at every problem.
        UsageError: another process works on one of the runs.
    """
    work = _Work(plan, folder, gym, proposer, tell, stop or asyncio.Event())
    began = time.monotonic()
    results = await asyncio.gather(*(work.problem(problem) for problem in plan.problems))
    samples = tuple(sample for group in results for sample in group)
    if work.host_errors and not (work.families or work.unusable or work.stop.is_set()):
        raise work.host_errors[0]
    unusable = {**plan.unusable, **work.unusable}
    return EvalResult(samples, work.families, unusable, time.monotonic() - began, work.stop.is_set())


class _Work:
    """One evaluation under way."""

    def __init__(
        self,
        plan: EvalPlan,
        folder: Path,
        gym: OptimizeGym,
        proposer: Proposer,
        tell: Callable[[SampleResult], None],
        stop: asyncio.Event,
    ) -> None:
        self.stop = stop
        self.families: dict[str, str] = {}
        self.unusable: dict[str, str] = {}
        self.host_errors: list[HostError] = []
        self._plan = plan
        self._folder = folder
        self._gym = gym
        self._proposer = proposer
        self._tell = tell
        self._slots = asyncio.Semaphore(plan.workers)
        self._open = asyncio.Semaphore(plan.problems_at_once)
        self._hardware = hardware_facts(gym.device_facts, plan.target)
        self._on_gpu = gym.device_facts.get("gpu") is not None
        self._cache = VerdictCache(plan.cache_dir, cache_conditions(gym.device_facts, plan.judging))

    async def problem(self, problem: Problem) -> Sequence[SampleResult]:
        """Look at the reference once, then run all samples."""
        async with self._open:
            return await self._problem(problem)

    async def _problem(self, problem: Problem) -> Sequence[SampleResult]:
        async with self._slots:
            if self.stop.is_set():
                return self._faulty(problem, "interrupted")
            began = time.monotonic()
            try:
                graph, hotspots = await until_stopped(self._look(problem), self.stop, self._plan.max_time_s)
            except TaskError as error:
                self.unusable[problem.name] = error.message
                return []
            except TimeoutError:
                spent = f"looking at the reference took all of the {self._plan.max_time_s:g} s"
                return self._faulty(problem, "interrupted" if self.stop.is_set() else spent)
            except HostError as error:
                self.host_errors.append(error)
                return self._faulty(problem, error.message)
            look_s = time.monotonic() - began
        self.families[problem.name] = family_of(graph, problem.task.files[problem.task.entry])
        told = Advice(hotspots=hotspots)
        numbers = range(self._plan.samples)
        return await asyncio.gather(*(self._sample(problem, graph, told, number, look_s) for number in numbers))

    def _faulty(self, problem: Problem, fault: str) -> list[SampleResult]:
        """Return samples that could not be judged, and tell of them."""
        found = [SampleResult(problem.name, number, fault=fault) for number in range(self._plan.samples)]
        for sample in found if fault != "interrupted" else ():
            self._tell(sample)
        return found

    async def _look(self, problem: Problem) -> tuple[Graph | None, Hotspots]:
        """Run the reference, capture its graph and measure its kernels, or read what an earlier start found."""
        kept = self._folder / "problems" / f"{problem.name}.json"
        if kept.exists():
            data = json.loads(kept.read_text())
        else:
            await self._gym.inspect(problem.task)
            try:
                data = {"graph": await self._gym.capture(problem.task)}
            except (TaskError, BundleError) as error:
                data = {"graph": None, "reason": error.message}
            if self._on_gpu and reads_hotspots(self._proposer):
                data["hotspots"] = (await measure_hotspots(self._gym, problem.task)).to_json()
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps(data).encode())
        hotspots = hotspots_from_json(data.get("hotspots") or {})
        try:
            return (None if data["graph"] is None else graph_from_json(data["graph"])), hotspots
        except BundleError:
            return None, hotspots

    async def _sample(
        self, problem: Problem, graph: Graph | None, told: Advice, number: int, look_s: float
    ) -> SampleResult:
        async with self._slots:
            if self.stop.is_set():
                return SampleResult(problem.name, number, fault="interrupted")
            result = await self._run(problem, graph, told, number, look_s)
        self._tell(result)
        return result

    async def _run(
        self, problem: Problem, graph: Graph | None, told: Advice, number: int, look_s: float
    ) -> SampleResult:
        place, plan = self._folder / "runs" / f"{problem.name}-{number}", self._plan
        runs = list_runs(place)
        run = runs[0] if runs else create_run(place, problem.task, {"problem": problem.name, "sample": number})
        left_s = max(plan.max_time_s - look_s, 0.0)
        budget = Budget(plan.turns, plan.candidates, left_s, plan.max_cost_usd, patience=PATIENCE)
        watched = _Watched(self._gym, look_s)
        with run.locked():
            search = Search(
                run,
                problem.task,
                judge=watched,
                proposer=self._proposer,
                cache=self._cache,
                budget=budget,
                emit=lambda _: None,
                stop=self.stop,
                on_gpu=self._on_gpu,
                advice=told,
                at_once=int(getattr(self._gym, "at_once", 1)),  # a gym elsewhere may not know
            )
            try:
                found = await search.turns(graph, self._hardware)
            except (DrkError, HostError) as error:
                return SampleResult(problem.name, number, fault=error.message)
        turns = found.episode.turns
        spending = replace(read_spending(run.folder), gpu_s=gpu_seconds(turns))
        fault = "interrupted" if found.interrupted else "" if turns else "; ".join(found.host_errors)
        return SampleResult(problem.name, number, turns, found.ended, fault, spending, watched.pace())


class _Watched:
    """The gym, with the times of its answers; ``spent_s`` is what looking at the reference took before."""

    def __init__(self, gym: OptimizeGym, spent_s: float) -> None:
        self._gym = gym
        self._began = time.monotonic() - spent_s
        self._first_verdict_s: float | None = None
        self._first_win_s: float | None = None

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Have the gym judge a candidate."""
        verdict = await self._gym.evaluate(task, candidate)
        passed_s = time.monotonic() - self._began
        if verdict.status != "error":
            self._first_verdict_s = self._first_verdict_s or passed_s
            if is_win(verdict):
                self._first_win_s = self._first_win_s or passed_s
        return verdict

    async def kernels(self, task: Task) -> ReferenceProfile:
        """Have the gym measure the reference's kernels."""
        return await self._gym.kernels(task)

    def pace(self) -> Pace:
        """Return what was noted until now."""
        return Pace(self._first_verdict_s, self._first_win_s, time.monotonic() - self._began)
