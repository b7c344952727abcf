"""The whole way from candidate to verdict, with real zygotes, real sandboxes and the interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

import pytest
from crash_corpus import CASES, RIGHT, forward

from drk.gym.devices import Gpu, resolve_device
from drk.gym.engine import Gym
from drk.gym.errors import DeviceError, HostError, TaskError
from drk.gym.schema import Call, Candidate, Task, TensorSpec
from drk.gym.settings import GymSettings, Limits
from drk.gym.wire import verdict_from_json, verdict_to_json
from drk.gym.zygote_client import launch

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2
"""
LIMITS = Limits(load_s=5, compile_s=5, run_s=5, memory_bytes=2**30, scratch_bytes=2**28)
SETTINGS = GymSettings(device="interpret", seeds=2, limits=LIMITS, offline_compile=False)


def task(source: str = REFERENCE, **fields: object) -> Task:
    defaults: dict[str, object] = {"inputs": Call((TensorSpec((8, 33)),))}
    return Task("t", {"model.py": source}, "model.py", "Model", **{**defaults, **fields})


@pytest.fixture(scope="module")
def loop_gym() -> object:
    loop = asyncio.new_event_loop()
    gym = Gym(SETTINGS)
    loop.run_until_complete(gym.__aenter__())
    yield loop, gym
    loop.run_until_complete(gym.__aexit__(None, None, None))
    loop.close()


@pytest.mark.parametrize(("name", "source", "status", "stage", "kind"), CASES, ids=[case[0] for case in CASES])
def test_every_ending_is_classified(loop_gym, name, source, status, stage, kind) -> None:
    loop, gym = loop_gym
    verdict = loop.run_until_complete(gym.evaluate(task(), Candidate(source)))
    found = (verdict.status, verdict.error.stage if verdict.error else "", verdict.error.kind if verdict.error else "")
    assert found == (status, stage, kind), verdict.error
    assert verdict_from_json(verdict_to_json(verdict)) == verdict
    assert verdict.accepted == (status == "accepted")
    if verdict.error:
        assert "Traceback" not in verdict.error.message
        assert "/drk-" not in verdict.error.message


def test_a_killed_zygote_is_the_hosts_fault_and_is_replaced() -> None:
    async def scenario() -> None:
        async with Gym(SETTINGS) as gym:
            assert (await gym.evaluate(task(), Candidate(RIGHT))).accepted
            slow = Candidate(forward("import time\ntime.sleep(2)\nreturn torch.relu(x) * 2"))
            running = asyncio.create_task(gym.evaluate(task(), slow))
            await asyncio.sleep(1.0)
            zygote = await gym._zygote("interpret")
            os.kill(zygote.process.pid, signal.SIGKILL)
            with pytest.raises(HostError):
                await running
            assert (await gym.evaluate(task(), Candidate(RIGHT))).accepted

    asyncio.run(scenario())


def test_all_calls_together_have_a_limit() -> None:
    async def scenario() -> None:
        settings = replace(SETTINGS, seeds=50, limits=replace(LIMITS, run_s=30, total_s=3))
        async with Gym(settings) as gym:
            slow = forward("import time\ntime.sleep(0.5)\nreturn torch.relu(x) * 2")
            verdict = await gym.evaluate(task(), Candidate(slow))
        assert verdict.error is not None and (verdict.status, verdict.error.kind) == ("failed", "timeout")
        assert "all its calls together may take 3 s" in verdict.error.message

    asyncio.run(scenario())


async def test_those_who_need_much_gpu_memory_go_one_at_a_time() -> None:
    gym = Gym(replace(SETTINGS, parallel=4))
    gym.gpu = Gpu("GPU-0", "NVIDIA H200", 0)
    inside: list[int] = []

    async def work(need_bytes: int) -> int:
        async with gym.room(need_bytes):
            inside.append(need_bytes)
            crowd = len([need for need in inside if need == need_bytes])
            await asyncio.sleep(0.01)
            inside.remove(need_bytes)
            return crowd

    small, large = 2**30, 40 * 2**30
    crowds = await asyncio.gather(*(work(need) for need in (small, large) * 4))
    assert max(crowds[0::2]) == 4 and max(crowds[1::2]) == 1


@pytest.mark.parametrize("name", ["cuda:7", "gpu", "cuda:x"])
def test_unknown_devices_are_named(name: str) -> None:
    with pytest.raises(DeviceError, match=name):
        resolve_device(name, [])
    assert resolve_device("auto", []) == ("interpret", None)


def test_a_reference_that_fails_is_a_task_error() -> None:
    async def scenario() -> None:
        async with Gym(SETTINGS) as gym:
            with pytest.raises(TaskError, match="boom") as caught:
                await gym.evaluate(
                    task(REFERENCE.replace("return torch", "raise KeyError('boom')\n        return torch")),
                    Candidate(RIGHT),
                )
            assert caught.value.file == "model.py" and caught.value.line == 8

    asyncio.run(scenario())


async def test_a_zygote_launched_ahead_is_taken_over_and_others_are_ended() -> None:
    settings = replace(SETTINGS, offline_compile=False)
    ahead, needless = launch("interpret", settings.sandbox), launch("compile", settings.sandbox)
    async with Gym(settings, [ahead, needless]) as gym:
        zygote = await gym._zygote("interpret")
        assert zygote.process is ahead.process and zygote.alive
    assert ahead.process.poll() is not None and needless.process.poll() is not None
