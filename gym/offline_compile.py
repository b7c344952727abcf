"""Real compilation of a candidate's launches without a GPU, beside the interpreter's run (DESIGN 4.8).

A Runner of the ``compile`` zygote loads the same candidate, runs its forward once on the same (reduced) inputs under
the stub driver, and so compiles every launch to machine code for the target: registers, spills, shared memory.
Launches do nothing there, so a host exception after the first launch says nothing about the candidate and is ignored.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from drk.gym.draft import COMPILE_KINDS, Stop
from drk.gym.errors import GymError
from drk.gym.kernels import kernel_rows
from drk.gym.reference import ReferenceSession, candidate_files, task_meta
from drk.gym.schema import Failure

if TYPE_CHECKING:
    from drk.gym.judge import Evaluation
    from drk.gym.runner_handle import RunnerHandle


class OfflineCompile:
    """One background compilation. Always :meth:`close` it."""

    def __init__(self, evaluation: Evaluation, session: ReferenceSession) -> None:
        self.evaluation = evaluation
        self.session = session
        self._task: asyncio.Task[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Start in the background."""
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> dict[str, Any]:
        evaluation, session = self.evaluation, self.session
        limits = evaluation.settings.limits
        files = candidate_files(evaluation.task, evaluation.candidate)
        with evaluation.draft.stage("compile"):
            runner = await evaluation.gym.start_runner("candidate", files, mode="compile")
            try:
                return await self._compile(runner, session, limits.compile_s)
            finally:
                await runner.close()

    async def _compile(self, runner: RunnerHandle, session: ReferenceSession, timeout_s: float) -> dict[str, Any]:
        answer = await runner.call(
            "load",
            timeout_s,
            meta=task_meta(self.evaluation.task),
            device="cpu",
            seed=session.seed,
            precision=self.evaluation.task.precision,
        )
        if not answer["ok"]:
            return answer
        trains = self.evaluation.task.grad
        await runner.call("set_reduction", timeout_s, plan=session.plan)
        ran = await runner.call("run", timeout_s, key=session.keys[0], grad=False, both_passes=trains)
        rows = await runner.call("kernels", timeout_s)
        return {**ran, "kernels": rows.get("kernels")}

    async def finish(self) -> None:
        """Wait, and add what was learnt to the verdict.

        Raises:
            Stop: a kernel does not compile for the target, or needs more than the target has.
        """
        if self._task is None:
            return
        try:
            answer = await self._task
        except GymError as error:
            self.evaluation.draft.notes.append(f"offline compilation was not possible: {error.message}")
            return
        draft = self.evaluation.draft
        fault = answer.get("error")
        if fault is not None and fault["kind"] in COMPILE_KINDS:
            line = fault["line"] if fault["file"] in ("", "candidate.py") else None
            raise Stop("failed", Failure("compile", fault["kind"], fault["message"], line))
        rows = kernel_rows(answer.get("kernels"))
        if rows:
            draft.reach("compiled")
            draft.kernels = rows
        elif fault is not None:
            draft.notes.append(f"offline compilation did not reach a kernel: {fault['message'][:200]}")

    async def close(self) -> None:
        """Stop the compilation if it still runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
