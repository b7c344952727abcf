from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interpreted_cases.py")


def _run(arguments, **environment):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={**env, **environment},
        cwd=CASES.parents[3],
    )


def test_cases_in_a_process_that_interprets():
    """One process for all cases: triton must be imported with the variable set."""
    done = _run(["-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    defined = len(re.findall(r"^def test_", CASES.read_text(), re.MULTILINE))
    assert int(passed[1]) >= defined > 20
    assert "skipped" not in done.stdout


def test_installing_without_the_variable_is_refused():
    import triton

    from drk.gym.runner.interpreter import install

    assert not triton.knobs.runtime.interpret
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        install()


def test_an_out_of_bounds_load_kills_the_process_only(warm_interpreting_python, tmp_path):
    script = tmp_path / "out_of_bounds.py"
    script.write_text(
        "import torch, triton, triton.language as tl\n"
        "from drk.gym.runner.interpreter import interpret\n"
        "@triton.jit\n"
        "def k(x):\n"
        "    tl.store(x, tl.load(x + (1 << 40)))\n"
        "with interpret():\n"
        "    k[(1,)](torch.zeros(1))\n"
        "raise SystemExit('survived')\n"
    )
    done = warm_interpreting_python.run([str(script)])
    assert done.returncode == -signal.SIGSEGV
