"""Tripwires and the audit hook, tried in child processes, since both last as long as their process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from warm_python import WarmPython

HEAD = """
import json, os, socket, sys, threading
from pathlib import Path
import torch
from drk.gym.runner.audit import Audit
from drk.gym.runner import execute, timing
from drk.gym.runner.tripwires import Tripwires
wires, audit = Tripwires(), Audit(Path(sys.argv[1]))
audit.watch()
"""
TAIL = "\nprint(json.dumps([wires.tripped(), audit.notes]))\n"


Run = Callable[[str], tuple[list[str], list[str]]]


@pytest.fixture
def run(warm_python: WarmPython, tmp_path: Path) -> Run:
    """Run the body in a process that ends after it; return what tripped and what was noted."""

    def go(body: str) -> tuple[list[str], list[str]]:
        done = warm_python.run(["-c", HEAD + body + TAIL, str(tmp_path)])
        assert done.returncode == 0, done.stderr
        tripped, notes = json.loads(done.stdout.splitlines()[-1])
        return tripped, notes

    return go


def test_honest_work_trips_nothing(run: Run) -> None:
    body = (
        "import tempfile, subprocess\n"
        "x = torch.randn(64, 64); y = torch.relu(x @ x).sum().item()\n"
        "open(sys.argv[1] + '/notes.txt', 'w').write('x'); os.environ.get('HOME')\n"
        "import statistics, decimal, sqlite3\n"
        "subprocess.run(['true'], check=True)\n"
        "torch.func.vmap(lambda row: row @ x)(x)\n"
        "import _thread; done = _thread.allocate_lock(); done.acquire()\n"
        "_thread.start_new_thread(done.release, ()); done.acquire()\n"
    )
    assert run(body) == ([], [])


TAMPERING = (
    ("torch.allclose = lambda *a, **k: True", "torch.allclose"),
    ("torch.cuda.Event.elapsed_time = lambda *a: 0.0", "elapsed_time"),
    ("import time; time.perf_counter = lambda: 0.0", "perf_counter"),
    ("torch.set_default_dtype(torch.float64)", "default dtype"),
    ("torch.backends.cudnn.allow_tf32 = False", "cudnn TF32"),
    ("execute.call.__code__ = (lambda *a, **k: None).__code__", "execute.call"),
    ("timing.Timer.outputs = lambda *a: {}", "timing.Timer.outputs"),
    ("import importlib, drk.gym.runner.sampling as s; importlib.reload(s)", "sampling.shrink"),
    ("import gc; gc.callbacks.append(lambda *a: None)", "garbage collector"),
    ("sys.setprofile(lambda *a: None)", "profile function"),
    ("import signal; signal.signal(signal.SIGALRM, lambda *a: None)", "signal handlers"),
    ("torch.nn.modules.module.register_module_forward_hook(lambda *a: None)", "hooks of all modules"),
    ("lib = torch.library.Library('aten', 'IMPL'); lib.impl('relu', lambda x: x, 'CPU')", "operator aten"),
    ("import builtins; builtins.id = lambda x: 0", "builtins.id"),
)


def test_tampering_trips(run: Run) -> None:
    tripped, _ = run("\n".join(body for body, _ in TAMPERING))
    missed = [word for _, word in TAMPERING if not any(word in line for line in tripped)]
    assert not missed, tripped


@pytest.mark.parametrize(
    "body",
    [
        "threading.Thread(target=lambda: __import__('time').sleep(99), daemon=True).start()",
        "import _thread, time; begun = _thread.allocate_lock(); begun.acquire()\n"
        "_thread.start_new_thread(lambda: (begun.release(), time.sleep(99)), ()); begun.acquire()",
    ],
)
def test_threads_that_run_on_trip(run: Run, body: str) -> None:
    tripped, _ = run(body)
    assert tripped == ["threads were left running"]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("try: socket.create_connection(('127.0.0.1', 9), 0.1)\nexcept OSError: pass", "network"),
        ("try: os.kill(1, 15) if os.getpid() < 0 else sys.audit('os.kill', 1, 15)\nexcept OSError: pass", "process 1"),
        ("try: open('/root/.ssh/id_rsa')\nexcept OSError: pass", "/root/.ssh"),
        ("import ctypes; ctypes.CDLL(None).kill", "C function kill"),
    ],
)
def test_attempts_are_noted(run: Run, body: str, word: str) -> None:
    _, notes = run(body)
    assert any(word in line for line in notes), notes


def test_a_signal_to_oneself_is_no_escape(run: Run) -> None:
    assert run("import signal; signal.signal(10, lambda *a: None); os.kill(os.getpid(), 10)")[1] == []
