"""Stands for the ``drk`` command in tests of jobs: a real process that does what its first argument says.

``win`` finds kernels; ``wait`` judges one candidate, then waits for a terminate signal, on which it keeps what it has;
``stubborn`` ignores the signal; ``die`` kills itself; ``refuse`` ends with an error object; ``garble`` writes what no
one expects. ``wait`` and ``stubborn`` have a child, whose process id they write beside the user's file. The address of
the gym is written there as well.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lsp_parts import make_run


def say(event: str, **data: Any) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps({"schema_version": 1, "event": event, **data}) + "\n")
    sys.stdout.flush()


def finish(file: Path, target: str, runs_dir: Path, run: str, code: int) -> None:
    """Write a run with its result, and end."""
    folder = make_run(file, target, run, runs_dir=runs_dir)
    outcome = json.loads((folder / "result.json").read_text())
    outcome["interrupted"] = code == 130
    say("result", result=outcome)
    sys.exit(code)


def main() -> None:
    """Do what is asked."""
    mode, words = sys.argv[1], sys.argv[2:]
    place, _, target = words[1].rpartition(":") if ":" in words[1] else (words[1], "", "")
    file, runs_dir = Path(place), Path(words[words.index("--runs-dir") + 1] if "--runs-dir" in words else place)
    run = f"20260101T14{os.getpid() % 10000:04d}Z-scripted"
    if mode == "refuse":
        error = {"kind": "target", "message": "no inputs are known", "cause": None, "help": "give --input"}
        sys.exit(sys.stdout.write(json.dumps({"schema_version": 1, "status": "error", "error": error}, indent=2)) and 2)
    if mode == "garble":
        sys.stdout.write('{"event": 5}\nnot json\n[1]\n\x00\n')
        sys.exit("drk failed here")
    (file.parent / "leader.pid").write_text(str(os.getpid()))
    (file.parent / "gym.url").write_text(os.environ.get("DRK_GYM_URL", ""))
    say("started", run_dir=str(runs_dir / run), turns=2, samples=2, resumed="--resume" in words)
    say("captured", nodes=3)
    say("judging", turn=1, number=1)
    say("judged", turn=1, sample=0, number=1, best=True, gain="1.50x over compile (95 % interval 1.40 to 1.60)")
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode in ("wait", "stubborn"):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        (file.parent / "child.pid").write_text(str(child.pid))
        if mode == "wait":
            signal.signal(signal.SIGTERM, lambda *_: finish(file, target, runs_dir, run, 130))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say("judging", turn=2, number=2)
        time.sleep(600)
    finish(file, target, runs_dir, run, 0)


if __name__ == "__main__":
    main()
