"""The Judge's handle on a Runner: what its caller's cancellation does. How Runners end: ``test_engine.py``."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from drk.gym import Candidate, Gym, GymSettings
from drk.gym.runner_handle import RunnerHandle
from drk.gym.sandbox import descendants
from drk.gym.wire import task_from_json

REFERENCE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
TASK = task_from_json(
    {
        "name": "relu",
        "files": {"model.py": REFERENCE},
        "entry": "model.py",
        "target": "Model",
        "inputs": {"kind": "call", "args": [{"kind": "tensor", "shape": [8, 16]}]},
    }
)


class OneAnswer:
    """A channel whose answer the test gives."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def receive(self) -> dict[str, Any]:
        return await self.answer


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(tmp_path: Path, turns: int) -> None:
    handle = RunnerHandle(GymSettings(), "candidate", tmp_path)
    channel = OneAnswer()
    handle._channel = channel  # type: ignore[assignment]
    asking = asyncio.create_task(handle._answer(60.0))
    await asyncio.sleep(0)
    channel.answer.set_result({"ok": True})
    for _ in range(turns):
        await asyncio.sleep(0)
    in_time = asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled() is in_time
    handle.arena.close()


@pytest.mark.slow
async def test_evaluations_cancelled_at_any_moment_end_and_leave_no_process() -> None:
    settings = GymSettings(device="interpret", seeds=1, offline_compile=False, parallel=4)
    source = REFERENCE.replace("Model", "ModelNew").replace(
        "torch.relu(x)", "(torch.relu(x), __import__('time').sleep(.1))[0]"
    )
    draw = random.Random(7)
    async with Gym(settings) as gym:
        assert (await gym.evaluate(TASK, Candidate(source))).status == "accepted"
        idle = _runners(gym)
        for round_ in range(4):
            work = [asyncio.create_task(gym.evaluate(TASK, Candidate(source + f"# {round_} {n}"))) for n in range(4)]
            for task in work:
                await asyncio.sleep(draw.uniform(0.0, 0.15))
                task.cancel()
            _, pending = await asyncio.wait(work, timeout=60)
            assert not pending, "a cancellation was swallowed"
        async with asyncio.timeout(60):
            while _runners(gym) > idle:
                await asyncio.sleep(0.05)
        assert (await gym.evaluate(TASK, Candidate(source))).status == "accepted"


def _runners(gym: Gym) -> int:
    return sum(len(descendants(zygote.result().process.pid)) for zygote in gym._zygotes.values())
