"""The command with the real gym: from a file to an artefact, resumed, applied, interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DRK = [sys.executable, "-c", "from drk.assistant.cli import main; main()"]


def drk(folder: Path, *words: str) -> tuple[int, str, str]:
    done = subprocess.run([*DRK, *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def state_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if ".drk" not in path.parts}


@pytest.fixture
def words() -> list[str]:
    return ["optimize", "model.py", "--init", "dim=96", "--seeds", "2", "--device", "interpret"]


def test_from_a_file_to_an_applied_artefact(project: Path, words: list[str]) -> None:
    before = state_of(project)
    code, out, err = drk(project, *words, "--format", "json", "-o", "result.json")
    assert code == 0, err
    result = json.loads(out)
    assert json.loads((project / "result.json").read_text()) == result
    (project / "result.json").unlink()
    assert state_of(project) == before
    assert result["status"] == "unmeasured"
    assert result["best"]["verdict"]["speedups"] is None
    assert result["best"]["candidate"]["proposer"] == "builtin"
    assert result["artefact"].keys() == {"module", "test", "diff"}
    assert "--init dim=96" in result["measure_command"]
    assert "turn 1.1  accepted" in err

    code, out, err = drk(project, "optimize", "--resume", "--write")
    assert code == 0, err
    assert "speed not measured (no GPU)" in out
    assert "accepted (run)" in err  # nothing was judged again
    assert b"@optimized" in (project / "model.py").read_bytes()

    code, out, _ = drk(project, "restore", "model.py")
    assert code == 0
    assert "byte for byte" in out
    assert state_of(project) == before


def test_interrupted_it_keeps_its_run(project: Path, words: list[str]) -> None:
    events: list[dict[str, Any]] = []
    with subprocess.Popen(
        [*DRK, *words, "--events", "jsonl"], cwd=project, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            events.append(json.loads(line))
            if events[-1]["event"] == "judging":
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert [event["event"] for event in events][:2] == ["started", "baseline"]
    assert events[-1]["event"] == "result"
    assert events[-1]["result"]["interrupted"]
    run = Path(events[-1]["result"]["run_dir"])
    assert json.loads((run / "result.json").read_text()) == events[-1]["result"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["optimize"], "no target is named"),
        (["optimize", "absent.py"], "absent.py does not exist"),
        (["optimize", "model.py", "--init", "dim=96", "--model", "bultin"], "unknown proposer 'bultin'"),
        (["optimize", "--resume"], "there is no run"),
        (["apply"], "there is no run"),
        (["restore", "model.py"], "nothing was applied"),
    ],
)
def test_usage_errors_write_nothing(project: Path, asked: list[str], message: str) -> None:
    before = set(project.rglob("*"))
    code, out, _ = drk(project, *asked, "--format", "json")
    assert code == 2
    assert message in json.loads(out)["error"]["message"]
    assert set(project.rglob("*")) == before
