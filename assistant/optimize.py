"""``drk optimize`` as a function: baseline, capture, search, decide, artefact, all inside one run folder.

The command (:mod:`drk.assistant.optimize_command`), the language server and tests call :func:`optimize`; they differ
in the gym they give, in what they do with events, and in who sets ``stop``. Whatever ends the search, result and
artefact of what was found so far are written.

A large module is cut into regions first (:mod:`drk.assistant.regions_search`); the headline is the whole module's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import drk.gym.schema
from drk.assistant.artefact import Artefact, SourceFile, build_artefact
from drk.assistant.artefact_record import ArtefactError
from drk.assistant.artefact_regions import build_regions_artefact
from drk.assistant.budget import Budget, Spending, accepted_wins
from drk.assistant.episode import Episode, Turn
from drk.assistant.errors import EnvironmentFault, UsageError
from drk.assistant.events import Event, EventSink, make_event
from drk.assistant.explanation import explain
from drk.assistant.outcome import Outcome, decide, estimate, result_json
from drk.assistant.proposers import Proposer
from drk.assistant.regions_search import NAME as REGIONS
from drk.assistant.regions_search import PartsGym, RegionsProposer, RegionsWork, region_rows, region_wins
from drk.assistant.runs import SOURCE_COPY, Run, create_run
from drk.assistant.search import Advice, Found, Search
from drk.assistant.search_clock import until_stopped
from drk.assistant.source_edit import added_lines
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.devices import DeviceFacts, device_facts
from drk.gym.draft import UNJUDGED_KINDS
from drk.gym.errors import BundleError, DeviceError, TaskError
from drk.gym.graph import Graph, graph_from_json
from drk.gym.schema import Task
from drk.gym.wire import candidate_id, task_id


class OptimizeGym(PartsGym, Protocol):
    """The part of :class:`drk.gym.Gym` that is needed here. ``device_facts`` names device and GPU."""

    device_facts: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to optimise and how.

    ``measure_words`` is the command line that judges a candidate on a GPU, with ``{candidate}`` where its file goes.
    ``judging`` is whatever else verdicts depend on (seeds, sandbox level).
    """

    task: Task
    source: SourceFile | None
    budget: Budget = field(default_factory=Budget)
    target: str = "sm_90"
    judging: Mapping[str, Any] = field(default_factory=dict)
    cache_dir: Path | None = None
    measure_words: Sequence[str] = ()
    advice: Advice = field(default_factory=Advice)


@dataclass(frozen=True)
class Answer:
    """The outcome with its public JSON and the run folder."""

    outcome: Outcome
    result: dict[str, Any]
    run: Run


def begin_run(plan: Plan, runs_dir: Path, config: Mapping[str, Any]) -> Run:
    """Create the run folder of ``plan``; ``config`` is kept so that the run can be repeated and resumed.

    Raises:
        UsageError: the folder cannot be written.
    """
    source = plan.source
    where = None if source is None else {"root": str(source.root), "entry": source.entry, "sha256": source.sha256}
    run = create_run(runs_dir, plan.task, {**config, "source": where, "measure_words": list(plan.measure_words)})
    if source is not None:
        run.write(SOURCE_COPY, source.data)
    return run


def recorded_source(run: Run) -> SourceFile | None:
    """Return the user's file as it was when ``run`` began, or null where none was recorded.

    Raises:
        UsageError: the run's copy is missing or damaged.
    """
    where = run.config.get("source")
    if where is None:
        return None
    copy = run.folder / SOURCE_COPY
    source = SourceFile(Path(where["root"]), where["entry"], copy.read_bytes() if copy.exists() else b"")
    if source.sha256 != where["sha256"]:
        raise UsageError(f"run {run.name} cannot be resumed: its copy of the source is damaged")
    return source


async def optimize(
    plan: Plan, run: Run, gym: OptimizeGym, proposer: Proposer, *, emit: EventSink, stop: asyncio.Event | None = None
) -> Answer:
    """Search for a faster ``plan.task`` and write result and artefact into ``run``.

    Args:
        plan: what to do.
        run: the folder of a new or an interrupted run.
        gym: an entered gym.
        proposer: who writes candidates.
        emit: receives every event (schema: :mod:`drk.assistant.events`).
        stop: when set, the search ends and what was found so far is kept.

    Raises:
        TaskError: the reference cannot be judged.
        HostError: the gym failed.
        EnvironmentFault: no candidate could be judged, by the host's fault.
        UsageError: another process works on the run.
    """
    stop = stop or asyncio.Event()
    with run.locked():
        session = _Session(plan, run, emit)
        session.tell(_started(plan, run, proposer))
        hardware = hardware_facts(gym.device_facts, plan.target)
        on_gpu = gym.device_facts.get("gpu") is not None
        cache = VerdictCache(plan.cache_dir, cache_conditions(gym.device_facts, plan.judging))
        at_once = int(getattr(gym, "at_once", 1))  # a gym elsewhere may not know
        work = RegionsWork(run, gym, cache, plan.budget, session.tell, stop, on_gpu, at_once)
        search = Search(
            run,
            plan.task,
            judge=gym,
            proposer=RegionsProposer(proposer, work),
            cache=cache,
            budget=plan.budget,
            emit=emit,
            stop=stop,
            on_gpu=on_gpu,
            advice=plan.advice,
            at_once=at_once,
        )
        try:
            graph = await until_stopped(session.look(gym), stop)
        except TimeoutError:
            found = Found(Episode(task_id(plan.task)), "interrupted", interrupted=True)
            return session.finish(decide(found), None, hardware, search.spending())
        found = await search.turns(graph, hardware)
        if found.host_errors and not found.episode.turns:
            raise _unjudged(found.host_errors[0], run.name)
        return session.finish(decide(found), graph, hardware, search.spending())


def _unjudged(cause: str, run: str) -> EnvironmentFault:
    """Return the error for a run of which no candidate could be judged."""
    resume = f"drk optimize --resume {run}"
    if cause.split(":")[0] not in UNJUDGED_KINDS:
        return EnvironmentFault("no candidate could be judged", cause=cause, help=resume)
    return EnvironmentFault(
        "no candidate could be judged without a GPU",
        kind="needs-gpu",
        cause=cause,
        help=f"{resume} --device cuda:0\non a machine with a GPU, or name a gym that has one in DRK_GYM_URL",
    )


class _Session:
    """The steps of one optimisation that write into its run."""

    def __init__(self, plan: Plan, run: Run, emit: EventSink) -> None:
        self._plan = plan
        self._run = run
        self._emit = emit
        self._judged: list[list[int]] = []

    def tell(self, event: Event) -> None:
        self._run.log.append(event)
        self._emit(event)

    async def look(self, gym: OptimizeGym) -> Graph | None:
        """Run the reference and capture its graph, or read what an earlier start of this run captured."""
        kept = self._run.folder / "graph.json"
        if kept.exists():
            data = json.loads(kept.read_text())
            self._judged = data["judged"]
            return graph_from_json(data["graph"])
        inspection = await gym.inspect(self._plan.task)
        inputs = [dict(row) for row in inspection.inputs]
        self._judged = [row["shape"] for row in inputs]
        reduced = bool(inspection.reduced)
        self.tell(make_event("baseline", device=gym.device_facts, inputs=inputs, reduced=reduced))
        try:
            data = await gym.capture(self._plan.task)
            graph = graph_from_json(data)
        except (TaskError, BundleError) as error:
            self.tell(make_event("captured", nodes=None, reason=error.message))
            return None
        self._run.write("graph.json", json.dumps({"graph": data, "judged": self._judged}).encode())
        self.tell(make_event("captured", nodes=len(graph.nodes), reason=None))
        return graph

    def finish(self, outcome: Outcome, graph: Graph | None, hardware: DeviceFacts, spending: Spending) -> Answer:
        """Write artefact and result."""
        artefact, reason = self._artefact(outcome, graph)
        result = result_json(
            outcome,
            self._plan.task,
            run_dir=str(self._run.folder),
            artefact=artefact,
            artefact_reason=reason,
            estimated=estimate(outcome.best, graph, hardware),
            measure_command=self._measure_command(outcome.best),
        )
        explained = explain(outcome, self._plan.task, graph, hardware)
        result["explanation"] = None if explained is None else explained.to_json()
        result["regions"] = region_rows(self._run.folder)
        result["spending"] = spending.to_json(accepted_wins(outcome.episode.turns))
        self._run.record_result(result)
        event = make_event("finished", status=outcome.status, reason=outcome.reason, interrupted=outcome.interrupted)
        self.tell(event)
        return Answer(outcome, result, self._run)

    def _artefact(self, outcome: Outcome, graph: Graph | None) -> tuple[dict[str, str] | None, str]:
        if outcome.best is None or outcome.status not in ("optimised", "unmeasured"):
            return None, ""
        if self._plan.source is None:
            return None, "the task did not come from a file of this machine"
        try:
            built = self._built(outcome.best, graph, self._plan.source)
        except ArtefactError as error:
            self.tell(make_event("artefact", module=None, test=None, diff=None, reason=error.message))
            return None, error.message
        paths = self._write(built, self._plan.source)
        self.tell(make_event("artefact", **paths, reason=None))
        return paths, ""

    def _built(self, best: Turn, graph: Graph | None, source: SourceFile) -> Artefact:
        if best.candidate.proposer == REGIONS:
            wins = region_wins(self._run.folder, best.candidate.source)
            return build_regions_artefact(self._plan.task, best, wins, source, self._run.folder)
        return build_artefact(self._plan.task, best, graph, source, self._run.folder, self._judged)

    def _write(self, built: Artefact, source: SourceFile) -> dict[str, str]:
        edit = {
            "file": str(source.path),
            "sha256": source.sha256,
            "module": built.module_name,
            "test": built.test_name,
            "parts": [name for name, _ in built.parts],
            "edited": base64.b64encode(built.edited).decode(),
            "lines": added_lines(source.data, built.edited),
        }
        for name, data in built.parts:
            self._run.write(name, data)
        paths = {
            "module": self._run.write(built.module_name, built.module),
            "test": self._run.write(built.test_name, built.test),
            "diff": self._run.write(built.diff_name, built.diff),
        }
        self._run.write("edit.json", (json.dumps(edit, indent=1) + "\n").encode())
        return {name: str(path) for name, path in paths.items()}

    def _measure_command(self, best: Turn | None) -> str:
        if best is None or best.verdict.evidence == "gpu" or not self._plan.measure_words:
            return ""
        wanted = candidate_id(best.candidate)
        proposals = [one for step in self._run.proposals().values() for one in step]
        number = next(one.number for one in proposals if candidate_id(one.candidate) == wanted)
        file = self._run.folder / "candidates" / f"{number:03d}.py"
        return shlex.join(str(file) if word == "{candidate}" else word for word in self._plan.measure_words)


def hardware_facts(facts: Mapping[str, Any], target: str) -> DeviceFacts:
    """Return figures of the gym's GPU, or of the compile target where there is none (or it is not in the table).

    Raises:
        DeviceError: the target is not in the table either.
    """
    if facts.get("gpu"):
        try:
            return device_facts(str(facts["gpu"]))
        except DeviceError:
            return device_facts(target)
    return device_facts(target)


def cache_conditions(facts: Mapping[str, Any], judging: Mapping[str, Any]) -> dict[str, Any]:
    """Return whatever a verdict depends on beside task and candidate: device, versions, the gym's code, settings."""
    return {
        "device": dict(facts),
        "judging": dict(judging),
        "versions": {name: _version(name) for name in ("torch", "triton", "numpy")},
        "gym": _gym_digest(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def _gym_digest() -> str:
    """Digest the gym's own code: a changed judge may judge differently, whatever its version says."""
    folder = Path(drk.gym.schema.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _started(plan: Plan, run: Run, proposer: Proposer) -> Event:
    task = plan.task
    return make_event(
        "started",
        run_dir=str(run.folder),
        task={"name": task.name, "id": task_id(task), "target": task.target},
        turns=plan.budget.turns,
        samples=plan.budget.samples,
        max_time_s=plan.budget.max_time_s,
        proposer=proposer.name,
        endpoint=getattr(proposer, "endpoint", None),
        resumed=any(event.get("event") == "started" for event in run.events()),
    )
