"""The compiled reference, made ahead in a process of its own or late in the reference's, against scripted Runners."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from drk.gym.compile_baseline import CompileBaseline, compilers, start_compiler
from drk.gym.engine import Gym
from drk.gym.errors import HostError, ZygoteError
from drk.gym.gpu_lock import GpuLock, GpuTurns
from drk.gym.reference import task_files
from drk.gym.schema import Call, Task, TensorSpec
from drk.gym.settings import GymSettings


class Handle:
    """A Runner that answers ``load``, ``compile`` and ``warm``; ``gate`` and ``compiler`` hold the last two back."""

    def __init__(self, load: dict[str, Any] | None = None, warm: dict[str, Any] | None = None) -> None:
        self.answers = {
            "import_compiler": {"ok": True},
            "load": load or {"ok": True},
            "compile": {"ok": True, "compiled": True},
            "warm": warm or {"ok": True, "latency_s": 1e-4},
        }
        self.asked: list[str] = []
        self.gate, self.compiler = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.compiler.set()
        self.stopped_for: str | None = None
        self.closed = False

    async def call(self, command: str, timeout_s: float, **message: Any) -> dict[str, Any]:
        assert timeout_s > 0
        self.asked.append(command)
        if command == "compile":
            await self.compiler.wait()
        if command == "warm":
            assert message["form"] == "compile"
            await self.gate.wait()
        return self.answers[command]

    async def close(self) -> None:
        self.closed = True


def failed(kind: str) -> dict[str, Any]:
    return {"ok": False, "error": {"kind": kind, "message": f"{kind}!"}}


@pytest.fixture
def session() -> Any:
    return SimpleNamespace(
        handle=Handle(), lock=asyncio.Lock(), settings=GymSettings(), load_message=lambda: {"seed": 1}
    )


@pytest.fixture
def baseline(session: Any, tmp_path: Any) -> CompileBaseline:
    return CompileBaseline(session, GpuTurns(GpuLock("GPU-test", tmp_path)))


def giving(handle: Handle) -> Any:
    async def start() -> Handle:
        return handle

    return asyncio.create_task(start())


async def test_it_is_made_ahead_while_the_reference_answers_others(baseline: CompileBaseline, session: Any) -> None:
    own = Handle()
    own.gate.clear()
    baseline.begin(giving(own))
    async with session.lock:  # a trial of the reference
        while "warm" not in own.asked:
            await asyncio.sleep(0)
        own.gate.set()
        assert await baseline.ready() == (own, own.answers["warm"])
    assert session.handle.asked == []
    assert (await baseline.ready())[0] is own
    assert baseline.compiled_ahead
    await baseline.close()
    assert own.closed


async def test_without_a_start_the_references_own_runner_compiles_once(baseline: CompileBaseline, session: Any) -> None:
    found = await asyncio.gather(baseline.ready(), baseline.ready())
    assert [handle for handle, _ in found] == [session.handle, session.handle]
    assert session.handle.asked == ["compile", "warm"]


@pytest.mark.parametrize(
    ("own", "by_the_reference"),
    [
        (Handle(load=failed("exception")), True),
        (Handle(warm=failed("out-of-memory")), True),
        (Handle(warm=failed("exception")), False),
        (Handle(warm=failed("timeout")), False),
    ],
)
async def test_what_is_the_hosts_fault_is_tried_in_the_references_runner(
    baseline: CompileBaseline, session: Any, own: Handle, by_the_reference: bool
) -> None:
    baseline.begin(giving(own))
    handle, answer = await baseline.ready()
    assert (handle is session.handle) == answer["ok"] == by_the_reference
    await baseline.close()
    assert own.closed


async def test_a_process_that_cannot_be_had_or_died_is_done_without(baseline: CompileBaseline, session: Any) -> None:
    own = Handle()

    async def fails() -> Handle:
        raise ZygoteError("no more processes")

    baseline.begin(asyncio.create_task(fails()))  # type: ignore[arg-type]
    assert (await baseline.ready())[0] is session.handle
    other = CompileBaseline(session, baseline._turns)
    other.begin(giving(own))
    assert (await other.ready())[0] is own
    own.stopped_for = "out-of-memory"
    assert (await other.ready())[0] is session.handle


async def test_who_gives_up_waiting_does_not_stop_it(baseline: CompileBaseline) -> None:
    own = Handle()
    own.gate.clear()
    baseline.begin(giving(own))
    waits = asyncio.create_task(baseline.ready())
    while "warm" not in own.asked:
        await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    own.gate.set()
    assert (await baseline.ready())[0] is own


async def test_the_compiler_is_imported_before_anything_is_known_of_the_reference() -> None:
    handle, broken = Handle(), Handle()
    broken.answers["import_compiler"] = failed("exception")

    async def start(which: Handle) -> Any:
        return which

    assert await start_compiler(lambda: start(handle), 60.0) is handle
    assert handle.asked == ["import_compiler"]
    with pytest.raises(HostError, match="cannot be imported"):
        await start_compiler(lambda: start(broken), 60.0)
    assert broken.closed and not handle.closed


async def test_closing_ends_a_compilation_under_way(baseline: CompileBaseline) -> None:
    own = Handle()
    own.gate.clear()
    baseline.begin(giving(own))
    while "warm" not in own.asked:
        await asyncio.sleep(0)
    await baseline.close()
    assert own.closed


async def test_nobody_is_timed_while_it_warms_up_but_while_it_compiles(session: Any, tmp_path: Any) -> None:
    turns, own = GpuTurns(GpuLock("GPU-test", tmp_path)), Handle()
    own.gate.clear()
    own.compiler.clear()
    baseline = CompileBaseline(session, turns)
    baseline.begin(giving(own))

    async def timed() -> bool:
        async with turns.alone():
            return own.gate.is_set()

    while "compile" not in own.asked:
        await asyncio.sleep(0)
    assert not await asyncio.wait_for(timed(), 60.0)
    own.compiler.set()
    while "warm" not in own.asked:
        await asyncio.sleep(0)
    timer = asyncio.create_task(timed())
    await asyncio.sleep(0.01)
    assert not timer.done()
    own.gate.set()
    assert await timer
    await baseline.close()


async def test_no_more_are_compiled_at_once_than_leave_cores_free(session: Any, tmp_path: Any) -> None:
    assert [compilers(cores) for cores in (1, 4, 6, 16)] == [1, 1, 2, 12]
    turns, compiling = GpuTurns(GpuLock("GPU-test", tmp_path)), asyncio.Semaphore(1)
    handles = [Handle(), Handle()]
    for handle in handles:
        handle.compiler.clear()
    baselines = [CompileBaseline(session, turns, compiling) for _ in handles]
    for baseline, handle in zip(baselines, handles, strict=True):
        baseline.begin(giving(handle))
    while not all(handle.asked for handle in handles):
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum("compile" in handle.asked for handle in handles) == 1
    for handle in handles:
        handle.compiler.set()
    assert [(await baseline.ready())[0] for baseline in baselines] == handles
    for baseline in baselines:
        await baseline.close()


async def test_what_fails_to_compile_ahead_is_told_by_the_warm_up(baseline: CompileBaseline) -> None:
    own = Handle(warm=failed("exception"))
    own.answers["compile"] = failed("exception")
    baseline.begin(giving(own))
    assert await baseline.ready() == (own, own.answers["warm"])
    assert own.asked == ["load", "compile", "warm"]
    await baseline.close()


@pytest.mark.long
async def test_a_real_runner_imports_the_compiler_and_then_loads_the_reference() -> None:
    source = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    task = Task("double", {"model.py": source}, "model.py", "Model", inputs=Call((TensorSpec((4, 4)),)))
    async with Gym(GymSettings(device="interpret", offline_compile=False, seeds=1)) as gym:
        session = await gym.reference(task)
        handle = await start_compiler(partial(gym.start_runner, "reference", task_files(task), threads=2), 120.0)
        try:
            loaded = await handle.call("load", 60.0, **session.load_message())
            assert loaded["ok"], loaded
            assert loaded["kind"] == "Model"
            compiled = await handle.call("compile", 120.0, key=1)
            assert compiled == {"ok": True, "compiled": False}  # the interpreter's remapping of devices keeps it away
        finally:
            await handle.close()
