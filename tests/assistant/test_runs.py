from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.atomic_write import write_atomically
from drk.assistant.errors import UsageError
from drk.assistant.runs import Proposal, Run, create_run, delete_run, list_runs, open_run
from drk.assistant.verdict_cache import VerdictCache
from drk.gym.schema import Candidate, Task


@pytest.fixture
def run(tmp_path: Path, silu_task: Task) -> Run:
    return create_run(tmp_path / ".drk" / "runs", silu_task, {"target": "model.py"})


def test_a_run_folder_holds_task_and_config(run: Run, silu_task: Task, tmp_path: Path) -> None:
    assert run.task() == silu_task
    assert run.config["target"] == "model.py"
    assert run.result is None
    assert run.name.endswith("Z-scaledsilu")
    assert (tmp_path / ".drk" / ".gitignore").read_text() == "*\n"
    assert (run.folder.parent / "latest").resolve() == run.folder


def test_git_sees_nothing_of_it(run: Run, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    status = ["git", "-C", str(tmp_path), "status", "--porcelain", "-uall"]
    done = subprocess.run(status, capture_output=True, text=True, check=True)
    assert run.folder.exists()
    assert done.stdout == ""


def test_runs_of_one_second_get_names_of_their_own(tmp_path: Path, silu_task: Task) -> None:
    runs = [create_run(tmp_path / "runs", silu_task, {}) for _ in range(3)]
    assert len({one.name for one in runs}) == 3
    assert {one.name for one in list_runs(tmp_path / "runs")} == {one.name for one in runs}
    assert open_run(tmp_path / "runs").folder == runs[-1].folder


def test_proposals_and_verdicts_come_back(run: Run, verdicts: Any) -> None:
    proposals = [Proposal(n, 1, n - 1, Candidate(f"# {n}\r\n", "builtin", f"note {n}")) for n in (1, 2)]
    run.record_proposals(1, proposals)
    run.record_verdict(proposals[1], verdicts.accepted(1.5), 2.5)
    again = Run(run.folder)
    assert again.proposals() == {1: proposals}
    assert again.verdict(proposals[0]) is None
    assert again.verdict(proposals[1]) == (verdicts.accepted(1.5), 2.5)


def test_proposals_without_their_journal_line_do_not_count(run: Run) -> None:
    run.record_proposals(1, [Proposal(1, 1, 0, Candidate("# 1"))])
    log = run.folder / "events.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    assert Run(run.folder).proposals() == {}


def test_an_edited_candidate_is_refused(run: Run) -> None:
    run.record_proposals(1, [Proposal(1, 1, 0, Candidate("# 1"))])
    (run.folder / "candidates" / "001.py").write_text("# other")
    with pytest.raises(UsageError, match="was changed"):
        run.proposals()


def test_one_process_at_a_time(run: Run) -> None:
    imports = "from drk.assistant.runs import Run; from pathlib import Path"
    code = f"{imports}\nwith Run(Path({str(run.folder)!r})).locked(): pass"
    with run.locked():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "another process is working" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_open_run_by_part_and_its_errors(run: Run, tmp_path: Path, silu_task: Task) -> None:
    runs = run.folder.parent
    assert open_run(runs, run.name[:16]).folder == run.folder
    assert open_run(runs, str(run.folder)).folder == run.folder
    newer = create_run(runs, silu_task, {"target": "model.py:Net"})
    assert open_run(runs, "model.py:Net").folder == newer.folder
    with pytest.raises(UsageError, match="fits several"):
        open_run(runs, "scaledsilu")
    with pytest.raises(UsageError, match="there is no run 'absent'"):
        open_run(runs, "absent")
    with pytest.raises(UsageError, match="there is no run in"):
        open_run(tmp_path / "nowhere")


def test_delete_takes_the_latest_link_along(run: Run) -> None:
    runs = run.folder.parent
    delete_run(run)
    assert list_runs(runs) == []
    assert not (runs / "latest").is_symlink()


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path, silu_task: Task) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write a run folder"):
        create_run(tmp_path / "file" / "runs", silu_task, {})


def test_atomic_write_keeps_mode_and_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.py", tmp_path / "link.py"
    real.write_text("old")
    real.chmod(0o750)
    link.symlink_to(real)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"
    assert real.stat().st_mode & 0o777 == 0o750
    with pytest.raises(OSError, match="No such file"):
        write_atomically(tmp_path / "absent" / "x", b"")
    assert sorted(os.listdir(tmp_path)) == ["link.py", "real.py"]


def test_cache_is_by_content_and_conditions(
    tmp_path: Path, silu_task: Task, silu_candidate: Any, verdicts: Any
) -> None:
    cache = VerdictCache(tmp_path, {"device": "a", "seeds": 5})
    assert cache.get(silu_task, silu_candidate) is None
    assert cache.put(silu_task, silu_candidate, verdicts.accepted())
    assert cache.get(silu_task, silu_candidate) == verdicts.accepted()
    assert VerdictCache(tmp_path, {"seeds": 5, "device": "a"}).get(silu_task, silu_candidate) is not None
    assert VerdictCache(tmp_path, {"device": "b", "seeds": 5}).get(silu_task, silu_candidate) is None
    assert cache.get(silu_task, Candidate("# other")) is None
    assert not cache.put(silu_task, Candidate("# e"), verdicts.refused(status="error"))
    assert not VerdictCache(None, {}).put(silu_task, silu_candidate, verdicts.accepted())


def test_a_damaged_cache_file_is_a_miss(tmp_path: Path, silu_task: Task, silu_candidate: Any, verdicts: Any) -> None:
    cache = VerdictCache(tmp_path, {})
    cache.put(silu_task, silu_candidate, verdicts.accepted())
    (file,) = tmp_path.rglob("*.json")
    for text in ("", "{", "[]", json.dumps({"status": "accepted"})):
        file.write_text(text)
        assert cache.get(silu_task, silu_candidate) is None
