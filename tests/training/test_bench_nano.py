"""The nano study's script: every step runs on a CPU with tiny sizes, and the card is filled from its results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_scripts import load_script

pytest.importorskip("trl", reason="needs the train extra")


from drk.training.arms import GPU_CURVES
from drk.training.batch import RowRecord, decide
from drk.training.config import TrainConfig, load_config
from drk.training.errors import TrainingError
from drk.training.model_card import card_text, write_card
from drk.training.rollout import unequal_groups

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_nano.py"
CONFIGS = Path(__file__).parents[2] / "training" / "recipes" / "accelerate"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_step_but_evaluation_runs_dry_and_gives_a_card(tmp_path: Path) -> None:
    for step in ("data", "sft", "rl", "card"):
        command = [sys.executable, str(SCRIPT), step, "--out", str(tmp_path), "--arm", "grpo-unequal", "--dry-run"]
        done = subprocess.run(command, capture_output=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads((tmp_path / "results" / "sft.json").read_text())
    assert found["steps"] == 2
    assert found["dry_run"] is True
    arm = json.loads((tmp_path / "results" / "rl-grpo-unequal-0.json").read_text())
    assert (arm["steps"], arm["arm"], len(arm["curve"])) == (1, "grpo-unequal", 1)
    assert arm["curve"][0]["group/size_mean"] == pytest.approx((2 * 2 + 4 * 4) / 6)
    assert "these figures are of a dry run" in (tmp_path / "README.md").read_text().lower()


def arm_config(arm: str, *, dry_run: bool = False) -> TrainConfig:
    bench = load_script("bench_nano")
    options = argparse.Namespace(dry_run=dry_run, seed=0)
    return bench.settings(options, {"rollout.prompts_per_step": 8, "rollout.samples_per_prompt": 8} | bench.ARMS[arm])


def test_arms_differ_in_what_they_are_named_for() -> None:
    bench = load_script("bench_nano")
    configs = {arm: arm_config(arm) for arm in bench.ARMS}
    assert len({repr(config) for config in configs.values()}) == len(configs)
    assert configs["no-pr"].rejection.prs == "off"
    assert not configs["no-pr"].reward.pay_coverage
    assert not configs["no-mrs"].rejection.mrs
    assert configs["no-honesty"].reward.pay_dishonest


def test_grpo_is_trloo_times_a_constant_only_where_groups_are_equal() -> None:
    def ratios(arm: str, tasks: list[int]) -> set[float]:
        records = [
            RowRecord(task, place, 0, reward=float(place * place % 7), correct=True, tokens=1)
            for place, task in enumerate(tasks)
        ]
        other = arm.replace("grpo", "trloo")
        grpo, trloo = (decide(records, arm_config(name), seed=0).advantages for name in (arm, other))
        pairs = zip(grpo.tolist(), trloo.tolist(), strict=True)
        return {round(left / right, 4) for left, right in pairs if abs(right) > 1e-3}

    tasks = [0] * 8 + [1] * 8
    assert ratios("grpo", tasks) == {round(7 / 8, 4)}
    config = arm_config("grpo-unequal").rollout
    assert config.group_sizes == "unequal"
    assert ratios("grpo-unequal", unequal_groups(tasks, config.samples_per_prompt)) == {0.5, round(13 / 14, 4)}


def test_the_curves_of_a_gpu_run_are_metrics_that_measured_speeds_give() -> None:
    rows = [
        RowRecord(0, sample, turn, 1.0 + sample, coverage=0.9, speedup=1.5, correct=True, tokens=3)
        for sample in range(2)
        for turn in range(3)
    ]
    metrics = decide(rows, arm_config("trloo"), seed=0).metrics
    assert set(GPU_CURVES) <= set(metrics)
    assert metrics["speedup/mean"] == 1.5
    slow = decide([RowRecord(0, 0, 0, 1.0, correct=True, tokens=1)], load_config("nano-cpu"), seed=0).metrics
    assert set(GPU_CURVES).isdisjoint(slow)


def test_the_card_says_what_was_not_measured(tmp_path: Path) -> None:
    figures = {"tasks": 71, "correct/turn_1": 0.5, "hack_rate/best": 0.0}
    results = {"eval-sft": {"sets": {"handwritten": figures}, "device": "cpu"}}
    text = card_text(results)
    assert "| sft | handwritten | 71 | 50.0 % | not measured |" in text
    assert "No reinforcement was recorded." in text
    with pytest.raises(TrainingError, match="no results"):
        write_card(tmp_path, tmp_path / "README.md")


@pytest.mark.parametrize("name", ["one-gpu", "ddp", "fsdp2"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    wanted = {"one-gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
    assert str(getattr(config.distributed_type, "value", config.distributed_type)) == wanted
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
