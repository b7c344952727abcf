"""Speed of a correct candidate: interleaved random-order pairs under the GPU's exclusive lock (DESIGN 4.6).

Each round draws one set of secret keys and times, in random order, the candidate and every baseline on the inputs
that these keys give, each window on fresh values after a flush of the L2 cache. Ratios are taken within a round, so
that clock drift cancels; the speed-up is their median with an interval. All contestants of a round run on the same
core, and those that are not timed are stopped (:mod:`drk.gym.turns_on_core`). Rounds go on until the interval is
narrow enough, the time is spent, or the maximum is reached. Two clocks are read: events in the Runner, and the
Judge's own around each window; they have to agree.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from statistics import median
from typing import TYPE_CHECKING, Any

from drk.gym.compare import compare_timed
from drk.gym.compile_baseline import CompileBaseline, compilers
from drk.gym.draft import Stop
from drk.gym.gpu_lock import GpuLock, GpuTurns
from drk.gym.gpu_state import doubts, read_state
from drk.gym.reference import ReferenceSession, fetch
from drk.gym.runner.sampling import DIGEST
from drk.gym.runner_handle import RunnerHandle, figure
from drk.gym.sandbox import descendants
from drk.gym.schema import Cell, Failure, Flag, Interval, Speedups
from drk.gym.settings import Timing
from drk.gym.statistics import latency, ratio_interval, resolution, settled
from drk.gym.turns_on_core import TurnsOnCore

if TYPE_CHECKING:
    from drk.gym.judge import Evaluation

Finish = Callable[[], Awaitable[None]]
"""The end of an evaluation, once its candidate was timed."""

MAX_CALLS = 50
LEAD_CALLS = 4
"""Calls at the head of a window that are not timed, where it holds twice as many."""
CLOCK_SLACK_MS = 0.5
MAX_DISAGREEMENTS = 20
LONG_WINDOW_MS = 20.0
MAX_REPEAT = 5000
STRAIN_LIMIT = 1.5
SECOND_LOOKS = 4
SPOT_CHECKS = 2
"""Rounds whose outputs are compared before the last one's: nobody can tell which, so as to work in those only."""
CLOCK_PAUSE_S = 0.1
SETTLE_EVERY = 5
HURRIED = 1.5
ALIKE = 2.0
CROWDED_S = 0.25
"""Rounds end after so long while others wait for the GPU; the verdict's interval says how well that went."""
BEATEN = 1.02
"""By so much a speed-up has to stay below another, beyond its interval, for a candidate to be clearly slower."""
EXCESS_LIMIT = 3.0
REST_BYTES = 2 * 2**30
UNHELD = "contestants could not be held on one processor core: another measurement may differ by more than the interval"


def agree(event_ms: float, wall_ms: float) -> bool:
    """Whether an event time is possible beside the Judge's clock around the same window.

    The Judge's clock also holds the pipe, the spin before the window and the launches, so it reads more; not less, and
    not much more.
    """
    return 0.0 < event_ms <= wall_ms and wall_ms - event_ms <= CLOCK_SLACK_MS + 0.1 * wall_ms


class Measurement:
    """Timing on one GPU."""

    def __init__(self, uuid: str, timing: Timing, batch: int = 1) -> None:
        self.uuid = uuid
        self.turns = GpuTurns(GpuLock(uuid), batch)
        self.timing = timing
        self.random = random.SystemRandom()
        self.compiling = asyncio.Semaphore(compilers())

    async def measure(
        self, evaluation: Evaluation, runner: RunnerHandle, session: ReferenceSession, finish: Finish
    ) -> None:
        """Time a correct candidate against its baselines; add speed-ups and latencies to the draft.

        ``finish`` ends the evaluation while the GPU is still held: it is short, and in a turn of its own it would have
        to wait for all others that are to be timed.
        """
        compiled = None
        if self.timing.compile_baseline:
            # The compiler's seconds need no GPU to themselves, and are spent once for all candidates.
            with evaluation.draft.stage("baseline"):
                compiled = await self.baseline(session).ready()
        async with self.turns.alone():
            async with session.lock:
                with evaluation.draft.stage("time"):
                    contest = Contest(self, evaluation, runner, session, compiled)
                    await contest.warm_up()
                    await contest.run()
                    await asyncio.gather(contest.note_doubts(), contest.check_outputs())
                    await contest.check_clock()
                    contest.conclude()
                    await contest.rest()
            await finish()

    def baseline(self, session: ReferenceSession) -> CompileBaseline:
        """Return the session's compiled reference; nothing is compiled yet."""
        if session.baseline is None:
            session.baseline = CompileBaseline(session, self.turns, self.compiling)
        return session.baseline


class Contest:
    """One candidate against its baselines; ``compiled`` is the compiled reference's Runner with its warm-up."""

    def __init__(
        self,
        owner: Measurement,
        evaluation: Evaluation,
        runner: RunnerHandle,
        session: ReferenceSession,
        compiled: tuple[RunnerHandle, dict[str, Any]] | None = None,
    ) -> None:
        self.owner = owner
        self.timing = owner.timing
        self.evaluation = evaluation
        self.session = session
        self.compiled = compiled
        self.runner = runner
        self.forms: dict[str, tuple[RunnerHandle, str]] = {"eager": (session.handle, "eager")}
        self.calls: dict[str, int] = {}
        self.lead: dict[str, int] = {}
        self.times_ms: dict[str, list[float]] = defaultdict(list)
        self.disagreed: dict[str, int] = defaultdict(int)
        self.clock_looks = 0
        self.excess_ms: dict[str, list[float]] = defaultdict(list)
        self.window_keys: list[int] = []

    async def _ask(self, name: str, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
        handle, _ = self.forms[name]
        if name == "candidate":
            return await self.evaluation.ask(handle, "time", command, timeout_s, **message)
        answer = await handle.call(command, timeout_s, **message)
        if not answer["ok"]:
            raise Stop("error", Failure("host", "baseline-failed", f"{name} baseline: {answer['error']['message']}"))
        return answer

    async def warm_up(self) -> None:
        """Bring every contestant to its steady state and choose how many calls a window of each holds."""
        await self._add_compiled()
        self.forms["candidate"] = (self.runner, "eager")
        answers = {name: await self._warm(name) for name in self.forms}
        room = 2**31 // max(*(int(min(2**62, figure(answer, "input_bytes"))) for answer in answers.values()), 1)
        latencies = {name: max(1e-6, figure(answer, "latency_s")) for name, answer in answers.items()}
        least = min(latencies.values())
        for name, latency_s in latencies.items():
            # What begins and ends a window weighs alike on those that are about as fast.
            wanted = math.ceil(self.timing.window_us * 1e-6 / (least if latency_s < ALIKE * least else latency_s))
            self.calls[name] = max(1, min(wanted, MAX_CALLS, room))
            self.lead[name] = min(LEAD_CALLS, self.calls[name] // 2, max(room - self.calls[name], 0))

    async def _add_compiled(self) -> None:
        if self.compiled is None:
            return
        handle, answer = self.compiled
        if answer["ok"] and "compile" not in self.session.warm:
            limit_s = self.evaluation.settings.limits.compile_s
            answer = await handle.call("warm", limit_s, form="compile", key=secrets.randbits(62))
            if answer["ok"]:
                self.session.warm["compile"] = answer
        if answer["ok"]:
            self.forms["compile"] = (handle, "compile")
        else:
            note = answer["error"]["message"].splitlines()[0][:200]
            self.evaluation.draft.notes.append(f"torch.compile fails on the reference, so it is no baseline: {note}")

    async def _warm(self, name: str) -> dict[str, Any]:
        # The reference's Runners have been through this when the first candidate of their task was timed.
        if name in self.session.warm:
            return self.session.warm[name]
        limit_s = self.evaluation.settings.limits.compile_s
        answer = await self._ask(name, "warm", limit_s, form="eager", key=secrets.randbits(62))
        return answer if name == "candidate" else self.session.warm.setdefault(name, answer)

    async def run(self) -> None:
        """Take rounds until the slowest-settling interval is narrow enough."""
        pids = {name: handle.pid for name, (handle, _) in self.forms.items()}
        with await asyncio.to_thread(TurnsOnCore, pids) as turns:
            await self._take_rounds(turns)
        if not turns.held:
            self.evaluation.draft.notes.append(UNHELD)

    async def _take_rounds(self, turns: TurnsOnCore) -> None:
        start = time.monotonic()
        spots = self.owner.random.sample(range(1, self.timing.min_pairs + 1), min(SPOT_CHECKS, self.timing.min_pairs))
        while len(self.times_ms["candidate"]) < self.timing.max_pairs:
            await self._round(turns)
            await self._check_clocks()
            done = len(self.times_ms["candidate"])
            if done in spots:
                spots.remove(done)
                start += await self._check_round(turns)
            if done < self.timing.min_pairs:
                continue
            limit_s = min(self.timing.max_s, CROWDED_S) if self.owner.turns.waiting else self.timing.max_s
            if time.monotonic() > start + limit_s or (done % SETTLE_EVERY == 0 and self._settled()):
                return

    async def note_doubts(self) -> None:
        """Note what the GPU says against this measurement: throttling, slow clocks, other processes."""
        state = await asyncio.to_thread(read_state, self.owner.uuid)
        if state is not None:
            ours = await asyncio.to_thread(descendants, os.getpid())
            self.evaluation.draft.notes += doubts(state, {process.pid for process in ours})

    async def _check_clocks(self) -> None:
        # A late host now and then costs a round; a candidate whose events keep disagreeing tampers with them.
        mine, theirs = self.disagreed["candidate"], sum(self.disagreed.values()) - self.disagreed["candidate"]
        done = len(self.times_ms["candidate"])
        if mine > MAX_DISAGREEMENTS and mine > 3 * (theirs + 1) and mine > done:
            if self.clock_looks < SECOND_LOOKS:
                # A host that holds up one process for a moment looks the same; it does not each time.
                self.clock_looks += 1
                self.disagreed.clear()
                await asyncio.sleep(CLOCK_PAUSE_S)
                return
            proof = "its event times contradict the Judge's own clock"
            self.evaluation.draft.flags.append(Flag("clock-mismatch", "timing", "fraud", proof))
            raise Stop("rejected", Failure("time", "clock-mismatch", proof))
        if mine + theirs > 5 * MAX_DISAGREEMENTS + 2 * done:
            raise Stop("error", Failure("host", "unsteady", "the host is too busy to time anything"))

    def _settled(self) -> bool:
        # While others wait for the GPU, a somewhat wider interval must do; the verdict states it.
        halfwidth = self.timing.target_halfwidth * (HURRIED if self.owner.turns.waiting else 1.0)
        ratios = self._ratios()
        if all(settled(interval, halfwidth) for interval in ratios.values()):
            return True
        return self.timing.best_only and self._is_beaten(min(ratios.values(), key=lambda one: one.value))

    def _ratios(self) -> dict[str, Interval]:
        mine, names = self.times_ms["candidate"], [name for name in self.forms if name != "candidate"]
        floor = resolution(median(mine))
        return {name: ratio_interval(self.times_ms[name], mine, floor=floor) for name in names}

    def _is_beaten(self, headline: Interval) -> bool:
        """Whether the candidate clearly is not the one that is looked for, and say so in the verdict."""
        bar = max(1.0, self.session.best_low)
        if headline.high * BEATEN >= bar:
            return False
        than = "the best candidate so far" if bar > 1.0 else "the fastest baseline"
        self.evaluation.draft.notes.append(f"timed in {headline.pairs} rounds only: clearly slower than {than}")
        return True

    async def _round(self, turns: TurnsOnCore) -> None:
        keys = [secrets.randbits(62) for _ in range(max(self._window(name) for name in self.forms))]
        names = list(self.forms)
        self.owner.random.shuffle(names)
        limit_s = self.evaluation.settings.limits.run_s
        times: dict[str, float] = {}
        turns.move()
        for name in names:
            turns.turn_of(name)
            mine = keys[: self._window(name)]
            await self._ask(name, "prepare", limit_s, form=self.forms[name][1], keys=mine)
            if name == "candidate":
                self.window_keys = mine
            start = time.perf_counter()
            answer = await self._ask(name, "go", limit_s, lead=self.lead[name])
            wall_ms = (time.perf_counter() - start) * 1e3
            event_ms, lead_ms = figure(answer, "event_ms"), figure(answer, "lead_ms")
            self.excess_ms[name].append(wall_ms - lead_ms - event_ms)
            if not (lead_ms >= 0.0 and event_ms > 0.0 and agree(lead_ms + event_ms, wall_ms)):
                self.disagreed[name] += 1
                return
            times[name] = event_ms / self.calls[name]
        for name, value in times.items():
            self.times_ms[name].append(value)

    def _window(self, name: str) -> int:
        """How many calls a window of this contestant holds, untimed ones included."""
        return self.lead[name] + self.calls[name]

    async def check_outputs(self) -> None:
        """Compare what the candidate returned last with the reference's output on the same key.

        Who answers from a cache once the calls come quickly does so to the end. Other calls were looked at before, in
        rounds that nobody could foresee.
        """
        last = len(self.window_keys) - 1
        await self._check_output("timed", last, self._keys_up_to(last))

    async def _check_round(self, turns: TurnsOnCore) -> float:
        """Compare a random output of the round that was just timed; return how many seconds that took."""
        start = time.monotonic()
        index = self.owner.random.randrange(len(self.window_keys))
        await self._check_output("timed", index, self._keys_up_to(index), turns.turn_of)
        return time.monotonic() - start

    def _keys_up_to(self, index: int) -> list[int]:
        # Where calls change the module's state, the reference has to make those before this one as well.
        return self.window_keys[0 if self.session.stateful else index : index + 1]

    async def _check_output(
        self, where: str, index: int, keys: list[int], turn_of: Callable[[str], None] = lambda _name: None
    ) -> None:
        """Hold output ``index`` of the candidate's last window against the reference's after calls on ``keys``.

        ``turn_of`` lets a contestant run where others are stopped.
        """
        evaluation, limit_s = self.evaluation, self.evaluation.settings.limits.run_s
        sample = self.session.sample(None)
        turn_of("candidate")
        answer = await self._ask("candidate", "outputs", limit_s, index=index, sample=sample)
        mine = await fetch(self.runner, answer, evaluation.settings, self.session.compare_on)
        turn_of("eager")
        await self._ask("eager", "prepare", limit_s, form="eager", keys=keys)
        await self._ask("eager", "go", limit_s)
        answer = await self._ask("eager", "outputs", limit_s, index=len(keys) - 1, sample=sample)
        theirs = await fetch(self.session.handle, answer, evaluation.settings, self.session.compare_on)
        if mine is None or theirs is None:
            raise Stop("failed", Failure("time", "early-exit", "a process ended while timed outputs were read"))
        for name, reference in theirs.items():
            evaluation.draft.cells.append(compare_timed(f"{where} {name}", mine.get(name), reference, self._like(name)))

    async def check_clock(self) -> None:
        """Hold the claimed latency against the Judge's own clock: window by window, and in one too long to hide in."""
        mine = median(self.excess_ms["candidate"])
        theirs = max(median(times) for name, times in self.excess_ms.items() if name != "candidate")
        if mine > EXCESS_LIMIT * max(theirs, 0.0) + CLOCK_SLACK_MS:
            proof = f"its windows end {mine:.2f} ms after their events claim, the baseline's {theirs:.2f} ms after"
            self.evaluation.draft.flags.append(Flag("clock-mismatch", "timing", "fraud", proof))
        self.session.strain = self.session.strain or (await self._strain("eager"))[0]
        strain = {"eager": self.session.strain}
        strain["candidate"], key = await self._strain("candidate")
        for _ in range(SECOND_LOOKS):
            if not self._strained(strain):
                break
            # A host that was busy for a moment looks the same, once; work that hides from events is there each time.
            again, key = await self._strain("candidate")
            strain["candidate"] = min(strain["candidate"], again)
            strain["eager"] = max(strain["eager"], (await self._strain("eager"))[0])
        if not self.session.stateful:
            await self._check_output("long window", 0, [key])
        if self._strained(strain):
            times = f"{strain['candidate']:.2f}"
            proof = f"in a long window the Judge's clock shows {times} times the time that its events claim"
            self.evaluation.draft.flags.append(Flag("clock-mismatch", "timing", "fraud", proof, strain))

    @staticmethod
    def _strained(strain: dict[str, float]) -> bool:
        return strain["candidate"] > STRAIN_LIMIT * max(strain["eager"], 1.0)

    async def _strain(self, name: str) -> tuple[float, int]:
        """Return the Judge's time over the claimed one, for about :data:`LONG_WINDOW_MS`, and the window's last key."""
        claimed_ms = max(median(self.times_ms[name]), 1e-3)
        repeat = min(max(math.ceil(LONG_WINDOW_MS / claimed_ms), 1), MAX_REPEAT)
        limit_s = self.evaluation.settings.limits.run_s
        keys = [secrets.randbits(62) for _ in range(min(self.calls[name], repeat))]
        await self._ask(name, "prepare", limit_s, form=self.forms[name][1], keys=keys)
        start = time.perf_counter()
        await self._ask(name, "go", limit_s, repeat=repeat)
        wall_ms = (time.perf_counter() - start) * 1e3
        return (wall_ms - CLOCK_SLACK_MS) / (claimed_ms * repeat), keys[(repeat - 1) % len(keys)]

    def _like(self, leaf: str) -> Cell | None:
        cells = self.evaluation.draft.cells
        for name in (leaf, leaf.removesuffix(DIGEST)):
            found = next((cell for cell in cells if cell.name.endswith(f" {name}")), None)
            if found is not None:
                return found
        return None

    async def rest(self) -> None:
        """Give back what timing took of the GPU's memory, where that is much."""
        if self.session.peak_bytes > REST_BYTES:
            for name in self.forms:
                await self._ask(name, "rest", self.evaluation.settings.limits.run_s)

    def conclude(self) -> None:
        """Write speed-ups, the headline (the fastest baseline) and latencies into the draft."""
        draft, mine = self.evaluation.draft, self.times_ms["candidate"]
        ratios = self._ratios()
        draft.speedups = Speedups(**ratios)
        draft.headline = min(ratios, key=lambda name: ratios[name].value)
        if self.timing.best_only and not any(flag.severity == "fraud" for flag in draft.flags):
            self.session.best_low = max(self.session.best_low, ratios[draft.headline].low)
        draft.latency_ms = latency(mine)
        draft.baselines_ms = {name: latency(self.times_ms[name]) for name in ratios}
