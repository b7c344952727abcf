"""The gym's face: :class:`Gym` holds zygotes and Reference Runners; :func:`evaluate` judges one candidate.

::

    async with Gym(GymSettings(device="auto")) as gym:
        verdict = await gym.evaluate(task, candidate)

Everything is started when it is first needed and ends with the ``async with`` block. Evaluations may run concurrently
up to ``settings.parallel``; what is timed is timed alone.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from drk.gym.compile_baseline import start_compiler
from drk.gym.devices import Gpu, device_facts, list_gpus, resolve_device
from drk.gym.errors import DeviceError, TaskError
from drk.gym.inspection import Inspection
from drk.gym.judge import Evaluation
from drk.gym.kernels import ReferenceProfile, reference_profile
from drk.gym.measure import Finish, Measurement
from drk.gym.offline_compile import OfflineCompile
from drk.gym.profiling import PROFILE_RUNS, measure_interpreted, profile_kernels
from drk.gym.reference import ReferenceSession, task_files, usable
from drk.gym.runner_handle import RunnerHandle, close_started
from drk.gym.schema import Candidate, Task, Verdict
from drk.gym.settings import LEAST_SESSIONS, GymSettings
from drk.gym.wire import check_task, task_id
from drk.gym.zygote_client import LaunchedZygote, ZygoteClient, zygote_modes

CONTEXTS_AT_ONCE = 3
MEMORY_SHARES = 3
"""What an evaluation may need of an equal share of the GPU's memory before it has to wait for others like it."""
UNKNOWN_MEMORY_BYTES = 16 * 2**30


class Gym:
    """A place where candidates are judged. Use it as an async context manager.

    ``launched`` are zygotes that were started ahead (:func:`drk.gym.zygote_client.launch`); the gym ends all of them.
    """

    def __init__(self, settings: GymSettings | None = None, launched: Sequence[LaunchedZygote] = ()) -> None:
        self.settings = settings or GymSettings()
        self._launched = {zygote.mode: zygote for zygote in launched if zygote.level == self.settings.sandbox}
        self.device = "interpret"
        self.gpu: Gpu | None = None
        self.device_facts: dict[str, Any] = {}
        self._zygotes: dict[str, asyncio.Task[ZygoteClient]] = {}
        self._retired: list[asyncio.Task[ZygoteClient]] = []
        self._sessions: OrderedDict[str, asyncio.Task[ReferenceSession]] = OrderedDict()
        parallel = max(self.settings.parallel, 1)
        self._batch = max(parallel // 2, 1)
        self._slots = asyncio.Semaphore(parallel)
        self._in_flight = asyncio.Semaphore(parallel + self._batch if parallel > 1 else 1)
        self._measurement: Measurement | None = None
        self._room = asyncio.Lock()
        self._context_turns = asyncio.Semaphore(CONTEXTS_AT_ONCE)

    async def __aenter__(self) -> Self:
        """Resolve the device and begin to warm the zygotes.

        Raises:
            DeviceError: the device that was named is not there.
        """
        gpus = await asyncio.to_thread(list_gpus) if self.settings.device != "interpret" else []
        self.device, self.gpu = resolve_device(self.settings.device, gpus)
        self.device_facts = {"device": "interpret", "gpu": None, "target": self.settings.target}
        if self.gpu is not None:
            self.device_facts = {"device": self.device, "gpu": self.gpu.name, "gpu_uuid": self.gpu.uuid}
        for mode in self._modes():
            self._zygote(mode)
        return self

    def _modes(self) -> list[str]:
        return zygote_modes(self.device, offline_compile=self.settings.offline_compile)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process that was started."""
        for session in self._sessions.values():
            await close_started(session)
        for zygote in (*self._zygotes.values(), *self._retired):
            await close_started(zygote)
        for launched in self._launched.values():
            launched.close()
        self._retired.clear()
        self._sessions.clear()
        self._zygotes.clear()

    # --- processes ---------------------------------------------------------------------------------------

    @property
    def judges_honesty(self) -> bool:
        """Whether all honesty checks run here: timing, caches and streams only show on a GPU."""
        return self.gpu is not None

    @property
    def cost_target(self) -> str:
        """The device whose data sheet estimates use: the GPU's own where it is known, else the compile target."""
        if self.gpu is not None:
            try:
                return device_facts(self.gpu.name).key
            except DeviceError:
                return self.settings.target
        return self.settings.target

    def _zygote(self, mode: str) -> asyncio.Task[ZygoteClient]:
        task = self._zygotes.get(mode)
        if task is None or (task.done() and (task.cancelled() or task.exception() or not task.result().alive)):
            if task is not None:
                self._retired.append(task)
            launched = self._launched.pop(mode, None)
            task = self._zygotes[mode] = asyncio.create_task(ZygoteClient.start(mode, self.settings.sandbox, launched))
        return task

    async def start_runner(
        self, role: str, files: dict[str, bytes], *, mode: str | None = None, threads: int = 1
    ) -> RunnerHandle:
        """Fork a Runner in its own scratch folder.

        Raises:
            ZygoteError: no Runner could be started.
        """
        zygote = await asyncio.shield(self._zygote(mode or self._modes()[0]))
        uuid = self.gpu.uuid if self.gpu is not None else ""
        return await RunnerHandle.start(zygote, self.settings, role, files, gpu=uuid, threads=threads)

    async def reference(self, task: Task) -> ReferenceSession:
        """Return the Reference Runner's session of ``task``, started at first use and kept while it is used.

        Raises:
            TaskError: the reference cannot be loaded.
        """
        identifier = task_id(task)
        started = self._sessions.get(identifier)
        if started is not None and started.done() and not usable(started):
            self._sessions.pop(identifier)
            await close_started(started)
            started = None
        if started is None:
            started = self._sessions[identifier] = asyncio.create_task(self._start_session(task))
            await self._evict(keep=identifier)
        self._sessions.move_to_end(identifier)
        return await asyncio.shield(started)

    async def _evict(self, keep: str) -> None:
        """Close sessions that nobody uses, those of longest ago first, down to what is kept; those in use stay."""
        idle = [
            name
            for name, task in self._sessions.items()
            if name != keep and task.done() and (not usable(task) or task.result().users == 0)
        ]
        # Taken out at once: others may look for room while these are closed.
        for task in [self._sessions.pop(name) for name in idle[: max(len(self._sessions) - self.sessions_at_once, 0)]]:
            await close_started(task)

    @asynccontextmanager
    async def using(self, task: Task) -> AsyncIterator[ReferenceSession]:
        """Hold a task's session, so that it is not closed to make room meanwhile.

        Raises:
            TaskError: the reference cannot be loaded.
        """
        session = await self.reference(task)
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1

    async def _start_session(self, task: Task) -> ReferenceSession:
        check_task(task)
        try:
            return await self._prepared(task)
        except TaskError as error:
            if self.gpu is None or error.kind != "reference-out-of-memory":
                raise
        async with self._room:  # perhaps others had the memory
            return await self._prepared(task)

    async def _prepared(self, task: Task) -> ReferenceSession:
        handle = await self.start_runner("reference", task_files(task), threads=2)
        runs_on, compares_on = ("cpu", "cpu") if self.device == "interpret" else ("cuda:0", self.device)
        session = ReferenceSession(task, self.settings, handle, runs_on, compares_on)
        try:
            await session.prepare()
            async with self.sharing():  # its trials would disturb who is being timed
                await session.settle_keys()
        except BaseException:
            await session.close()
            raise
        return session

    @asynccontextmanager
    async def _looking_at(self, task: Task) -> AsyncIterator[ReferenceSession]:
        """Hold a session for who is about to have the task optimised: its compiled baseline is begun meanwhile.

        That takes a second reference, which must not take the memory that others count on.
        """
        timing, started = self.settings.timing, None
        compiles = self.gpu is not None and timing.enabled and timing.compile_baseline
        if compiles and task_id(task) not in self._sessions:
            start = partial(self.start_runner, "reference", task_files(task), threads=2)
            started = asyncio.create_task(start_compiler(start, self.settings.limits.load_s))
        try:
            async with self.using(task) as session:
                if started is not None and session.peak_bytes <= self._share_bytes:
                    self._measuring().baseline(session).begin(started)
                    started = None
                yield session
        finally:
            if started is not None:
                await close_started(started)

    def offline_compile(self, evaluation: Evaluation, session: ReferenceSession) -> OfflineCompile:
        """Return the offline compilation of a candidate, begun where there is no GPU."""
        offline = OfflineCompile(evaluation, session)
        if self.device == "interpret" and self.settings.offline_compile:
            offline.begin()
        return offline

    # --- what callers want -------------------------------------------------------------------------------

    async def evaluate(self, task: Task, candidate: Candidate) -> Verdict:
        """Judge one candidate. Never raises for what the candidate does.

        Raises:
            TaskError: the reference itself cannot be judged.
            HostError: the host failed.
        """
        # Who waits to be timed leaves the slot to the next, whose process and context can be made meanwhile.
        async with self._in_flight:
            await self._slots.acquire()
            with ExitStack() as slot:
                slot.callback(self._slots.release)
                return await Evaluation(self, task, candidate, lambda: slot.pop_all().close()).verdict()

    async def profile(self, evaluation: Evaluation, runner: RunnerHandle) -> None:
        """Add kernels and coverage to a correct candidate's verdict."""
        await (measure_interpreted if self.gpu is None else profile_kernels)(evaluation, runner)

    async def measure(
        self, evaluation: Evaluation, runner: RunnerHandle, session: ReferenceSession, finish: Finish
    ) -> bool:
        """Add speed to a correct candidate's verdict, then ``finish``; say whether that could be done here."""
        if self.gpu is None or not self.settings.timing.enabled:
            return False
        evaluation.leave_slot()
        await self._measuring().measure(evaluation, runner, session, finish)
        return True

    def _measuring(self) -> Measurement:
        if self._measurement is None:
            self._measurement = Measurement(
                self.gpu.uuid if self.gpu is not None else "none", self.settings.timing, self._batch
            )
        return self._measurement

    @asynccontextmanager
    async def sharing(self) -> AsyncIterator[None]:
        """Hold the GPU's lock together with others, so that nobody is timed meanwhile; nothing without a GPU."""
        if self.gpu is None:
            yield
            return
        async with self._measuring().turns.sharing():
            yield

    @asynccontextmanager
    async def making_context(self) -> AsyncIterator[None]:
        """Hold a turn at making a CUDA context; nothing without a GPU.

        The driver makes them one after the other and lets all that wait finish together: then everybody compiles at
        the same time, and nobody makes a context meanwhile. In turns, the first goes on while the next waits.
        """
        if self.gpu is None:
            yield
            return
        async with self._context_turns:
            yield

    @asynccontextmanager
    async def room(self, need_bytes: int) -> AsyncIterator[None]:
        """Have the GPU's memory to oneself among those who need much of it: several of them would not fit."""
        if self.gpu is None or need_bytes <= self._share_bytes:
            yield
            return
        async with self._room:
            yield

    @property
    def _share_bytes(self) -> int:
        """What may be taken of the GPU's memory without asking for room."""
        return self.memory_bytes // (MEMORY_SHARES * max(self.settings.parallel, 1))

    @property
    def at_once(self) -> int:
        """How many evaluations are worth having in flight: on a CPU each of them keeps two cores busy."""
        parallel = max(self.settings.parallel, 1)
        return parallel if self.gpu is not None else max(1, min(parallel, (os.cpu_count() or 1) // 2))

    @property
    def sessions_at_once(self) -> int:
        """How many references are kept: as many tasks can be under way without one losing its processes."""
        return max(LEAST_SESSIONS, self.settings.parallel)

    @property
    def memory_bytes(self) -> int:
        """The GPU's memory by its data sheet; a small one's where the GPU is not known."""
        try:
            return device_facts(self.gpu.name if self.gpu is not None else "").memory_bytes
        except DeviceError:
            return UNKNOWN_MEMORY_BYTES

    async def inspect(self, task: Task) -> Inspection:
        """Load and run the reference once, in its own dtype and in float64.

        Raises:
            TaskError: it cannot be judged; the message, file, line and help are for a person.
        """
        async with self._looking_at(task) as session:
            trial = await session.trial(0)
        return Inspection(
            device=self.device,
            inputs=trial.inputs,
            state=session.weight_layout,
            output=trial.description,
            reduced=session.plan or {},
            facts=dict(self.device_facts),
        )

    async def capture(self, task: Task) -> dict[str, Any]:
        """Return the ATen graph of one call of the reference, as JSON for :class:`drk.gym.graph.Graph`.

        Raises:
            TaskError: the reference cannot be loaded or captured.
        """
        async with self._looking_at(task) as session:
            answer = await session.ask("capture", self.settings.limits.compile_s, key=session.keys[0])
        graph = answer.get("graph")
        if not isinstance(graph, dict):
            raise TaskError("the reference's graph could not be captured", kind="capture")
        return graph

    async def parts(self, task: Task) -> list[dict[str, Any]]:
        """Return how the parts of the reference are called in one call of it: rows of :mod:`drk.gym.runner.parts`.

        Raises:
            TaskError: the reference cannot be loaded or run at full size.
        """
        async with self.using(task) as session, self.sharing():
            answer = await session.ask("parts", self.settings.limits.compile_s, key=session.keys[0])
        return [dict(row) for row in answer.get("parts") or []]

    async def kernels(self, task: Task) -> ReferenceProfile:
        """Return which kernels a forward call of the reference runs, and for how long; nothing without a GPU.

        It is run a few times on fresh inputs with the GPU to itself, under Proton.

        Raises:
            TaskError: the reference cannot be loaded or run, or the profiler failed.
        """
        if self.gpu is None:
            return ReferenceProfile()
        keys = [secrets.randbits(62) for _ in range(PROFILE_RUNS)]
        async with self.using(task) as session, self.room(session.peak_bytes), self._measuring().turns.alone():
            answer = await session.ask("profile", self.settings.limits.compile_s, keys=keys)
        return reference_profile({"gpu": self.gpu.name, "kernels": answer.get("kernels")})


async def evaluate_async(task: Task, candidate: Candidate, settings: GymSettings | None = None) -> Verdict:
    """Judge one candidate in a gym of its own. See :meth:`Gym.evaluate`."""
    async with Gym(settings) as gym:
        return await gym.evaluate(task, candidate)


def evaluate(task: Task, candidate: Candidate, settings: GymSettings | None = None) -> Verdict:
    """Judge one candidate; the blocking form of :func:`evaluate_async`."""
    return asyncio.run(evaluate_async(task, candidate, settings))
