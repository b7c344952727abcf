"""The whole way from candidate to verdict, with real zygotes, real sandboxes and the interpreter."""

from __future__ import annotations

import asyncio

import pytest
from crash_corpus import CASES

from drk.gym.engine import Gym
from drk.gym.schema import Call, Candidate, Task, TensorSpec
from drk.gym.settings import GymSettings, Limits
from drk.gym.wire import verdict_from_json, verdict_to_json

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
