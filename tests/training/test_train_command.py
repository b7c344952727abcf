from __future__ import annotations

import json
from pathlib import Path

import pytest

from drk.assistant.cli import run


def test_the_configuration_is_printed_and_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "rl", "--config", "nano-cpu", "--set", "run.steps=5", "--print-config"]) == 0
    printed = tmp_path / "printed.toml"
    printed.write_text(capsys.readouterr().out)
    from drk.training.config import load_config

    assert load_config(str(printed)) == load_config("nano-cpu", ["run.steps=5"])


def test_a_misspelt_setting_is_a_usage_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "rl", "--config", "nano-cpu", "--set", "rollout.turnz=2"]) == 2
    assert "did you mean 'turns'?" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_dry_run_shows_sizes_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the train extra")
    folder = tmp_path / "never"
    words = [
        "train",
        "rl",
        "--config",
        "nano-cpu",
        "--set",
        f"run.output_dir={folder}",
        "--dry-run",
        "--format",
        "json",
    ]
    assert run(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows_per_step"], facts["group_size"], facts["rows_per_micro_batch"]) == (16, 4, 8)
    assert "(nn.Module)" in facts["first_prompt"]
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_dry_run_with_a_model_measures_prompts_and_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the train extra")
    from policy_parts import make_policy

    words = ["train", "rl", "--config", "nano", "--set", f"model.path={make_policy(tmp_path)}", "--dry-run"]
    assert run([*words, "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["prompt_tokens"]["max"] <= facts["prompt_tokens"]["room"] == 1024
    assert facts["memory_gb_estimate"]["states"] == pytest.approx(facts["parameters"] * 16 / 1e9, abs=1e-3)


def test_a_missing_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs the train extra")
    words = ["train", "rl", "--config", "nano", "--dry-run", "--set", f"model.path={tmp_path / 'none'}"]
    assert run(words) == 2
    assert "cannot load the tokenizer" in capsys.readouterr().err


def test_data_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    assert run(["data", "tasks", "--out", str(tasks), "--count", "12", "--family", "row", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["row"] == 12
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "other.py").write_text("def f(a):\n    return [a, a * 2, sorted(a)]\n")
    assert run(["data", "leaks", str(tasks), str(tmp_path / "evaluation")]) == 0
    line = json.loads(tasks.read_text().splitlines()[0])
    (tmp_path / "evaluation" / "copy.py").write_text(line["task"]["files"]["model.py"])
    assert run(["data", "leaks", str(tasks), str(tmp_path / "evaluation")]) == 1
    assert "is like" in capsys.readouterr().out
