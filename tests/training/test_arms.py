"""Arms: curves are kept while a run goes on, and compared at equal steps, seed by seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drk.training.arms import (
    ARMS,
    CURVES,
    GPU_CURVES,
    TABLE,
    ArmRecord,
    arms_table,
    compare_arms,
    earlier_curve,
    gpu_settings,
    write_comparison,
)
from drk.training.config import load_config


def result(arm: str, seed: int, rewards: list[float], **more: float) -> dict[str, Any]:
    curve = [{"step": number + 1, "reward/mean": value, **more} for number, value in enumerate(rewards)]
    return {"arm": arm, "seed": seed, "curve": curve}


def test_a_curve_is_kept_every_other_step_and_takes_steps_that_come_again() -> None:
    kept: list[dict[str, Any]] = []
    record = ArmRecord("trloo", 3, kept.append, curve=[{"step": 1, "loss": 9.0}, {"step": 2, "loss": 9.0}])
    record.report(1, {"validation/left_out": 0.0})
    for step in (2, 3, 4):
        record.report(step, {"loss": float(step), "unknown": 1.0, "lazy_share": 0.5})
    assert [row["step"] for row in record.facts()["curve"]] == [1, 2, 3, 4]
    assert record.curve[1] == {"step": 2, "loss": 2.0, "lazy_share": 0.5}
    assert [len(one["curve"]) for one in kept] == [2, 4]
    assert kept[-1] | {"curve": 0} == {"arm": "trloo", "seed": 3, "steps": 4, "curve": 0, "whole": False}


def test_arms_are_compared_at_the_steps_of_the_shortest() -> None:
    found = compare_arms(
        [
            result("grpo", 0, [0, 0, 0, 2, 9, 9], lazy_share=0.5),
            result("grpo", 1, [0, 0, 0, 4, 9, 9]),
            result("trloo", 0, [1, 1, 1, 3]),
            result("trloo", 1, [1, 1, 1, 3]),
            result("trloo", 2, [1, 1, 1, 6]),
        ]
    )
    assert (found["steps"], found["averaged"], found["base"]) == (4, 1, "trloo")
    assert list(found["arms"]) == ["trloo", "grpo"]
    assert found["arms"]["trloo"]["last"] == {"reward/mean": 4.0}
    assert (found["arms"]["trloo"]["low"], found["arms"]["trloo"]["high"]) == ({"reward/mean": 3}, {"reward/mean": 6})
    assert found["arms"]["grpo"]["first"]["reward/mean"] == 0
    assert found["differences"] == {"grpo": {"reward/mean": [-1, 1]}}
    table = arms_table(found)
    assert "| trloo | 3 | 4 3..6 (1) | not measured |" in table
    assert "| grpo | 2 | 3 2..4 (0) | 0.5 0.5..0.5 (0.5) |" in table


def test_a_comparison_is_written_from_what_can_be_read(tmp_path: Path) -> None:
    assert write_comparison(tmp_path)["arms"] == {}
    assert (tmp_path / "arms.md").read_text() == "No arm was run.\n"
    (tmp_path / "rl-trloo-0.json").write_text(json.dumps(result("trloo", 0, [1.0, 2.0])))
    (tmp_path / "rl-grpo-0.json").write_text('{"arm": "grpo", "cur')
    (tmp_path / "rl-no-pr-0.json").write_text('{"arm": "no-pr", "seed": 0, "curve": []}')
    assert write_comparison(tmp_path)["arms"]["trloo"]["last"] == {"reward/mean": 2.0}
    assert json.loads((tmp_path / "arms.json").read_text())["steps"] == 2
    assert len(earlier_curve(tmp_path / "rl-trloo-0.json")) == 2
    assert earlier_curve(tmp_path / "rl-grpo-0.json") == earlier_curve(tmp_path / "none.json") == []


def test_the_table_has_metrics_of_the_curves() -> None:
    assert set(TABLE) <= {*CURVES, *GPU_CURVES}


@pytest.mark.parametrize("speed", ["device", "timed"])
@pytest.mark.parametrize("arm", list(ARMS))
def test_every_arm_is_a_configuration(arm: str, speed: str, tmp_path: Path) -> None:
    values = {"gym.seeds": 2} | gpu_settings(tmp_path, tasks=32, speed=speed) | ARMS[arm]
    config = load_config("nano", [f"{name}={json.dumps(value)}" for name, value in values.items()])
    assert config.gym.timing == (speed == "timed")
    assert (config.gym.sessions, config.gym.cache_dir) == (32, str(tmp_path))
