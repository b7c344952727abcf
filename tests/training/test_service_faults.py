"""A training run against a real gym service, of which a worker is killed, and then all of it for half a minute."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the train extra")
pytest.importorskip("fastapi", reason="needs the serve extra")

from gym_service import GymService

from drk.training.config import load_config
from drk.training.rl import train_rl

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
AWAY_S = 30.0


class Vandal(threading.Thread):
    """Kills a worker after step 1, and the whole service after step 2; starts it again after half a minute."""

    def __init__(self, service: GymService, folder: Path) -> None:
        super().__init__(daemon=True)
        self.service = service
        self.folder = folder
        self.done: list[str] = []

    def run(self) -> None:
        self.wait_for_step(1)
        os.kill(self.service.workers()[0], signal.SIGKILL)
        self.done.append("a worker was killed")
        self.wait_for_step(2)
        process = self.service.process
        assert process is not None
        process.kill()
        process.wait()
        self.done.append("the service was killed")
        time.sleep(AWAY_S)
        self.service.__enter__()
        self.done.append("the service was started again")

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics of ``step`` are written."""
        path = self.folder / "metrics.jsonl"
        while not (path.is_file() and len(path.read_text().splitlines()) >= step):
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_outlives_its_gym(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with GymService("--insecure-local", "--workers", "2", "--seeds", "1") as service:
        service.wait_ready(workers=2)
        vandal = Vandal(service, folder)
        vandal.start()
        values = {
            "run.output_dir": str(folder), "run.steps": 4, "run.save_every": 0, "gym.url": service.url,
            "gym.patience_s": 300.0, "gym.cache": False, "rollout.trajectory_timeout_s": 400.0,
        }  # fmt: skip
        reported: list[dict[str, float]] = []
        overrides = [f"{name}={json.dumps(value)}" for name, value in values.items()]
        done = train_rl(load_config("nano-cpu", overrides), lambda _, numbers: reported.append(numbers))
        vandal.join(120)
    assert len(vandal.done) == 3, vandal.done
    assert done.steps == len(reported) == 4
    assert all(step["trajectories/fault_share"] == 0 for step in reported)
    assert max(step["time/rollout_s"] for step in reported) > AWAY_S
    turns = [json.loads(line) for line in (folder / "turns.0.jsonl").read_text().splitlines()]
    assert {turn["status"] for turn in turns} <= {"accepted", "rejected", "failed"}
    # what a fault did to a reward would show as one answer with two
    paid: dict[tuple[str, str], set[float]] = {}
    for turn in turns:
        paid.setdefault((turn["task"], turn["source"]), set()).add(turn["reward"])
    assert all(len(rewards) == 1 for rewards in paid.values())
