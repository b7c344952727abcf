"""Watching and ending process trees, with real processes: double forks, setsid, zombies, memory, files."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from drk.gym.sandbox import MemoryWatch, ProcessTable, cpu_seconds, descendants, scratch_bytes, terminate
from drk.gym.sandbox.watch import Process, _read_process, _signal

MEGABYTE = 1 << 20
SCRIPT = """
import ctypes, os, sys, time
{body}
sys.stdout.write("ready\\n"); sys.stdout.flush()
time.sleep(600)
"""


@contextlib.contextmanager
def running(body):
    """A Python child that has run ``body``; killed with everything below it at the end."""
    source = SCRIPT.format(body=textwrap.dedent(body))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            tree = descendants(child.pid)
            child.kill()
            for process in tree:
                _signal(process, signal.SIGKILL)
            child.wait()


def alive(process):
    current = _read_process(process.pid)
    return current is not None and current.started == process.started and current.state not in "ZX"


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


TREE = """
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # as enter() does: orphans fall to the Runner
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    os._exit(0)
if os.fork() == 0:
    time.sleep(600)
time.sleep(0.2)
"""


def test_descendants_include_daemons_and_not_the_root():
    with running(TREE) as child:
        found = descendants(child.pid)
        assert child.pid not in {process.pid for process in found}
        assert len([process for process in found if process.state != "Z"]) == 2
        assert all(isinstance(process, Process) and process.started > 0 for process in found)


def test_terminate_ends_daemons_too():
    with running(TREE) as child:
        tree = [process for process in descendants(child.pid) if process.state != "Z"]
        handle = os.pidfd_open(child.pid)
        try:
            assert terminate(child.pid, handle) is True
        finally:
            os.close(handle)
        assert child.wait() == -signal.SIGKILL
        assert len(tree) == 2
        assert not any(alive(process) for process in tree)


def test_killing_only_the_root_would_not_do():
    """What terminate is for: the daemon outlives a plain kill of its ancestor."""
    with running(TREE) as child:
        tree = [process for process in descendants(child.pid) if process.state != "Z"]
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert any(alive(process) for process in tree)
        for process in tree:
            _signal(process, signal.SIGKILL)


def test_terminate_of_a_stopped_tree_and_of_a_dead_one():
    with running("if os.fork() == 0: time.sleep(600)") as child:
        os.kill(child.pid, signal.SIGSTOP)
        handle = os.pidfd_open(child.pid)
        try:
            assert terminate(child.pid, handle) is True
            child.wait()
            assert terminate(child.pid, handle) is True
        finally:
            os.close(handle)


def test_a_fork_storm_is_ended():
    body = """
    def storm():
        for _ in range(40):
            if os.fork() == 0:
                while True:
                    if os.fork() == 0: time.sleep(0.01); os._exit(0)
                    try: os.waitpid(-1, 0)
                    except ChildProcessError: pass
    storm()
    """
    with running(body) as child:
        handle = os.pidfd_open(child.pid)
        try:
            assert terminate(child.pid, handle, grace_s=20.0) is True
        finally:
            os.close(handle)
        child.wait()
        wait_until(lambda: not [process for process in descendants(1) if process.parent == child.pid])


def test_a_reused_id_is_not_signalled():
    with running("") as child:
        process = _read_process(child.pid)
        assert process is not None
        other = Process(process.pid, process.parent, process.state, process.started - 1, 1)
        assert _signal(other, signal.SIGKILL) is False
        assert child.poll() is None
        assert _signal(process, signal.SIGKILL) is True
        assert child.wait() == -signal.SIGKILL
        assert _signal(process, signal.SIGKILL) is False


def test_memory_of_a_tree_is_seen():
    body = f"""
    if os.fork() == 0:
        held = bytearray(os.urandom(1)) * {120 * MEGABYTE}
        open(sys.argv[0] if False else "/dev/null").close()
        time.sleep(600)
    time.sleep(0.5)
    """
    with running(body) as child:
        watch = MemoryWatch(child.pid, limit_bytes=100 * MEGABYTE)
        wait_until(watch.exceeded)
        usage = watch.usage()
        assert usage.exact is True
        assert usage.memory_bytes > 120 * MEGABYTE
        assert usage.processes == 2
        assert MemoryWatch(child.pid, limit_bytes=4096 * MEGABYTE).usage().exact is False


def test_shared_pages_of_forks_count_once():
    """Twelve forks of 60 MB are 60 MB, though each of them has 60 MB resident."""
    body = f"""
    held = bytearray(b"x") * {60 * MEGABYTE}
    for _ in range(12):
        if os.fork() == 0: time.sleep(600)
    """
    with running(body) as child:
        usage = MemoryWatch(child.pid, limit_bytes=300 * MEGABYTE).usage()
        assert usage.processes == 13
        assert usage.exact is True, "the sum of resident pages is above the limit"
        assert 60 * MEGABYTE < usage.memory_bytes < 300 * MEGABYTE


def test_memory_files_count_even_when_nothing_maps_them():
    body = f"""
    held = os.memfd_create("hidden")
    os.write(held, bytes({80 * MEGABYTE}))
    if os.fork() == 0: time.sleep(600)
    """
    with running(body) as child:
        assert MemoryWatch(child.pid, limit_bytes=60 * MEGABYTE).exceeded()
        generous = MemoryWatch(child.pid, limit_bytes=60 * MEGABYTE, baseline_bytes=80 * MEGABYTE)
        assert not generous.exceeded(), "both processes hold the same file"


def test_unlinked_files_are_seen(tmp_path):
    body = f"""
    path = {str(tmp_path / "flood")!r}
    held = open(path, "wb", buffering=0)
    held.write(bytes({8 * MEGABYTE})); os.fsync(held.fileno()); os.unlink(path)
    """
    with running(body) as child:
        assert scratch_bytes(tmp_path) == 0
        assert MemoryWatch(child.pid, limit_bytes=1 << 40).usage().unlinked_bytes >= 8 * MEGABYTE


def test_usage_of_a_tree_that_is_gone():
    child = subprocess.Popen(["true"])
    child.wait()
    usage = MemoryWatch(child.pid, limit_bytes=1).usage()
    assert (usage.memory_bytes, usage.processes, usage.unlinked_bytes) == (0, 0, 0)


def test_scratch_bytes(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(os.urandom(3 * MEGABYTE))
    os.link(tmp_path / "a" / "file", tmp_path / "hard")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "home").symlink_to(Path.home())
    size = scratch_bytes(tmp_path)
    assert 3 * MEGABYTE <= size < 4 * MEGABYTE
    for number in range(200):
        (tmp_path / f"empty-{number}").touch()
    assert scratch_bytes(tmp_path) >= size + 200 * 1024
    assert scratch_bytes(tmp_path / "missing") == 0


def test_a_pidfd_tells_when_the_tree_is_gone():
    with running("") as child:
        handle = os.pidfd_open(child.pid)
        terminate(child.pid, handle)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(0)
        os.close(handle)
        child.wait()


@pytest.mark.parametrize("comm", ["(evil) S 1 1", "a b) R 7"])
def test_names_with_parentheses_do_not_confuse(comm):
    with running(f"open('/proc/self/comm', 'w').write({comm[:15]!r})") as child:
        process = _read_process(child.pid)
        assert process is not None
        assert process.parent == os.getpid()


def test_watches_share_a_table_until_it_is_old():
    table = ProcessTable(max_age_s=3600.0)
    with running("pass") as first:
        one = MemoryWatch(first.pid, 1 << 40, table=table)
        assert one.usage().memory_bytes > 0
        with running("pass") as second:
            assert MemoryWatch(second.pid, 1 << 40, table=table).usage().memory_bytes == 0, (
                "it is younger than the table"
            )
            table.max_age_s = 0.0
            assert MemoryWatch(second.pid, 1 << 40, table=table).usage().memory_bytes > 0


def test_processor_time_is_work_not_waiting():
    with running("deadline = time.process_time() + 0.5\nwhile time.process_time() < deadline: pass") as busy:
        assert cpu_seconds(busy.pid) >= 0.4
        before = cpu_seconds(busy.pid)
        time.sleep(0.3)
        assert cpu_seconds(busy.pid) - before < 0.2
        busy.kill()
        busy.wait()
        assert cpu_seconds(busy.pid) == 0.0
