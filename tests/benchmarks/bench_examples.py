"""`drk optimize` on the shipped examples: eager, torch.compile and drk, with intervals and errors.

    python tests/benchmarks/bench_examples.py docs/examples/*.py --out results.json

Runs the command line as a user does and reads its JSON. On a machine without a GPU the speeds are "not measured".
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from results_page import stamp, table


def optimise(path: str, extra: list[str]) -> dict[str, Any]:
    """Run the command on one file and return its JSON with the wall time."""
    command = [sys.executable, "-c", "from drk.assistant.cli import main; main()", "optimize", path]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--format", "json", "--runs-dir", "/tmp/drk-bench-runs", *extra],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.strip():
        raise SystemExit(f"{path}: {done.stderr[-2000:]}")
    return {**json.loads(done.stdout), "wall_s": round(time.perf_counter() - start, 1)}


def row(path: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return one table row."""
    best = found.get("best") or {}
    verdict = best.get("verdict") or {}
    speedups = verdict.get("speedups") or {}
    latencies = verdict.get("baselines_ms") or {}
    cells = [cell for cell in verdict.get("cells", []) if cell.get("reference_rms") is not None]

    def ratio(name: str) -> str:
        found_ratio = speedups.get(name)
        return (
            f"{found_ratio['value']:.3f} [{found_ratio['low']:.3f}, {found_ratio['high']:.3f}]" if found_ratio else "-"
        )

    def ms(value: dict[str, float] | None) -> str:
        return f"{value['median']:.4f}" if value else "-"

    return {
        "example": Path(path).name,
        "status": found["status"],
        "eager ms": ms(latencies.get("eager")),
        "compile ms": ms(latencies.get("compile")),
        "drk ms": ms(verdict.get("latency_ms")),
        "over eager": ratio("eager"),
        "over compile": ratio("compile"),
        "pairs": (speedups.get("eager") or {}).get("pairs", "-"),
        "error (rms)": f"{max((cell['rms'] for cell in cells), default=float('nan')):.2e}",
        "reference's error": f"{max((cell['reference_rms'] for cell in cells), default=float('nan')):.2e}",
        "coverage": verdict.get("coverage"),
        "judged": found.get("turns") if isinstance(found.get("turns"), int) else len(found.get("turns") or []),
        "wall s": found["wall_s"],
    }


def main() -> None:
    """Run, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--max-time", default="90")
    arguments = parser.parse_args()
    results = {path: optimise(path, ["--max-time", arguments.max_time]) for path in arguments.files}
    rows = [row(path, found) for path, found in results.items()]
    print(table(rows))
    if arguments.out:
        environment = next(
            ((found.get("best") or {}).get("verdict", {}).get("environment") for found in results.values()), None
        )
        data = {**stamp(), "environment": environment, "rows": rows, "results": results}
        arguments.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
