"""Run one job on a worker's Gym, and say how it ended. Never raises for what a job holds.

The Gym retries nothing; here a host's fault is tried again, and a run beyond its deadline is ended, with the Runners
that it holds. A deadline that a candidate overran is a verdict (``failed``, it did not finish); one that a reference
overran is a fault of the task.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from drk.gym.draft import UNJUDGED_KINDS
from drk.gym.engine import Gym
from drk.gym.errors import BundleError, HostError, TaskError, ZygoteError
from drk.gym.graph import graph_from_json
from drk.gym.graph_cost import graph_cost
from drk.gym.schema import Candidate, Failure, Task, Verdict
from drk.gym.serve.jobs import Fault, Outcome
from drk.gym.settings import Timing
from drk.gym.wire import candidate_from_json, candidate_id, task_from_json, task_id, verdict_to_json
from drk.gym.zygote_client import ZygoteClient

RETRY_PAUSE_S = 0.5


class Bench:
    """A Gym that runs jobs. ``retries``: how often a host's fault is tried again."""

    def __init__(self, gym: Gym, retries: int = 2) -> None:
        self._gym = gym
        self._retries = retries
        timing = gym.settings.timing
        self._gyms = {
            "1": gym,
            "0": _with_timing(gym, replace(timing, enabled=False)),
            "eager": _with_timing(gym, replace(timing, compile_baseline=False)),
        }

    async def run(self, fields: Mapping[str, str], task_text: str) -> Outcome:
        """Do what the job says, within its deadline."""
        start = time.monotonic()
        try:
            task = task_from_json(json.loads(task_text))
            text = fields.get("candidate") or ""
            candidate = candidate_from_json(json.loads(text)) if text else None
            outcome = await self._within(float(fields["run_s"]), self._action(fields, task, candidate), task, candidate)
        except TaskError as error:
            fault = Fault(error.kind, error.message, False, error.help, error.file, error.line)
            outcome = Outcome("failed", fault=fault)
        except BundleError as error:
            outcome = Outcome("failed", fault=Fault("bundle", error.message, False, error.help))
        except HostError as error:
            outcome = Outcome("failed", fault=Fault("host", error.message, True, error.help))
        return replace(outcome, run_s=time.monotonic() - start)

    async def _within(
        self, limit_s: float, action: Callable[[], Awaitable[Outcome]], task: Task, candidate: Candidate | None
    ) -> Outcome:
        try:
            async with asyncio.timeout(limit_s):
                return await self._insist(action)
        except TimeoutError:
            message = f"not finished after {limit_s:g} s"
            if candidate is None:
                return Outcome("failed", fault=Fault("run-deadline", message, infrastructure=False))
            verdict = Verdict(
                "failed",
                "interpreter" if self._gym.device == "interpret" else "gpu",
                None,
                False,
                None,
                task_id=task_id(task),
                candidate_id=candidate_id(candidate),
                error=Failure("run", "timeout", message),
                environment=dict(self._gym.device_facts),
                sandbox_level=self._gym.settings.sandbox,
            )
            return Outcome("done", verdict=verdict_to_json(verdict))

    async def _insist(self, action: Callable[[], Awaitable[Outcome]]) -> Outcome:
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                outcome = await self._unless_zygote_dies(action)
            except HostError:
                if last:
                    raise
            else:
                if last or not _host_failed(outcome.verdict):
                    return outcome
            await asyncio.sleep(RETRY_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _unless_zygote_dies(self, action: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Do it; a bad end is the host's fault when a zygote died meanwhile, since its Runners die with it.

        Raises:
            ZygoteError: that is what happened.
        """
        before = list(self._gym._zygotes.values())
        died = ZygoteError("a zygote died, and its Runners with it")
        try:
            outcome = await action()
        except TaskError:
            if any(map(_ended, before)):
                raise died from None
            raise
        bad = outcome.verdict is not None and outcome.verdict["status"] != "accepted"
        if bad and any(map(_ended, before)):
            raise died
        return outcome

    def _action(
        self, fields: Mapping[str, str], task: Task, candidate: Candidate | None
    ) -> Callable[[], Awaitable[Outcome]]:
        gym = self._gyms.get(fields.get("timing", "1"), self._gym)

        async def evaluation() -> Outcome:
            if candidate is None:
                raise BundleError("an evaluation needs a candidate")
            return Outcome("done", verdict=verdict_to_json(await gym.evaluate(task, candidate)))

        async def inspection() -> Outcome:
            return Outcome("done", report=asdict(await gym.inspect(task)))

        async def capture() -> Outcome:
            return Outcome("done", report=await gym.capture(task))

        async def parts() -> Outcome:
            return Outcome("done", report={"parts": await gym.parts(task)})

        async def kernels() -> Outcome:
            return Outcome("done", report=asdict(await gym.kernels(task)))

        async def profile() -> Outcome:
            return Outcome("done", report=await self._profile(task))

        looks = {"inspection": inspection, "capture": capture, "parts": parts, "kernels": kernels, "profile": profile}
        return {"evaluation": evaluation, **looks}[fields.get("kind", "evaluation")]

    async def _profile(self, task: Task) -> dict[str, Any]:
        """Return what is known of the reference without timing it: shapes, graph, estimated traffic and FLOPs."""
        inspection = await self._gym.inspect(task)
        graph = await self._gym.capture(task)
        cost = graph_cost(graph_from_json(graph))
        return {
            "inspection": asdict(inspection),
            "graph": graph,
            "estimate": {"size_bytes": cost.size_bytes, "flops": cost.flops},
            "measured": None,
        }


def _with_timing(gym: Gym, timing: Timing) -> Gym:
    """Return the same Gym (zygotes, Reference Runners, slots, turns at the GPU) with another stop-watch.

    Timing is a setting of a whole Gym. ``gym`` must have been entered, so that its device is known.
    """
    found = copy.copy(gym)
    found.settings = replace(gym.settings, timing=timing)
    if gym.gpu is not None:
        found._measurement = copy.copy(gym._measuring())
        found._measurement.timing = timing
    return found


def _ended(zygote: asyncio.Task[ZygoteClient]) -> bool:
    return zygote.done() and not zygote.cancelled() and (zygote.exception() is not None or not zygote.result().alive)


def _host_failed(verdict: Mapping[str, Any] | None) -> bool:
    """Whether trying again may help: the host failed, rather than something that no run on this device can judge."""
    if verdict is None or verdict["status"] != "error":
        return False
    return (verdict.get("error") or {}).get("kind") not in UNJUDGED_KINDS
