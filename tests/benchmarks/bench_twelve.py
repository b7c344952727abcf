"""`drk optimize` on the twelve user-style files of tests/fixtures/twelve: does each get the right kind of answer?

    python tests/benchmarks/bench_twelve.py --device interpret --out docs/results/twelve-cpu.json
    python tests/benchmarks/bench_twelve.py --device cuda:0 --out docs/results/twelve-h200.json

Runs the commands of the fixtures' README as a user does. The JSON and its page (same name, .md) are written after each
file; what a results file holds already is not run again, and a run that was killed is resumed. Without a GPU speeds
are "not measured" and the right answer is `unmeasured` with an artefact whose own test passes, or a named reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from results_page import page, stamp

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "tests" / "fixtures" / "twelve" / "README.md"
DRK = [sys.executable, "-c", "from drk.assistant.cli import main; main()"]
UNANSWERED = ("crashed", "overrun", "internal", "environment")
"""What ended so is run again."""
MARGIN_S = 600.0
"""A command that overruns its own time budget by this much is ended."""


def commands() -> dict[str, list[str]]:
    """Return the words after ``drk optimize`` of each command in the fixtures' README, by file."""
    lines = [line for line in README.read_text().splitlines() if line.startswith("drk optimize ")]
    words = [shlex.split(line)[2:] for line in lines]
    return {Path(one[0].split(":")[0]).name: one for one in words}


def optimise(words: list[str], runs_dir: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run, or go on with, the command for one file; return its JSON, or its error, with the wall time."""
    started = (runs_dir / "latest").exists()
    target = ["--resume"] if started else words
    flags = ["--device", options.device, "--max-time", str(options.max_time), "--format", "json"]
    flags += ["--seeds", str(options.seeds)] if options.seeds else []
    command = [*DRK, "-q", "optimize", *target, *flags, "--runs-dir", str(runs_dir)]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=options.max_time + MARGIN_S
        )
    except subprocess.TimeoutExpired:
        return {"status": "overrun", "reason": "the command did not end", "wall_s": options.max_time + MARGIN_S}
    wall_s = round(time.perf_counter() - start, 1)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return {"status": "crashed", "reason": done.stderr[-800:], "exit_code": done.returncode, "wall_s": wall_s}
    return {**answer, "exit_code": done.returncode, "wall_s": wall_s}


def artefact_test(answer: dict[str, Any]) -> str:
    """Run the artefact's own pytest file where it lies; return pytest's last line."""
    artefact = answer.get("artefact")
    if not artefact:
        return "-"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, artefact["test"]]
    try:
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=MARGIN_S
        )
    except subprocess.TimeoutExpired:
        return "overrun"
    last = done.stdout.strip().splitlines()[-1:] or ["no output"]
    return last[0].strip("= ").rpartition(" in ")[0] or last[0]


def ratio(speedups: dict[str, Any], name: str) -> str:
    """Return one speed-up with its interval, or a dash."""
    found = speedups.get(name)
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" if found else "-"


def row(name: str, words: list[str], answer: dict[str, Any], tested: str) -> dict[str, Any]:
    """Return one table row."""
    verdict = (answer.get("best") or {}).get("verdict") or {}
    speedups = verdict.get("speedups") or {}
    cells = [cell for cell in verdict.get("cells", []) if cell.get("reference_rms") is not None]
    coverage = verdict.get("coverage")
    worst = max(cells, key=lambda cell: cell["rms"], default={"rms": None, "reference_rms": None})
    error = answer.get("error") or {}
    reason = answer.get("reason") or ": ".join(filter(None, (error.get("message"), error.get("cause"))))
    return {
        "file": name,
        "status": error.get("kind", answer["status"]),
        "evidence": verdict.get("evidence", "-"),
        "over eager": ratio(speedups, "eager"),
        "over compile": ratio(speedups, "compile"),
        "coverage": coverage if coverage is not None else verdict.get("coverage_estimate"),
        "error (rms)": worst["rms"],
        "reference's error": worst["reference_rms"],
        "kernels": len([one for one in verdict.get("kernels", []) if one.get("owned")]),
        "judged": len(answer.get("turns") or []),
        "artefact's test": tested,
        "wall s": answer["wall_s"],
        "reason": " ".join(str(reason).split())[:240],
        "command": shlex.join(["drk", "optimize", *words]),
    }


def write(out: Path, data: dict[str, Any]) -> None:
    """Write the results and their page."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(out.stem, data))


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return what the page says below its table."""
    counts: dict[str, int] = {}
    for one in rows:
        counts[one["status"]] = counts.get(one["status"], 0) + 1
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return [
        f"Answers: {told}.",
        "`needs-gpu`: kernels were found, but the module's weights make them too large for the interpreter.",
        "`unmeasured`: the logic was checked by Triton's interpreter against float64 and compiled for the target;"
        " speed needs a GPU. Coverage is then an estimate from the graph, else the measured share of device time.",
        "The artefact's test is the pytest file that stands beside the written kernels, run as it is.",
    ]


def main() -> None:
    """Run what is missing, and write JSON and page after each file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs-dir", type=Path, default=ROOT / ".drk" / "twelve")
    parser.add_argument("--max-time", type=float, default=120.0)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1, help="Files under way at once.")
    parser.add_argument("--only", nargs="*", help="Names of files; run again even where a result stands.")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    rows = {one["file"]: one for one in known.get("rows", []) if one["status"] not in UNANSWERED}
    environment = known.get("environment")
    wanted = {
        name: words
        for name, words in commands().items()
        if name in (arguments.only or []) or not (arguments.only or name in rows)
    }

    def run(name: str) -> tuple[str, dict[str, Any], str]:
        answer = optimise(wanted[name], arguments.runs_dir / Path(name).stem, arguments)
        return name, answer, artefact_test(answer)

    # Several at once do not spoil the figures: the GPU's lock is held alone while anything is timed.
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in wanted]):
            name, answer, tested = done.result()
            rows[name] = row(name, wanted[name], answer, tested)
            environment = ((answer.get("best") or {}).get("verdict") or {}).get("environment") or environment
            print(f"{name}: {rows[name]['status']} {rows[name]['over eager']} {rows[name]['reason']}", flush=True)
            ordered = [rows[one] for one in commands() if one in rows]
            title = "Twelve user-style files"
            data = {**stamp(), "title": title, "environment": environment, "rows": ordered, "notes": notes(ordered)}
            write(arguments.out, data)


if __name__ == "__main__":
    main()
