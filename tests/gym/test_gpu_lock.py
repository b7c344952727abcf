"""The GPU's lock across processes, and turns inside one gym."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from drk.gym.gpu_lock import GpuLock, GpuTurns

HOLDER = """
import asyncio, sys
from pathlib import Path
from drk.gym.gpu_lock import GpuLock
async def main():
    lock = GpuLock("GPU-x/../y", Path(sys.argv[1]))
    async with getattr(lock, sys.argv[2])():
        print("held", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


def hold(folder: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def release(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def can_take(folder: Path, how: str) -> bool:
    lock = GpuLock("GPU-x/../y", folder)
    try:
        async with asyncio.timeout(0.3), getattr(lock, how)():
            return True
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("held", "wanted", "works"),
    [
        ("shared", "shared", True),
        ("shared", "exclusive", False),
        ("exclusive", "shared", False),
        ("exclusive", "exclusive", False),
    ],
)
async def test_across_processes(tmp_path: Path, held: str, wanted: str, works: bool) -> None:
    holder = hold(tmp_path, held)
    try:
        assert await can_take(tmp_path, wanted) is works
    finally:
        release(holder)
    assert await can_take(tmp_path, wanted), "a dead holder's lock is free"
    assert all("/" not in path.name and path.parent == tmp_path for path in tmp_path.iterdir())


async def test_timers_are_alone_and_go_in_a_row(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-1", tmp_path))
    log: list[str] = []
    active = {"shared": 0, "timing": 0}

    async def evaluation(name: int) -> None:
        async with turns.sharing():
            active["shared"] += 1
            assert not active["timing"]
            await asyncio.sleep(0.01 * (name % 3))
            active["shared"] -= 1
        log.append("ready")
        async with turns.alone():
            active["timing"] += 1
            assert active == {"shared": 0, "timing": 1}
            log.append("timed")
            await asyncio.sleep(0.001)
            active["timing"] -= 1

    await asyncio.wait_for(asyncio.gather(*(evaluation(index) for index in range(12))), 20)
    assert log.count("timed") == 12
    first = log.index("timed")
    assert log[:first].count("ready") > 1, "timing waits until nobody shares"


async def test_enough_waiting_timers_keep_newcomers_out(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-1", tmp_path), batch=2)
    log: list[str] = []

    async def timer(name: str) -> None:
        async with turns.alone():
            log.append(name)

    async def newcomer() -> None:
        async with turns.sharing():
            log.append("newcomer")

    async with turns.sharing():
        first = asyncio.create_task(timer("first"))
        await asyncio.sleep(0.01)
        async with asyncio.timeout(20), turns.sharing():
            log.append("beside one")
        others = [asyncio.create_task(timer("second")), asyncio.create_task(newcomer())]
        await asyncio.sleep(0.01)
        assert (turns.waiting, log) == (2, ["beside one"])
    await asyncio.wait_for(asyncio.gather(first, *others), 20)
    assert log == ["beside one", "first", "second", "newcomer"]


async def test_a_failing_holder_lets_go(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-1", tmp_path))
    for turn in (turns.sharing, turns.alone):
        with pytest.raises(RuntimeError):
            async with turn():
                raise RuntimeError
    async with asyncio.timeout(2):
        async with turns.alone():
            pass
        async with turns.sharing():
            pass


async def test_a_cancelled_waiter_lets_others_go(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-1", tmp_path))
    async with turns.sharing():
        waiter = asyncio.create_task(turns.alone().__aenter__())
        await asyncio.sleep(0.01)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
    async with asyncio.timeout(2), turns.sharing():
        pass


async def test_a_timer_cancelled_while_another_process_holds_the_gpu_lets_others_go(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-x/../y", tmp_path))
    holder = hold(tmp_path, "exclusive")
    waiter = asyncio.create_task(turns.alone().__aenter__())
    await asyncio.sleep(0.2)
    waiter.cancel()
    await asyncio.wait([waiter])
    release(holder)
    async with asyncio.timeout(30), turns.sharing():
        pass


async def test_newcomers_do_not_keep_another_process_waiting(tmp_path: Path) -> None:
    turns = GpuTurns(GpuLock("GPU-x/../y", tmp_path))
    order: list[str] = []
    command = [sys.executable, "-c", HOLDER, str(tmp_path), "exclusive"]

    async def newcomer() -> None:
        async with turns.sharing():
            order.append("newcomer")

    async with turns.sharing():
        other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        async with asyncio.timeout(60):
            while not turns.lock.contended():
                await asyncio.sleep(0.01)
        late = asyncio.create_task(newcomer())
        await asyncio.sleep(0.1)
        assert order == []
    assert other.stdout is not None
    assert await asyncio.to_thread(other.stdout.readline) == "held\n"
    assert order == []
    release(other)
    async with asyncio.timeout(30):
        await late
    assert order == ["newcomer"]
