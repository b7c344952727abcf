"""The loop: propose, judge, feed back, until the budget is spent or nothing more is likely (DESIGN 5).

Every step is journalled in the run folder before its effect counts, so a resumed run replays proposals and verdicts
from there and asks proposer and gym only for what is missing. Verdicts come from the run, else from the cache across
runs, else from the gym.

The search ends when: turns, time, money or GPU seconds are spent; the proposer has nothing new; the best comes near
the roofline; with ``Budget.patience``, that many steps of an ordered proposer brought nothing better (its further ones
are less likely still); or, without a GPU, an ordered proposer's candidate was accepted (variants then differ only in
speed, which nobody can measure there), or one that does as much of the work as its proposer calls enough. ``stop`` ends
it between or during judgements; what was judged so far counts. A proposer that fails ends it too, once anything was
judged. Candidates that the user gives are a step of their own, which is not counted. An answer without a candidate gets
its verdict without asking the gym.

The candidates of one step are judged up to ``at_once`` together: compiling and correctness share the GPU, timing does
not. A verdict is journalled as soon as it is known; the episode takes them in the order in which they were proposed, so
that an answer does not depend on which was judged first. Where the first accepted one settles a search they are judged
one after the other. What cannot end in the time that is left is not begun.

Left out: candidates of different steps judged together (a step is proposed from the verdicts before it).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from drk.assistant.answer_parser import missing_reason, missing_verdict
from drk.assistant.budget import Budget, BudgetSpent, Spending, gpu_seconds, spent_reason, worked_s
from drk.assistant.episode import Episode, Turn, best_of_history, describe_gain, is_usable
from drk.assistant.errors import DrkError
from drk.assistant.events import Event, EventSink, make_event
from drk.assistant.hotspots import Hotspots, KernelsGym, hotspots_event, measure_hotspots, recorded_hotspots
from drk.assistant.llm.call_journal import read_spending
from drk.assistant.proposers import ProposeContext, Proposer, enough_coverage, reads_hotspots
from drk.assistant.roofline import NEAR, bound_us
from drk.assistant.runs import Proposal, Run
from drk.assistant.search_clock import SearchClock, Stopped
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.devices import DeviceFacts
from drk.gym.draft import UNJUDGED_KINDS
from drk.gym.graph import Graph
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.wire import candidate_id, task_id

USER = "user"
"""Who proposes the candidates that a user gives."""

JUDGE_ATTEMPTS = 2
"""A verdict with status ``error`` is the host's fault and tried again this often."""


class Judge(KernelsGym, Protocol):
    """The part of :class:`drk.gym.Gym` that the loop needs."""

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate; never raises for what it does."""
        ...


@dataclass(frozen=True)
class Advice:
    """What the search is told beside the task: the user's hints and candidates, and the reference's hot kernels.

    Where ``hotspots`` are null, the search asks the gym for them, once in a run, if its proposer makes use of them.
    """

    hints: tuple[str, ...] = ()
    given: tuple[Candidate, ...] = ()
    hotspots: Hotspots | None = None


@dataclass(frozen=True)
class Found:
    """What a search brought: the turns, why it ended, whether by ``stop``, and host errors met (never rewarded)."""

    episode: Episode
    ended: str
    interrupted: bool = False
    host_errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Outcome:
    """A verdict (null after host errors), the seconds that it took, and where it came from."""

    verdict: Verdict | None
    seconds: float
    source: str


class Search:
    """One search over one task.

    ``emit`` receives events after they are journalled; ``on_gpu`` says what can be had; ``at_once`` is how many
    candidates the judge takes together.
    """

    def __init__(  # noqa: PLR0913 - each is a part of its own
        self,
        run: Run,
        task: Task,
        *,
        judge: Judge,
        proposer: Proposer,
        cache: VerdictCache,
        budget: Budget,
        emit: EventSink,
        stop: asyncio.Event | None = None,
        on_gpu: bool = False,
        advice: Advice | None = None,
        at_once: int = 1,
    ) -> None:
        self._run = run
        self._task = task
        self._judge = judge
        self._proposer = proposer
        self._cache = cache
        self._budget = budget
        self._emit = emit
        self._clock = SearchClock(budget.max_time_s, stop or asyncio.Event())
        self._on_gpu = on_gpu
        self._at_once = at_once if on_gpu or not proposer.ordered else 1
        self._advice = advice or Advice()
        self._given = list(self._advice.given)
        self._episode = Episode(task_id(task))
        self._journal = run.proposals()
        self._host_errors: list[str] = []
        self._unjudged: set[str] = set()
        self._least_s = 0.0
        self._logged = frozenset(event["number"] for event in run.events() if event.get("event") == "judged")

    async def turns(self, graph: Graph | None, hardware: DeviceFacts) -> Found:
        """Run the search to its end and return what it found. Time counts from when the search was made."""
        ended, interrupted = "all turns are used", False
        index = counted = 0
        try:
            while counted < self._budget.turns or self._given:
                index += 1
                why = await self._step(index, graph, hardware)
                if why and not self._given:
                    ended = why
                    break
                counted += not self._is_given(index)
        except Stopped as stopped:
            ended, interrupted = stopped.why, stopped.interrupted
        return Found(self._episode, ended, interrupted, tuple(self._host_errors))

    async def _step(self, index: int, graph: Graph | None, hardware: DeviceFacts) -> str:
        """Run one step; return why the search should end, or an empty string."""
        proposals = self._journal.get(index)
        if proposals is None:
            spent = spent_reason(self._budget, self.spending())
            if spent:
                raise Stopped(spent)
            self._clock.check(self._least_s)
            proposals = self._number(index, await self._candidates(index, graph, hardware))
            if not proposals:
                return "the proposer has nothing more to offer"
            self._emit(self._run.record_proposals(index, proposals))
            self._journal[index] = proposals
        if await self._judge_all(proposals):
            return "a candidate was accepted, and without a GPU its variants cannot be told apart"
        return self._at_roofline(graph, hardware) or self._nothing_better(index)

    async def _candidates(self, index: int, graph: Graph | None, hardware: DeviceFacts) -> list[Candidate]:
        """Return what the user gave and was not judged yet, else what the proposer offers."""
        judged = {candidate_id(turn.candidate) for turn in self._episode.turns}
        given, self._given = [one for one in self._given if candidate_id(one) not in judged], []
        if given:
            return [replace(one, proposer=USER) for one in given]
        await self._find_hotspots()
        context = ProposeContext(
            self._task,
            graph,
            hardware,
            self._episode.turns,
            self._budget.samples,
            turn=index,
            folder=self._run.folder,
            hotspots=self._advice.hotspots,
            hints=self._advice.hints,
            on_gpu=self._on_gpu,
        )
        try:
            return await self._clock.before_end(self._proposer.propose(context))
        except BudgetSpent as spent:
            raise Stopped(str(spent)) from None
        except DrkError as fault:
            if not self._episode.turns:
                raise
            self._tell(make_event("note", text=f"the proposer failed: {fault.message}: {fault.cause}".rstrip(": ")))
            raise Stopped(f"the proposer failed: {fault.message}") from fault

    async def _find_hotspots(self) -> None:
        """Have the reference's kernels measured, or read what an earlier start of this run told of them."""
        if self._advice.hotspots is not None or not reads_hotspots(self._proposer):
            return
        found = recorded_hotspots(self._run.events())
        if found is None:
            asked = measure_hotspots(self._judge, self._task) if self._on_gpu else None
            found = Hotspots() if asked is None else await self._clock.before_end(asked)
            self._tell(hotspots_event(found))
        self._advice = replace(self._advice, hotspots=found)

    def spending(self) -> Spending:
        """Return what the run has spent so far: its model calls, and the GPU seconds of its turns."""
        return replace(read_spending(self._run.folder), gpu_s=gpu_seconds(self._episode.turns))

    def _is_given(self, index: int) -> bool:
        return any(proposal.candidate.proposer == USER for proposal in self._journal.get(index, []))

    def _at_roofline(self, graph: Graph | None, hardware: DeviceFacts) -> str:
        best = best_of_history(self._episode)
        if graph is None or best is None or best.verdict.evidence != "gpu" or best.verdict.latency_ms is None:
            return ""
        bound = bound_us(graph, hardware)
        if best.verdict.latency_ms.median * 1e3 > NEAR * bound:
            return ""
        return f"the best takes {best.verdict.latency_ms.median * 1e3:.1f} us; no kernel can take less than {bound:.1f}"

    def _nothing_better(self, index: int) -> str:
        """Say that the last steps brought nothing better, where that is a reason to end."""
        best, patience = best_of_history(self._episode), self._budget.patience
        if patience is None or best is None or not self._on_gpu or not self._proposer.ordered:
            return ""
        return f"nothing after turn {best.index} was better" if index - best.index >= patience else ""

    def _number(self, index: int, candidates: list[Candidate]) -> list[Proposal]:
        """Number new candidates; repeated ones are left out."""
        seen = {candidate_id(turn.candidate) for turn in self._episode.turns} | self._unjudged
        number = sum(len(proposals) for proposals in self._journal.values())
        fresh: list[Proposal] = []
        limit = len(candidates) if candidates and candidates[0].proposer == USER else self._budget.samples
        for candidate in candidates[:limit]:
            if candidate_id(candidate) not in seen:
                seen.add(candidate_id(candidate))
                fresh.append(Proposal(number + len(fresh) + 1, index, len(fresh), candidate))
        return fresh

    def _is_settled(self) -> bool:
        """Say whether the last turn settles the search: without a GPU, further ones could not be told from it."""
        last = self._episode.turns[-1].verdict if self._episode.turns else None
        if last is None or not is_usable(last) or last.evidence == "gpu":
            return False
        return self._proposer.ordered or (last.coverage_estimate or 0.0) >= enough_coverage(self._proposer)

    async def _judge_all(self, proposals: Sequence[Proposal]) -> bool:
        """Judge a step's candidates; say whether one of them settles the search. When stopped, what is known counts."""
        known = {proposal.number: outcome for proposal in proposals if (outcome := self._recorded(proposal))}
        waiting = deque(proposals)
        begun: deque[tuple[Proposal, asyncio.Task[_Outcome]]] = deque()
        stopped: Stopped | None = None
        try:
            while waiting or begun:
                while waiting and sum(not task.done() for _, task in begun) < self._at_once:
                    finding = self._find_verdict(waiting[0], known.get(waiting[0].number))
                    begun.append((waiting.popleft(), asyncio.create_task(finding)))
                running = [task for _, task in begun if not task.done()]
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                while begun and begun[0][1].done():
                    proposal, task = begun.popleft()
                    try:
                        self._take(proposal, task.result())
                    except Stopped as why:
                        stopped = stopped or why
                    if self._is_settled():
                        return True
        finally:
            for _, task in begun:
                task.cancel()
            await asyncio.gather(*(task for _, task in begun), return_exceptions=True)
        if stopped is not None:
            raise stopped
        return False

    def _take(self, proposal: Proposal, outcome: _Outcome) -> None:
        """Add a verdict to the episode."""
        verdict = outcome.verdict
        if verdict is None:
            return
        turn = Turn(proposal.turn, proposal.candidate, verdict, outcome.seconds, proposal.sample)
        self._episode = self._episode.extended(turn)
        event = _judged_event(turn, proposal.number, outcome.source, best=best_of_history(self._episode) is turn)
        if outcome.source == "run" and proposal.number in self._logged:
            self._emit(event)
        else:
            self._tell(event)

    def _recorded(self, proposal: Proposal) -> _Outcome | None:
        """Return what an earlier start of this run found."""
        recorded = self._run.verdict(proposal)
        if recorded is None or self._is_measurable_now(recorded[0]):
            return None
        self._clock.replay(recorded[1], self._run.judged_at(proposal))
        self._note_work(*recorded)
        return _Outcome(*recorded, "run")

    async def _find_verdict(self, proposal: Proposal, recorded: _Outcome | None) -> _Outcome:
        if recorded is not None:
            return recorded
        self._clock.check()
        if missing_reason(proposal.candidate) is not None:
            refused = missing_verdict(proposal.candidate, evidence="gpu" if self._on_gpu else "interpreter")
            self._run.record_verdict(proposal, refused, 0.0)
            return _Outcome(refused, 0.0, "parser")
        kept = self._cache.get(self._task, proposal.candidate)
        if kept is not None:
            self._run.record_verdict(proposal, kept, 0.0)
            return _Outcome(kept, 0.0, "cache")
        self._clock.check(self._least_s)
        began = time.monotonic()
        verdict = await self._ask_gym(proposal)
        seconds = time.monotonic() - began
        if verdict is not None:
            self._run.record_verdict(proposal, verdict, seconds)
            self._note_work(verdict, seconds)
            self._cache.put(self._task, proposal.candidate, verdict)
        return _Outcome(verdict, seconds, "gym")

    def _is_measurable_now(self, verdict: Verdict) -> bool:
        """Say whether a run that began without a GPU goes on with one: what was accepted is then judged anew."""
        return self._on_gpu and verdict.accepted and verdict.evidence != "gpu"

    async def _ask_gym(self, proposal: Proposal) -> Verdict | None:
        """Return the gym's verdict, or null after repeated host errors."""
        identity = candidate_id(proposal.candidate)
        message = ""
        for _ in range(JUDGE_ATTEMPTS):
            self._emit(
                make_event("judging", turn=proposal.turn, number=proposal.number, id=identity, eta_s=self._eta_s())
            )
            verdict = await self._clock.before_end(self._judge.evaluate(self._task, proposal.candidate))
            if verdict.status != "error":
                return verdict
            unjudged = verdict.error is not None and verdict.error.kind in UNJUDGED_KINDS
            message = f"{verdict.error.kind}: {verdict.error.message}" if verdict.error else "host error"
            if unjudged:  # no run on this device can judge it
                self._unjudged.add(identity)
                break
        self._host_errors.append(message)
        self._tell(make_event("note", text=f"candidate {proposal.number} could not be judged: {message}"))
        return None

    def _note_work(self, verdict: Verdict, seconds: float) -> None:
        """Remember the least that judging took; nothing is begun in less."""
        if seconds > 0:  # not from the cache
            worked = worked_s(verdict, seconds)
            self._least_s = min(self._least_s or worked, worked)

    def _eta_s(self) -> float | None:
        """Seconds until all turns would be judged at the pace so far, at most what the budget leaves."""
        paid = [turn.seconds for turn in self._episode.turns if turn.seconds > 0]
        if not paid:
            return None
        planned = sum(len(proposals) for proposals in self._journal.values())
        planned += self._budget.samples * (self._budget.turns - len(self._journal))
        rest = max(0, planned - len(self._episode.turns))
        return round(min(rest * sum(paid) / len(paid) / self._at_once, self._clock.left_s()), 1)

    def _tell(self, event: Event) -> None:
        self._run.log.append(event)
        self._emit(event)


def _judged_event(turn: Turn, number: int, source: str, *, best: bool) -> Event:
    verdict = turn.verdict
    return make_event(
        "judged",
        turn=turn.index,
        sample=turn.sample,
        number=number,
        id=candidate_id(turn.candidate),
        source=source,
        status=verdict.status,
        reached=verdict.reached,
        seconds=round(turn.seconds, 3),
        gain=describe_gain(verdict) if is_usable(verdict) else None,
        note=turn.candidate.note,
        error=f"{verdict.error.kind}: {verdict.error.message}" if verdict.error else None,
        best=best,
    )
