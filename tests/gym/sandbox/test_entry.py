"""Entering: refusals, and how a Runner lives and dies with its zygote, with and without namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from drk.gym.sandbox import descendants, terminate
from drk.gym.sandbox.watch import _read_process

NAMESPACES = ("pidns", "netns", "ipcns")
ZYGOTE = """
import json, os, sys, tempfile, threading, time
from pathlib import Path
from drk.gym import sandbox
from drk.gym.errors import SandboxUnavailable
spec = json.loads(sys.argv[1])
layers = sandbox.probe().without(*spec.get("without", ()))
sandbox.protect_process()
sandbox.adopt_orphans()
def body():
    if spec.get("daemon"):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                time.sleep(600)
            os._exit(0)
        time.sleep(0.3)
    os.write(1, b"inside\\n")
    time.sleep(600)
with tempfile.TemporaryDirectory() as folder:
    if spec.get("thread"):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    child = os.fork()
    if child == 0:
        try:
            scratch = Path(spec.get("scratch") or folder)
            sandbox.enter(sandbox.Policy(scratch=scratch, level=spec.get("level", "standard"), keep_fds=(1, 2)), layers)
            body()
        except SandboxUnavailable as error:
            os.write(1, (str(error) + "\\n").encode())
        os._exit(0)
    os.write(1, f"{child}\\n".encode())
    if spec.get("reap", True):
        status = os.waitpid(child, 0)[1]
        stray = sandbox.strays(())
        os.write(1, (json.dumps({"code": os.waitstatus_to_exitcode(status), "strays": stray}) + "\\n").encode())
"""

each_set = pytest.mark.parametrize("without", [(), NAMESPACES], ids=["namespaces", "none"])


@contextlib.contextmanager
def zygote(**spec):
    with subprocess.Popen(
        [sys.executable, "-c", ZYGOTE, json.dumps(spec)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def start(process):
    """The pid of the Runner as the zygote sees it, and every process below it, once it is inside."""
    lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
    assert "inside" in lines, lines
    pid = int((lines - {"inside"}).pop())
    return pid, [p for p in descendants(pid) if p.state != "Z"]


def gone(processes):
    def alive(process):
        current = _read_process(process.pid)
        return current is not None and current.started == process.started and current.state not in "ZX"

    deadline = time.monotonic() + 30
    while any(alive(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@each_set
def test_terminate_ends_a_runner_and_its_daemons(without):
    with zygote(without=without, daemon=True) as process:
        pid, tree = start(process)
        assert len(tree) >= 1
        handle = os.pidfd_open(pid)
        assert terminate(pid, handle, grace_s=20) is True
        os.close(handle)
        assert gone(tree)
        assert json.loads(process.stdout.readline())["code"] == -signal.SIGKILL


@each_set
def test_a_runner_dies_with_its_zygote(without):
    with zygote(without=without) as process:
        pid, tree = start(process)
        runner = _read_process(pid)
        process.kill()
        process.wait()
        assert gone([runner, *tree])


def test_a_runner_that_is_killed_from_inside_takes_its_namespace_along():
    with zygote(daemon=True) as process:
        _, tree = start(process)
        if len(tree) < 3:
            pytest.skip("no pid namespace here")
        runner = tree[1]  # init comes first
        os.kill(runner.pid, signal.SIGBUS)
        assert json.loads(process.stdout.readline())["code"] == -signal.SIGBUS
        assert gone(tree)


def test_orphans_of_a_dead_runner_are_strays_of_the_zygote():
    with zygote(without=NAMESPACES, daemon=True) as process:
        pid, tree = start(process)
        os.kill(pid, signal.SIGKILL)
        ended = json.loads(process.stdout.readline())
        assert ended["code"] == -signal.SIGKILL
        assert ended["strays"] >= 1
        assert gone(tree)


def test_a_relative_scratch_is_refused():
    with zygote(scratch="relative") as process:
        assert "scratch is not an absolute path" in process.stdout.readline() + process.stdout.readline()


def test_a_missing_scratch_is_refused():
    with zygote(scratch="/no/such/folder") as process:
        assert "scratch is not an absolute path" in process.stdout.readline() + process.stdout.readline()


def test_a_process_with_threads_cannot_enter():
    code = (
        "import tempfile, threading, time\n"
        "from pathlib import Path\n"
        "from drk.gym import sandbox\n"
        "from drk.gym.errors import SandboxUnavailable\n"
        "layers = sandbox.probe()\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "try: sandbox.enter(sandbox.Policy(scratch=Path('/tmp')), layers)\n"
        "except SandboxUnavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "one thread" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_protected_process_hides_its_environment_from_its_own_user():
    code = (
        "import os, sys\n"
        "from drk.gym.sandbox import protect_process\n"
        "os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)\n"
        "from drk.gym.sandbox import syscalls\n"
        "syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)\n"
        "if sys.argv[1] == 'protect': protect_process()\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    try: print(len(open(f'/proc/{parent}/environ', 'rb').read()) > 0, flush=True)\n"
        "    except PermissionError: print('refused', flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
    )

    def seen(how):
        done = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert seen("plain") == "True"
    assert seen("protect") == "refused"
