from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from lsp_parts import make_run

from drk.lsp.suggestions import SuggestionStore, describe_result, runs_stamp


def test_the_newest_run_of_each_target_counts(project: Path) -> None:
    file, runs = project / "model.py", project / ".drk" / "runs"
    make_run(file, "Net", "20260101T000001Z-net", low=1.1)
    make_run(file, "Net", "20260101T000002Z-net", low=1.4)
    make_run(file, "Block", "20260101T000000Z-block", state="no-win")
    (project / "other.py").write_text("class Net:\n    pass\n")
    make_run(project / "other.py", "Net", "20260101T000003Z-other")
    store = SuggestionStore()
    found = {one.target: one for one in store.for_file(file, [runs])}
    assert set(found) == {"Net", "Block"}
    assert (found["Net"].state, found["Net"].headline) == ("ready", "1.40x over compile")
    assert found["Net"].kernels_module == "model_kernels"
    assert (found["Block"].state, found["Block"].diff) == ("no-win", None)
    named = store.named("20260101T000001Z-net", [runs])
    assert named is not None
    assert named.headline == "1.10x over compile"


def test_unfinished_running_and_broken_runs(project: Path) -> None:
    file, runs = project / "model.py", project / ".drk" / "runs"
    run = make_run(file, state="unfinished")
    store = SuggestionStore()
    before = runs_stamp([runs])
    with (run / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [one.state for one in store.for_file(file, [runs])] == ["running"]
    assert [one.state for one in store.for_file(file, [runs])] == ["unfinished"]
    (run / "result.json").write_text("{")
    assert runs_stamp([runs]) != before
    assert store.for_file(file, [runs]) == ()
    (run / "config.json").write_text("[]")
    assert store.for_file(file, [runs]) == ()
    shutil.rmtree(runs)
    assert store.for_file(file, [runs]) == ()


def test_only_what_was_measured_is_called_a_gain(project: Path) -> None:
    assert describe_result({"status": "unmeasured", "best": {"verdict": {}}}) == "logic checked, speed not measured"
    assert describe_result({"status": "optimised", "best": None}) == "logic checked, speed not measured"
