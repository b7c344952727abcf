"""A file that never ends at import is stopped, and the user is told where it hangs or that it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from drk.gym.engine import Gym
from drk.gym.errors import TaskError
from drk.gym.schema import Call, Task, TensorSpec
from drk.gym.settings import GymSettings, Limits

FILE = Path(__file__).resolve().parents[1] / "fixtures" / "intake" / "endless_import.py"


async def test_it_is_stopped_and_named() -> None:
    task = Task("t", {FILE.name: FILE.read_text()}, FILE.name, "Model", inputs=Call((TensorSpec((2, 2)),)))
    async with Gym(GymSettings(device="interpret", offline_compile=False, limits=Limits(load_s=2))) as gym:
        with pytest.raises(TaskError, match="in time") as caught:
            await gym.inspect(task)
    assert caught.value.kind == "reference-timeout"
