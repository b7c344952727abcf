"""A/A test of the stop-watch: candidate and reference are the same code; how often does the interval contain 1?

    python tests/benchmarks/bench_aa.py --runs 200 --limit-s 120 --out aa.json

Each run takes a fixed 100 pairs with the gym's own procedure (interleaved, fresh values, cold L2) and its 95 %
bootstrap interval; a fresh candidate process takes over every ``--block`` runs, so that a bias that one process keeps
(where its memory lies) is seen. Three kernels, of about 10 us, 100 us and 5 ms. ``--limit-s`` bounds each kernel's
time; fewer runs are then reported as fewer. With 200 runs, 184 to 197 intervals should contain 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_page import stamp, table

from drk.gym import Candidate, Gym, GymSettings, Task, Timing
from drk.gym.judge import Evaluation
from drk.gym.measure import Contest, Measurement
from drk.gym.schema import Call, TensorSpec

RELU = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
"""
PRODUCTS = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4096, 4096)
        self.second = torch.nn.Linear(4096, 4096)

    def forward(self, x):
        return self.second(self.first(x))
"""
KERNELS = {
    "10 us": (RELU, (4 * 2**20,)),
    "100 us": (RELU, (52 * 2**20,)),
    "5 ms": (PRODUCTS, (4096, 4096)),
}
PAIRS = 100
TIMING = Timing(min_pairs=PAIRS, max_pairs=PAIRS, max_s=600.0, compile_baseline=False)


async def block_of_runs(
    gym: Gym, task: Task, candidate: Candidate, runs: int, deadline: float
) -> list[tuple[float, float, float, float]]:
    """Measure ``runs`` times with one candidate process; return (value, low, high, latency in us) of each."""
    evaluation = Evaluation(gym, task, candidate)
    owner = Measurement(gym.gpu.uuid if gym.gpu is not None else "none", TIMING)
    found = []
    async with gym.using(task) as session:
        runner = await evaluation._start()
        try:
            await evaluation._load(runner, session)
            while len(found) < runs and time.monotonic() < deadline:
                async with owner.turns.alone(), session.lock:
                    contest = Contest(owner, evaluation, runner, session)
                    await contest.warm_up()
                    await contest.run()
                    contest.conclude()
                speedups, latency = evaluation.draft.speedups, evaluation.draft.latency_ms
                assert speedups is not None and speedups.eager is not None and latency is not None
                ratio = speedups.eager
                found.append((ratio.value, ratio.low, ratio.high, latency.median * 1e3))
        finally:
            await runner.close()
    return found


async def kernel_row(gym: Gym, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return one kernel's row."""
    source, shape = KERNELS[name]
    task = Task(name.replace(" ", ""), {"model.py": source}, "model.py", "Model", inputs=Call((TensorSpec(shape),)))
    candidate = Candidate(source.replace("Model", "ModelNew"))
    deadline = time.monotonic() + arguments.limit_s
    found: list[tuple[float, float, float, float]] = []
    start = time.monotonic()
    while len(found) < arguments.runs and time.monotonic() < deadline:
        size = min(arguments.block, arguments.runs - len(found))
        found += await block_of_runs(gym, task, candidate, size, deadline)
    values = sorted(value for value, *_ in found)
    return {
        "kernel": name,
        "measured us": statistics.median(row[3] for row in found),
        "runs": len(found),
        "contain 1": sum(low <= 1.0 <= high for _, low, high, _ in found),
        "share": sum(low <= 1.0 <= high for _, low, high, _ in found) / len(found),
        "median ratio": statistics.median(values),
        "lowest": values[0],
        "highest": values[-1],
        "half-width": statistics.median((high - low) / 2 for _, low, high, _ in found),
        "s": round(time.monotonic() - start, 1),
    }


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all kernels."""
    settings = replace(GymSettings(device=arguments.device, seeds=2), timing=TIMING)
    rows = []
    async with Gym(settings) as gym:
        for name in KERNELS:
            rows.append(await kernel_row(gym, name, arguments))
            print(table(rows[-1:]), flush=True)
            if arguments.out:
                title = "A/A test: candidate and reference are the same code"
                text = json.dumps({"title": title, **stamp(), "pairs": PAIRS, "rows": rows}, indent=1)
                arguments.out.write_text(text + "\n")
    return rows


def main() -> None:
    """Run, print the table, write JSON after each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--block", type=int, default=25, help="runs with one candidate process")
    parser.add_argument("--limit-s", type=float, default=120.0, help="time for each kernel")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    print(table(asyncio.run(measure(parser.parse_args()))))


if __name__ == "__main__":
    main()
