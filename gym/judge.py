"""From candidate to verdict: the Judge's steps along the evidence ladder (DESIGN 4.1).

The Judge runs no user code. It parses the candidate's text, asks sandboxed Runners to load and run it on inputs drawn
from its own keys, copies what they return into its own memory, compares against float64 truth, and writes down what was
reached. Each step either goes on or ends the evaluation with a failure that names stage, kind and line.
"""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from drk.gym.correctness import Trials
from drk.gym.detectors import label_work
from drk.gym.draft import COMPILE_KINDS, UNJUDGED_KINDS, Draft, Stop
from drk.gym.environment import environment
from drk.gym.errors import HostError, ProtocolError
from drk.gym.reference import ReferenceSession, candidate_files, task_meta
from drk.gym.runner_handle import RunnerHandle
from drk.gym.schema import (
    RUNGS,
    Candidate,
    Failure,
    Flag,
    Stage,
    Status,
    Task,
    Verdict,
    WeightsHow,
)
from drk.gym.wire import MAX_SOURCE_BYTES, candidate_id, task_id

if TYPE_CHECKING:
    from drk.gym.engine import Gym
    from drk.gym.offline_compile import OfflineCompile

PARSED_BYTES = 2**16


def parse_candidate(source: str) -> bool:
    """Check that the candidate is Python text of a sane size; return whether that could be told here.

    The parser holds everything up for as long as it takes, which text of a few megabytes can make minutes. What is
    longer than :data:`PARSED_BYTES` is parsed where it is imported, in its own process and time.

    Raises:
        Stop: with stage ``parse``.
    """
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_SOURCE_BYTES:
        raise Stop("failed", Failure("parse", "too-large", f"the source is larger than {MAX_SOURCE_BYTES} bytes"))
    if not source.strip():
        raise Stop("failed", Failure("parse", "empty", "the candidate is empty"))
    if size > PARSED_BYTES:
        return False
    try:
        ast.parse(source.removeprefix("\ufeff"))
    except SyntaxError as error:
        raise Stop("failed", Failure("parse", "syntax-error", str(error.msg), error.lineno)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        message = f"{type(error).__name__}: {error}"
        raise Stop("failed", Failure("parse", "unparsable", message)) from None
    return True


class Evaluation:
    """One candidate's way through the gym."""

    def __init__(
        self, gym: Gym, task: Task, candidate: Candidate, leave_slot: Callable[[], None] = lambda: None
    ) -> None:
        self.gym = gym
        self.leave_slot = leave_slot
        self.settings = gym.settings
        self.task = task
        self.candidate = candidate
        self.draft = Draft("interpreter" if gym.device == "interpret" else "gpu")
        self.launched = False
        self._spent_s = 0.0

    async def verdict(self) -> Verdict:
        """Judge and return the verdict.

        Raises:
            TaskError: the reference itself cannot be judged.
            HostError: the host failed; nothing is said about the candidate.
        """
        start = time.monotonic()
        try:
            if parse_candidate(self.candidate.source):
                self.draft.reach("parsed")
            async with contextlib.AsyncExitStack() as stack:
                with self.draft.stage("reference"):
                    session = await stack.enter_async_context(self.gym.using(self.task))
                self._note_insensitive(session)
                await self._judge_with_room(session)
            status, failure = self._conclusion()
        except Stop as stop:
            status, failure = stop.status, stop.failure
        except ProtocolError as error:
            status, failure = "failed", Failure("run", "protocol", error.message)
        self.draft.timings_s["total"] = round(time.monotonic() - start, 4)
        return self._finish(status, failure)

    def _note_insensitive(self, session: ReferenceSession) -> None:
        if session.untold:
            told = ", ".join(session.untold)
            note = f"the module is insensitive: wrong outputs ({told}) cannot be told from right ones"
            self.draft.notes.append(note)

    async def _judge_with_room(self, session: ReferenceSession) -> None:
        """Judge; what the GPU's memory did not suffice for is tried once more with that memory to itself."""
        try:
            async with self.gym.room(session.peak_bytes):
                await self._judge(session)
        except Stop as stop:
            if self.gym.gpu is None or not is_gpu_memory(stop.failure):
                raise
            self.draft = Draft(self.draft.evidence, timings_s=self.draft.timings_s)
            self.launched = False
            self._note_insensitive(session)
            async with self.gym.room(self.gym.memory_bytes):
                await self._judge(session)

    async def _judge(self, session: ReferenceSession) -> None:
        """Run everything that needs a process."""
        offline = self.gym.offline_compile(self, session)
        try:
            runner = await self._start()
            try:
                trials = Trials(self, runner, session)
                await self._load(runner, session)
                async with self.gym.sharing():
                    await self._climb(trials, offline)
                    if self.correct and self.fraud is None:
                        await self.gym.profile(self, runner)
                timed = self.correct and self.fraud is None
                if not (timed and await self.gym.measure(self, runner, session, trials.finish)):
                    async with self.gym.sharing():
                        await trials.finish()
                if self.correct:
                    label_work(self.draft, launched=self.launched)
            finally:
                await runner.close()
        finally:
            await offline.close()

    async def _climb(self, trials: Trials, offline: OfflineCompile) -> None:
        try:
            await trials.run()
        except Stop as stop:
            # A kernel that does not compile often fails in the interpreter too, with a less useful message.
            await offline.finish()
            raise stop from None
        await offline.finish()

    async def _start(self) -> RunnerHandle:
        with self.draft.stage("start"):
            return await self.gym.start_runner("candidate", candidate_files(self.task, self.candidate))

    async def _load(self, runner: RunnerHandle, session: ReferenceSession) -> None:
        limits = self.settings.limits
        with self.draft.stage("load"):
            async with self.gym.making_context():
                await self.ask(
                    runner,
                    "load",
                    "load",
                    limits.load_s,
                    meta=task_meta(self.task),
                    device=session.device,
                    seed=session.seed,
                    precision=self.task.precision,
                )
            self.draft.reach("loaded")
            answer = await self.ask(
                runner,
                "load",
                "state_in",
                limits.run_s,
                fds=(session.weights.fd,),
                layout=session.weight_layout,
                bytes=session.weight_bytes,
            )
            self.draft.weights = _weights(answer)
            if self.draft.weights == "seeded":
                self.draft.notes.append(_seeded_note(answer))
            elif self.draft.weights == "copied" and answer.get("unexpected"):
                self.draft.notes.append(_surplus_note(answer))
            if session.plan is not None:
                await self.ask(runner, "load", "set_reduction", limits.run_s, plan=session.plan)

    @property
    def correct(self) -> bool:
        """Whether all cells so far passed, and there is at least one."""
        return bool(self.draft.cells) and all(cell.passed for cell in self.draft.cells)

    async def ask(
        self,
        runner: RunnerHandle,
        stage: Stage,
        command: str,
        timeout_s: float,
        *,
        fds: tuple[int, ...] = (),
        **message: Any,
    ) -> dict[str, Any]:
        """Send one command to the candidate's Runner.

        Raises:
            Stop: it failed, died or was stopped.
        """
        left_s = max(self.settings.limits.total_s - self._spent_s, 0.1)
        start = time.monotonic()
        answer = await runner.call(command, min(timeout_s, left_s), fds=fds, **message)
        self._spent_s += time.monotonic() - start
        if not answer["ok"]:
            if answer["error"]["kind"] == "timeout" and left_s < timeout_s:
                answer["error"]["message"] += f"; all its calls together may take {self.settings.limits.total_s:g} s"
            raise self._stop(stage, answer["error"], runner)
        return answer

    def _stop(self, stage: Stage, error: dict[str, Any], runner: RunnerHandle) -> Stop:
        kind = error["kind"]
        line = error["line"] if error["file"] in ("", "candidate.py") else None
        message = error["message"]
        if error["file"] and error["file"] != "candidate.py":
            message += f" (in {error['file'].removeprefix('src/')}:{error['line']})"
        if kind in UNJUDGED_KINDS and self.gym.device == "interpret":
            return Stop("error", Failure("host", kind, message, line))
        if kind in COMPILE_KINDS:
            stage = "compile"
        printed = runner.log_text().strip()
        if printed and kind in ("early-exit", "segfault", "signal"):
            message += f"; it printed: {printed[-300:]}"
        return Stop("failed", Failure(stage, kind, message, line))

    def _conclusion(self) -> tuple[Status, Failure | None]:
        if not self.correct:
            cell = next((cell for cell in self.draft.cells if not cell.passed), None)
            reason = f"{cell.name}: {cell.reason}" if cell else "nothing was compared"
            return "rejected", Failure("check", "wrong-output", reason)
        if self.fraud is not None:
            return "rejected", Failure("check", self.fraud.kind, f"dishonest: {self.fraud.proof}")
        return "accepted", None

    @property
    def fraud(self) -> Flag | None:
        """The first fraud flag, if any."""
        return next((flag for flag in self.draft.flags if flag.severity == "fraud"), None)

    def _honest(self) -> bool | None:
        if self.fraud is not None:
            return False
        judged = self.gym.judges_honesty and RUNGS.index(self.draft.reached or "parsed") >= RUNGS.index("correct")
        return True if judged else None

    def _finish(self, status: Status, failure: Failure | None) -> Verdict:
        draft = self.draft
        correct = self.correct and status in ("accepted", "rejected")
        honest = self._honest()
        if honest and correct:
            draft.reach("honest")
        if draft.speedups is not None:
            draft.reach("measured")
        return Verdict(
            status=status,
            evidence=draft.evidence,
            reached=draft.reached,
            correct=correct,
            honest=honest,
            task_id=task_id(self.task),
            candidate_id=candidate_id(self.candidate),
            flags=tuple(draft.flags),
            speedups=draft.speedups,
            headline=draft.headline,
            latency_ms=draft.latency_ms,
            baselines_ms=draft.baselines_ms,
            coverage=draft.coverage,
            coverage_estimate=draft.coverage_estimate,
            kernels=tuple(draft.kernels),
            cells=tuple(draft.cells),
            weights=draft.weights,
            error=failure,
            notes=tuple(draft.notes),
            environment={**environment(), **self.gym.device_facts},
            sandbox_level=self.settings.sandbox,
            timings_s=draft.timings_s,
        )


def is_gpu_memory(failure: Failure) -> bool:
    """Whether an evaluation ended for want of GPU memory, which may be others' doing."""
    return failure.kind == "out-of-memory" and "CUDA" in failure.message


def _weights(answer: dict[str, Any]) -> WeightsHow:
    ways: dict[str, WeightsHow] = {"copied": "copied", "converted": "converted", "seeded": "seeded"}
    how = ways.get(str(answer.get("weights")))
    if how is not None:
        return how
    raise HostError("a Runner gave no way of copying weights")


def _surplus_note(answer: dict[str, Any]) -> str:
    keys = answer["unexpected"] if isinstance(answer["unexpected"], list) else []
    named = ", ".join(str(key)[:80] for key in keys[:5])
    return f"state that the reference does not have stays as the constructor made it, whatever the weights: {named}"


def _seeded_note(answer: dict[str, Any]) -> str:
    parts = []
    for word in ("missing", "unexpected", "mismatched"):
        keys = answer.get(word)
        if isinstance(keys, list) and keys:
            parts.append(f"{word} {', '.join(str(key)[:80] for key in keys[:5])}")
    detail = "; ".join(parts) or "no common keys"
    return f"weights could not be copied ({detail}); both constructors got the same seed instead"
