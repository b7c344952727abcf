from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from drk.assistant.events import make_event
from drk.assistant.runs import Run, create_run
from drk.assistant.runs_command import app
from drk.gym.schema import Task


@pytest.fixture
def runs(tmp_path: Path, silu_task: Task, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Three runs in the current folder, oldest first; the last one has ended."""
    monkeypatch.chdir(tmp_path)
    made = [create_run(tmp_path / ".drk" / "runs", silu_task, {"target": f"model{n}.py"}) for n in range(3)]
    made[2].record_result({"status": "no-win", "reason": "nothing was proposed", "artefact": None})
    facts = {"sample": 0, "status": "rejected", "source": "gym", "reached": "ran", "seconds": 1.5, "best": False}
    made[2].log.append(make_event("judged", turn=1, gain=None, error="mismatch: no", note="fused", **facts))
    return made


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_list(runs: list[Run]) -> None:
    lines = invoke("list").splitlines()
    assert lines[0].split() == ["run", "status", "target", "judged", "reason"]
    assert [line.split()[1] for line in lines[1:]] == ["no-win", "unfinished", "unfinished"]
    rows = json.loads(invoke("list", "--format", "json"))["runs"]
    assert [row["run"] for row in rows] == [run.name for run in reversed(runs)]
    assert rows[0]["judged"] == 1
    assert rows[0]["target"] == "model2.py"


def test_show(runs: list[Run]) -> None:
    text = invoke("show")
    assert text.startswith(f"{runs[2].name}: no-win")
    assert "turn 1.1  rejected  mismatch: no  fused  1.5 s" in text
    assert json.loads(invoke("show", runs[0].name, "--format", "json"))["config"]["target"] == "model0.py"


def test_clean_keeps_the_newest_and_what_is_at_work(runs: list[Run]) -> None:
    with runs[0].locked():
        assert "removed 1 run" in invoke("clean", "--keep", "1")
    assert [run.folder.exists() for run in runs] == [True, False, True]
    assert "removed 1 run" in invoke("clean", runs[0].name, "--cache")
    assert [run.folder.exists() for run in runs] == [False, False, True]
    assert (runs[2].folder.parent / "latest").resolve() == runs[2].folder
