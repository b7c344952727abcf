"""The nano study's script: every step runs on a CPU with tiny sizes, and the card is filled from its results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs the train extra")


from drk.training.errors import TrainingError
from drk.training.model_card import card_text, write_card

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "bench_nano.py"
CONFIGS = Path(__file__).parents[2] / "training" / "recipes" / "accelerate"


@pytest.mark.slow
@pytest.mark.long
def test_data_and_sft_run_dry_and_give_a_card(tmp_path: Path) -> None:
    for step in ("data", "sft", "card"):
        command = [sys.executable, str(SCRIPT), step, "--out", str(tmp_path), "--dry-run"]
        done = subprocess.run(command, capture_output=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads((tmp_path / "results" / "sft.json").read_text())
    assert found["steps"] == 2
    assert found["dry_run"] is True
    assert "these figures are of a dry run" in (tmp_path / "README.md").read_text().lower()


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
