"""Python processes that begin with torch imported: forks of one that has done nothing else.

A process of its own costs a test four seconds, nearly all of them ``import torch``; a fork costs ten milliseconds. Use
it where a test needs a process of its own (what it does cannot be undone, or ends it) and not where the start is the
subject. A fork has a Python of its own state, standard streams, folder, arguments and environment; what it shares with
a started one is what importing the named modules does. Environment variables that those read while they are imported
(``TRITON_INTERPRET``) belong to the one that is forked.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any


class WarmPython:
    """A process that has imported ``modules`` under these changes of our environment, and is forked for each run."""

    def __init__(self, *modules: str, **environ: str) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**plain_environment(), **threads, **environ},
        )

    def run(self, arguments: list[str], folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``-c CODE``, ``-m MODULE`` or a file, with arguments, as the command ``python`` would."""
        with tempfile.TemporaryDirectory() as streams:
            request = {
                "arguments": arguments,
                "folder": str(folder or Path.cwd()),
                "environ": {**{key: value for key, value in os.environ.items() if key.startswith("XDG_")}, **environ},
                "streams": streams,
            }
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "the process that is forked has ended"
            out, err = ((Path(streams) / name).read_text(errors="replace") for name in ("out", "err"))
        return subprocess.CompletedProcess(arguments, json.loads(answer), out, err)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def plain_environment() -> dict[str, str]:
    """Our environment without what would change how candidates or pytest run."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_", "PYTHONPATH"))}


def _become(request: dict[str, Any]) -> None:
    for target, name in ((0, os.devnull), (1, request["streams"] + "/out"), (2, request["streams"] + "/err")):
        source = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(source, target)
        os.close(source)
    os.setsid()
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.chdir(request["folder"])
    os.environ.update(request["environ"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, *rest = request["arguments"]
    code = 0
    try:
        if kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.argv = rest
            sys.path.insert(0, os.getcwd())
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = request["arguments"]
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException:  # noqa: BLE001 - as the interpreter ends a program
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(modules: list[str]) -> None:
    gc.disable()  # nothing to collect while importing
    sys.path.pop(0)  # the folder of this file
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    assert len(os.listdir("/proc/self/task")) == 1, "a fork keeps one thread only"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _become(json.loads(line))
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1:])
