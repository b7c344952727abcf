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


from drk.training.arms import GPU_CURVES, compare_arms
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
    figures = {"tasks": 71, "correct/turn_1": 0.5, "hack_rate/best": 0.0, "fast@1.2/best": None}
    results = {"eval-sft": {"sets": {"handwritten": figures}, "device": "cpu", "samples": 1, "temperature": 0.0}}
    text = card_text(results)
    assert "| sft | handwritten | 71 | 1 at T=0.0 | 50.0 % | not measured |" in text
    assert "no reinforcement was recorded" in text
    assert "| parameters | not measured |" in text
    assert "| this one | not measured | not measured |" in text
    with pytest.raises(TrainingError, match="no results"):
        write_card(tmp_path, tmp_path / "README.md")


def test_the_card_holds_the_figures_of_each_step_and_of_runs_that_were_cut_off() -> None:
    curve = [{"step": 1, "reward/mean": 0.2, "loss": 1.0}, {"step": 2, "reward/mean": 0.4, "loss": 0.9}]
    arm = {"arm": "trloo", "seed": 1, "steps": 2, "curve": curve, "whole": False}
    turns = {"tasks": 71, "correct/turn_1": 0.25, "correct/turn_2": 0.5, "correct/best": 0.625}
    rounding = {"tokens": 1234, "kl_mean": 0.00051, "kl_max": 0.1, "same_top_share": 0.999}
    sizes = {"parameters": 15_736_192, "weights_bytes": 2**20, "total_bytes": 3 * 2**19, "context_tokens": 2048}
    results = {
        "data": {"pairs": 49152, "compositions": 5778, "vocabulary": 4096, "lazy_share": 0.47},
        "sft": {"steps": 1140, "seconds": 198.4, "last": {"loss": 0.031, "loss/held_out": 0.0475}, "device": "GPU"},
        "rl-trloo-1": arm,
        "arms": compare_arms([arm]),
        "stts-sft": {"policies": {"top-w": {"handwritten": turns}}},
        "export": sizes | {"rounding": rounding},
    }
    text = card_text(results)
    for line in (
        "| parameters | 15,736,192 |",
        "| stored as | 8-bit integers with a scale a row: 1.00 MiB of weights, 1.50 MiB in all |",
        "0.00051 nats; 99.9 % of 1,234 tokens",
        "| SFT from nothing | 1,140 | 198 | loss 0.031, held-out loss 0.0475 |",
        "| RL `trloo`, seed 1 (cut off) | 2 | not measured | reward/mean 0.2 to 0.4 |",
        "- sft, history `top-w`: turn 1 25.0 %, turn 2 50.0 %, best 62.5 %",
        "| trloo | 1 | 0.4 (0.2) |",
        "Measured on: GPU.",
    ):
        assert line in text
    assert "dry run" not in text
    assert "dry run" in card_text(results | {"sft": {"dry_run": True}})


@pytest.mark.parametrize("name", ["one-gpu", "ddp", "fsdp2"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    config = config_args.load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    wanted = {"one-gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}[name]
    assert str(getattr(config.distributed_type, "value", config.distributed_type)) == wanted
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
