"""How long ``drk --help`` takes: ``python tests/benchmarks/bench_startup.py [RUNS]`` prints a table and a JSON line.

Each command runs in fresh processes; the median and the best wall-clock time count. A bare interpreter is the floor.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

TARGET_S = 0.3
DRK = str(Path(sys.executable).with_name("drk"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import typer": [sys.executable, "-c", "import typer"],
    "drk --help": [DRK, "--help"],
    "drk --version": [DRK, "--version"],
    "drk verify --help": [DRK, "verify", "--help"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    rows = {}
    for name, command in COMMANDS.items():
        seconds(command)  # fills byte-code and disk caches
        times = [seconds(command) for _ in range(runs)]
        rows[name] = {"median_s": round(statistics.median(times), 3), "best_s": round(min(times), 3), "runs": runs}
    print(f"{'command':<20} {'median s':>9} {'best s':>9}")
    for name, row in rows.items():
        print(f"{name:<20} {row['median_s']:>9.3f} {row['best_s']:>9.3f}")
    print(f"target for drk --help: {TARGET_S} s")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
