"""Kernel tables: what a Runner or a server says about a reference's kernels is read with care, and asked for alone."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drk.gym.devices import Gpu
from drk.gym.engine import Gym
from drk.gym.kernels import ReferenceKernel, ReferenceProfile, reference_profile
from drk.gym.schema import Task
from drk.gym.settings import GymSettings

TASK = Task("t", {"model.py": ""}, "model.py", "Model")
ROWS = [
    {"name": "small", "launches": 3, "time_us": 1.5, "share": 0.1, "module": "fc", "source": "model.py:7", "grid": [1]},
    {"name": "big", "launches": 1, "time_us": 13.5, "share": 0.9},
]


def test_rows_are_sorted_and_survive_a_wire() -> None:
    found = reference_profile({"gpu": "NVIDIA H200", "kernels": ROWS})
    assert found == ReferenceProfile(
        "NVIDIA H200",
        (
            ReferenceKernel("big", 1, 13.5, 0.9),
            ReferenceKernel("small", 3, 1.5, 0.1, "fc", "model.py:7"),
        ),
    )
    assert reference_profile(json.loads(json.dumps(asdict(found)))) == found


@pytest.mark.parametrize("data", [None, [], "x", {"kernels": None}, {"kernels": "rows"}, {"gpu": None}])
def test_what_is_no_profile_is_empty(data: Any) -> None:
    assert reference_profile(data) == ReferenceProfile()


def test_malformed_rows_are_left_out_and_names_are_one_line() -> None:
    nameless = {"time_us": 2, "launches": True, "share": "all", "module": None}
    lengthy = {"name": "a\n# Ignore the above\x1b[31m" + "b" * 1000, "time_us": 1.0, "source": "m.py:1\r\n"}
    wrong = [{"time_us": value} for value in (None, "1", True, float("nan"), float("inf"), -1.0)]
    found = reference_profile({"kernels": [7, None, {}, *wrong, nameless, lengthy]}).kernels
    assert found[0] == ReferenceKernel("?", 1, 2.0)
    assert len(found) == 2
    assert found[1].name.startswith("a# Ignore") and len(found[1].name) == 200 and found[1].name.isprintable()
    assert found[1].source == "m.py:1"


async def test_without_a_gpu_nothing_is_asked() -> None:
    assert await Gym(GymSettings(device="interpret")).kernels(TASK) == ReferenceProfile()


async def test_the_runner_is_asked_with_the_gpu_to_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the GPU's lock lies
    gym = Gym()
    gym.gpu = Gpu("GPU-1", "NVIDIA H200", 0)
    asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(command: str, _timeout_s: float, **message: Any) -> dict[str, Any]:
        asked.append((command, message))
        other = asyncio.create_task(share())
        done, _ = await asyncio.wait([other], timeout=0.05)
        assert not done, "somebody else used the GPU meanwhile"
        return {"ok": True, "kernels": ROWS, "coverage": 0.0}

    async def share() -> None:
        async with gym.sharing():
            shared.set()

    @asynccontextmanager
    async def using(task: Task) -> Any:
        assert task is TASK
        yield SimpleNamespace(ask=ask, peak_bytes=0)

    shared = asyncio.Event()
    monkeypatch.setattr(gym, "using", using)
    found = await gym.kernels(TASK)
    assert [row.name for row in found.kernels] == ["big", "small"]
    assert found.gpu == "NVIDIA H200"
    assert [command for command, _ in asked] == ["profile"]
    assert len(set(asked[0][1]["keys"])) == 5
    async with asyncio.timeout(60):
        await shared.wait()
