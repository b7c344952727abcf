"""Contestants on one core, against real processes: who runs, who is stopped, and what is as before afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drk.gym.turns_on_core import TurnsOnCore

BUSY = """
import os, threading, time
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
if os.fork() == 0:
    spin()
print("ready", flush=True)
spin()
"""


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def until(pid: int, stopped: bool) -> bool:
    deadline = time.monotonic() + 30
    while (state(pid) == "T") != stopped and time.monotonic() < deadline:
        time.sleep(0.005)
    return (state(pid) == "T") == stopped


def affinities(pid: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]


@pytest.fixture
def pair() -> Iterator[dict[str, int]]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) for _ in range(2)]
    children = []
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            children.append(child_of(process.pid))
        yield {"eager": processes[0].pid, "candidate": processes[1].pid}
    finally:
        for pid in children:
            os.kill(pid, 9)
        for process in processes:
            process.kill()
            process.communicate()


def test_one_runs_on_the_core_and_the_others_with_their_children_stand_still(pair: dict[str, int]) -> None:
    eager, candidate = pair["eager"], pair["candidate"]
    before = affinities(candidate)
    with TurnsOnCore(pair) as turns:
        core = turns.move()
        for pid in (eager, candidate, child_of(candidate)):
            assert affinities(pid) == [{core}] * len(affinities(pid))
        turns.turn_of("eager")
        assert until(candidate, stopped=True)
        assert until(child_of(candidate), stopped=True)
        assert until(eager, stopped=False)
        turns.turn_of("candidate")
        assert until(eager, stopped=True)
        assert until(candidate, stopped=False)
        assert until(child_of(candidate), stopped=False)
    assert turns.held
    assert until(eager, stopped=False)
    assert affinities(candidate) == before


def test_who_has_ended_disturbs_nobody(pair: dict[str, int]) -> None:
    with TurnsOnCore(pair) as turns:
        turns.turn_of("eager")
        os.kill(pair["candidate"], 9)
        os.waitid(os.P_PID, pair["candidate"], os.WEXITED | os.WNOWAIT)
        turns.move()
        turns.turn_of("candidate")
        turns.turn_of("eager")
    assert until(pair["eager"], stopped=False)


def test_all_go_on_after_an_error_in_between(pair: dict[str, int]) -> None:
    with pytest.raises(RuntimeError, match="in between"), TurnsOnCore(pair) as turns:
        turns.turn_of("eager")
        raise RuntimeError("in between")
    assert until(pair["candidate"], stopped=False)


def test_a_core_is_chosen_among_those_that_may_be_used(pair: dict[str, int]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    with TurnsOnCore(pair, cores=allowed[:1]) as turns:
        assert {turns.move() for _ in range(5)} == set(allowed[:1])


def test_two_names_of_one_process_take_turns_in_it(pair: dict[str, int]) -> None:
    with TurnsOnCore({**pair, "compile": pair["eager"]}) as turns:
        turns.turn_of("candidate")
        assert until(pair["eager"], stopped=True)
        turns.turn_of("compile")
        assert until(pair["eager"], stopped=False)
        turns.turn_of("eager")
        assert until(pair["candidate"], stopped=True)
        assert until(pair["eager"], stopped=False)
