from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drk.assistant.events import Event
from drk.lsp import jobs
from drk.lsp.job_flow import last_word
from drk.lsp.jobs import Job, JobEnd, JobSpec, JobTable


def spec(project: Path, command: list[str], target: str = "Net") -> JobSpec:
    file = project / "model.py"
    arguments = ["optimize", f"{file}:{target}", "--runs-dir", str(project / ".drk" / "runs")]
    return JobSpec("optimize", file, target, arguments, project, command)


async def run(job: Job) -> tuple[JobEnd, list[str]]:
    seen: list[str] = []
    return await job.work(lambda event: seen.append(event["event"])), seen


async def test_events_arrive_and_the_result_is_kept(project: Path, scripted: Any) -> None:
    end, seen = await run(Job(1, spec(project, scripted("win"))))
    assert (end.state, end.exit_code) == ("done", 0)
    assert seen == ["started", "captured", "judging", "judged"]
    assert end.result is not None
    assert end.result["status"] == "optimised"
    assert end.run.endswith("scripted")


async def test_a_command_that_ignores_the_signal_is_killed_with_its_children(
    project: Path, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "GRACE_S", 0.3)
    job = Job(1, spec(project, scripted("stubborn")))

    def stop(event: Event) -> None:
        if event["event"] == "judging" and event["turn"] == 2:
            job.cancel()
            job.cancel()

    end = await job.work(stop)
    assert (end.state, end.exit_code, end.result) == ("cancelled", -9, None)
    child = int((project / "child.pid").read_text())
    async with asyncio.timeout(60):
        while _alive(child):
            await asyncio.sleep(0.05)
    assert last_word(job, end)[0] == "stopped"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_job_cancelled_before_it_runs_ends_at_once(project: Path, scripted: Any) -> None:
    job = Job(1, spec(project, [sys.executable, "-c", "import time; time.sleep(100)"]))
    job.cancel()
    end, _ = await run(job)
    assert end.state == "cancelled"


async def test_ends_are_told_apart(project: Path, scripted: Any) -> None:
    killed, _ = await run(Job(1, spec(project, scripted("die"))))
    assert (killed.state, killed.exit_code) == ("killed", -9)
    refused, _ = await run(Job(2, spec(project, scripted("refuse"))))
    assert (refused.state, refused.error) == (
        "refused",
        {"kind": "target", "message": "no inputs are known", "cause": None, "help": "give --input"},
    )
    flood = (
        "import sys; sys.stderr.write('x' * 300000 + '\\nlast line\\n'); sys.stdout.write('y' * 300000); sys.exit(3)"
    )
    loud, _ = await run(Job(3, spec(project, [sys.executable, "-c", flood])))
    assert (loud.state, loud.exit_code) == ("refused", 3)
    assert last_word(Job(3, spec(project, ["x"])), loud)[0] == "failed: last line"


def test_one_job_for_a_target(project: Path) -> None:
    table = JobTable()
    first, fresh = table.add(spec(project, ["x"]))
    assert fresh
    assert table.add(spec(project, ["y"])) == (first, False)
    other, fresh = table.add(spec(project, ["x"], "Block"))
    assert fresh
    assert table.of_file(project / "model.py") == [first, other]
    first.token = "t"
    assert table.find("t") is first
    assert table.find(other.id) is other
    table.remove(first)
    assert table.all() == [other]


TWICE = """
import os, signal, subprocess, sys, time
command = "import signal, sys, time\\n" \
    "count = 0\\n" \
    "def note(*_):\\n    global count; count += 1\\n" \
    "signal.signal(signal.SIGTERM, note)\\n" \
    "print('ready', flush=True)\\n" \
    "end = time.monotonic() + 1.5\\n" \
    "while time.monotonic() < end: time.sleep(0.05)\\n" \
    "sys.exit(40 + count)"
words = [sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.executable, "-c", command]
job = subprocess.Popen(words, stdout=subprocess.PIPE)
job.stdout.readline()
for _ in range(3):
    job.send_signal(signal.SIGTERM)
    time.sleep(0.2)
sys.exit(job.wait())
"""


def test_a_command_is_told_to_stop_once(tmp_path: Path) -> None:
    """A server with several threads that is killed makes the kernel send several signals."""
    done = subprocess.run([sys.executable, "-c", TWICE, jobs._LAUNCHER], check=False)
    assert done.returncode == 41
