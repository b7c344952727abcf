from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from drk.assistant import capture_launch
from drk.assistant.capture_launch import command_words, prepare, run_watched
from drk.assistant.errors import UsageError


def run(code, tmp_path, **options):
    options.setdefault("max_time_s", 120)
    return run_watched([sys.executable, "-c", code], os.environ, cwd=tmp_path, **options)


def test_words_are_split_without_a_shell() -> None:
    assert command_words("python train.py --name 'a b' $HOME") == ["python", "train.py", "--name", "a b", "$HOME"]
    assert command_words("-m pkg --steps 3") == [sys.executable, "-m", "pkg", "--steps", "3"]
    assert command_words("train.py x") == [sys.executable, "train.py", "x"]
    for wrong in ("", "   ", "python 'open"):
        with pytest.raises(UsageError, match="--capture"):
            command_words(wrong)


def test_the_exit_code_is_the_programs(tmp_path) -> None:
    assert run("pass", tmp_path).ended == "finished"
    end = run("raise SystemExit(7)", tmp_path)
    assert (end.ended, end.exit_code) == ("crashed", 7)


def test_a_signal_is_named(tmp_path) -> None:
    end = run("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", tmp_path)
    assert (end.ended, end.exit_code, end.signal_name) == ("killed", 128 + signal.SIGSEGV, "SIGSEGV")


def test_a_program_that_hangs_is_asked_and_then_killed_with_its_children(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(capture_launch, "GRACE_S", 0.5)
    code = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; time.sleep(600)"])
open("child", "w").write(str(child.pid))
time.sleep(600)
"""
    end = run(code, tmp_path, max_time_s=8.0)
    assert (end.ended, end.exit_code) == ("time-limit", 128 + signal.SIGKILL)
    child = int((tmp_path / "child").read_text())
    try:
        state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        state = "gone"
    assert state in ("Z", "X", "gone")


def test_a_command_that_is_not_there_is_told(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot run nothing-of-that-name"):
        run_watched(["nothing-of-that-name"], os.environ, max_time_s=10)


def test_the_users_own_sitecustomize_still_runs_and_the_folder_is_off_the_path(tmp_path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys; sys.users_own = True\n")
    recording = tmp_path / "recording"
    recording.mkdir()
    environment = prepare(recording, "capture_recorder", {"DRK_CAPTURE_FILE": "x", "DRK_CAPTURE_NAME": "X"})
    site, _, _ = environment["PYTHONPATH"].partition(os.pathsep)
    environment["PYTHONPATH"] = os.pathsep.join([site, str(own)])
    code = "import sys; assert sys.users_own; assert not [p for p in sys.path if 'recording' in p], sys.path"
    end = run_watched([sys.executable, "-c", code], environment, max_time_s=120)
    assert end.exit_code == 0
    assert list(recording.glob("fault-*")) == []


def test_a_fault_at_start_up_is_noted_and_the_program_runs(tmp_path) -> None:
    environment = prepare(tmp_path, "no_such_part", {})
    end = run_watched([sys.executable, "-c", "pass"], environment, max_time_s=120)
    assert end.exit_code == 0
    (fault,) = tmp_path.glob("fault-*")
    assert "no_such_part" in fault.read_text()
