"""Models on the command line: options, a whole run against an endpoint, and a candidate of the user's."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from model_endpoint import Answer, sequence, serve

from drk.assistant.errors import UsageError
from drk.assistant.llm.model_settings import ModelSettings
from drk.assistant.model_options import model_settings, proposer_for, settings_from_json, settings_json
from drk.assistant.proposers import BuiltinProposer, SeededProposer, enough_coverage, reads_hotspots
from drk.gym.schema import Candidate

DRK = [sys.executable, "-c", "from drk.assistant.cli import main; main()"]


def test_options_become_settings(tmp_path: Path) -> None:
    options = [
        "temperature=0",
        "max-tokens=100",
        "stream=true",
        "price=1,2.5",
        "api-key-env=MINE",
        f"templates={tmp_path}",
    ]
    settings = model_settings("http://h/v1", options, 3.0, environ={})
    assert settings == ModelSettings(
        base_url="http://h/v1",
        temperature=0.0,
        max_tokens=100,
        stream=True,
        prices=(1.0, 2.5),
        api_key_env="MINE",
        templates=tmp_path,
        max_cost_usd=3.0,
    )
    assert settings_from_json(json.loads(json.dumps(settings_json(settings)))) == settings
    assert model_settings(None, [], None, environ={"OPENAI_BASE_URL": "http://e/v1"}).base_url == "http://e/v1"
    assert model_settings("http://h/v1", [], None, environ={"OPENAI_BASE_URL": "http://e/v1"}).base_url == "http://h/v1"


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("temprature=1", "unknown model option"),
        ("temperature", "unknown model option"),
        ("base-url=http://x", "unknown model option"),
        ("max-tokens=-1", "must be a positive number"),
        ("max-tokens=many", "must be a positive number"),
        ("attempts=0", "must be a positive number"),
        ("temperature=nan", "must be a positive number"),
        ("stream=yes", "true or false"),
        ("policy=best", "unknown policy"),
        ("price=1", "--price"),
    ],
)
def test_wrong_options(option: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        model_settings(None, [option], None, environ={})


def test_builtin_itself_is_not_seeded() -> None:
    assert isinstance(proposer_for("builtin", ModelSettings(), builtin_first=True), BuiltinProposer)


def test_nano_begins_by_itself_unless_builtin_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "nano.safetensors").write_bytes(b"")
    alone, after = (proposer_for(str(tmp_path), ModelSettings(), builtin_first=first) for first in (None, True))
    assert not isinstance(alone, SeededProposer)
    assert isinstance(after, SeededProposer)
    assert enough_coverage(alone) == enough_coverage(after) == 0.95
    assert enough_coverage(BuiltinProposer()) == math.inf
    assert not reads_hotspots(BuiltinProposer())


def test_a_whole_run_against_an_endpoint(project: Path, silu_candidate: Candidate, tmp_path: Path) -> None:
    pytest.importorskip("openai", reason="the llm extra is not installed")
    good = silu_candidate.source
    replies = [Answer("No code."), Answer(f"```python\n{good}```")]
    mine = tmp_path / "mine.py"
    mine.write_text(good.replace("value * tl.sigmoid(value)", "tl.sigmoid(value) * value"))
    with serve(sequence(*replies)) as endpoint:
        environ = {**os.environ, "OPENAI_API_KEY": endpoint.key}

        def drk(*words: str) -> tuple[dict[str, Any], str]:
            done = subprocess.run([*DRK, *words], cwd=project, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout), done.stderr

        words = [
            "model.py",
            "--init",
            "dim=96",
            "--seeds",
            "1",
            "--device",
            "interpret",
            "--turns",
            "2",
            "--samples",
            "1",
        ]
        words += [
            "--model",
            "openai:m",
            "--base-url",
            endpoint.url,
            "--no-builtin-first",
            "--model-option",
            "price=1,2",
        ]
        result, _ = drk("optimize", *words, "--max-cost", "5", "--hint", "one kernel", "--format", "json")
        assert [turn["status"] for turn in result["turns"]] == ["failed", "accepted"]
        assert result["status"] == "unmeasured"
        assert result["spending"]["calls"] == 2
        assert result["spending"]["cost_usd"] > 0
        assert "one kernel" in endpoint.requests[0]["messages"][-1]["content"]
        assert "one kernel" in endpoint.requests[1]["messages"][-1]["content"]

        again, _ = drk("optimize", "--resume", "--from", str(mine), "--format", "json")
        assert len(endpoint.requests) == 2
        assert [turn["proposer"] for turn in again["turns"]] == ["openai:m", "openai:m", "user"]
        assert again["turns"][2]["status"] == "accepted"
        files = [path for path in (project / ".drk").rglob("*") if path.is_file() and not path.is_symlink()]
        assert not [path for path in files if endpoint.key.encode() in path.read_bytes()]
        config = json.loads((Path(result["run_dir"]) / "config.json").read_text())
        assert config["model_settings"]["base_url"] == endpoint.url


def test_an_endpoint_that_is_not_there_is_told_before_anything_is_judged(project: Path) -> None:
    pytest.importorskip("openai", reason="the llm extra is not installed")
    words = ["optimize", "model.py", "--init", "dim=96", "--device", "interpret"]
    words += ["--model", "openai:m", "--base-url", "http://127.0.0.1:9/v1"]
    done = subprocess.run([*DRK, *words], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "cannot reach http://127.0.0.1:9/v1" in done.stderr
    assert "--base-url" in done.stderr
