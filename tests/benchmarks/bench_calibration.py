"""How far honest kernels stand from their limits: calibrates the factors k (RMS) and k' (maximum) of the verdict.

    drk eval tests/fixtures/problems --runs-dir runs
    python tests/benchmarks/bench_calibration.py runs --out calibration.json

Reads the verdicts below a folder of runs (each with the errors of candidate and reference against float64) and prints,
for cells above the round-off floor, the quantiles of candidate/reference. A kernel counts once, with its worst cell. A
rejected kernel is listed: it is either wrong, or a reason to change a factor.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from results_page import stamp, table

from drk.gym.compare import K_MAX, K_RMS

QUANTILES = (0.5, 0.9, 0.95, 0.99, 1.0)
FACTORS = {"rms": K_RMS, "max": K_MAX}


def worst_ratios(verdict: dict[str, Any]) -> dict[str, float]:
    """Return the worst candidate/reference error of a verdict where the reference's own error sets the limit."""
    found: dict[str, float] = {}
    for cell in verdict["cells"]:
        for kind, factor in FACTORS.items():
            mine, theirs, limit = cell[kind], cell[f"reference_{kind}"], cell[f"{kind}_limit"]
            if mine is not None and theirs and limit is not None and limit <= 1.001 * factor * theirs:
                found[kind] = max(found.get(kind, 0.0), mine / theirs)
    return found


def kernels_of(folder: Path) -> list[dict[str, Any]]:
    """Return one row per verdict that got as far as a comparison."""
    rows = []
    for path in sorted(folder.rglob("verdicts/*.json")):
        verdict = json.loads(path.read_text())["verdict"]
        if verdict["cells"]:
            name = path.parent.parent.name
            rows.append({"run": name, "status": verdict["status"], "ratios": worst_ratios(verdict), "verdict": verdict})
    return rows


def main() -> None:
    """Print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    kernels = kernels_of(arguments.folder)
    rows = []
    for kind, factor in FACTORS.items():
        values = [row["ratios"][kind] for row in kernels if kind in row["ratios"]]
        shown = dict(zip((f"q{q:g}" for q in QUANTILES), np.quantile(values, QUANTILES), strict=True)) if values else {}
        over = sum(value > factor for value in values)
        told = {name: float(value) for name, value in shown.items()}
        rows.append({"error": kind, "factor": factor, "kernels": len(values), **told, "over": over})
    rejected = [
        f"{row['run']}: {(row['verdict']['error'] or {}).get('message', '')[:200]}"
        for row in kernels
        if row["status"] == "rejected"
    ]
    print(table(rows), *rejected, sep="\n")
    if arguments.out:
        notes = [f"{len(kernels)} kernels reached a comparison, {len(rejected)} of them were rejected", *rejected]
        data = {"title": "Errors of kernels against the reference's own", **stamp(), "rows": rows, "notes": notes}
        arguments.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
