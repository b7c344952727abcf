"""A soak: many evaluations in one Gym, crashes, hangs and floods among them; what is left behind?

    python tests/benchmarks/bench_soak.py --count 1000 --parallel 2 --out soak.json

Every ending is checked against the one that its candidate must get. Before, during and after, the Judge's own process
is counted: descriptors, resident memory, processes below it, scratch folders, and the zygote's memory. One more figure
is an idle Runner's private memory. ``--device cuda:0`` runs the same on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_page import stamp, table

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from crash_corpus import CASES, RIGHT

from drk.gym import Candidate, Gym, GymSettings, Task
from drk.gym.sandbox import descendants
from drk.gym.schema import Call, TensorSpec
from drk.gym.settings import Limits

REFERENCE = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2
"""
TASK = Task("relu2", {"model.py": REFERENCE}, "model.py", "Model", inputs=Call((TensorSpec((8, 33)),)))
LIMITS = Limits(load_s=4, compile_s=4, run_s=4, memory_bytes=2**30, scratch_bytes=2**28)
SLOW = ("timeout",)
MIB = 2**20


def memory_mib(pid: int, field: str) -> float:
    """Return a field of a process's ``smaps_rollup`` in MiB; NaN when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return float("nan")
    return sum(int(value) for value in re.findall(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)) / 1024


def scratch_folders() -> int:
    """Count the Runners' scratch folders."""
    return len(list(Path(tempfile.gettempdir()).glob("drk-*")))


def reading(name: str, gym: Gym, judged: int) -> dict[str, Any]:
    """Count what this process holds now."""
    zygotes = [task.result().process.pid for task in gym._zygotes.values() if task.done()]
    below = descendants(os.getpid())
    return {
        "at": name,
        "judged": judged,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "judge MiB": round(memory_mib(os.getpid(), "Pss"), 1),
        "zygote MiB": round(max((memory_mib(pid, "Rss") for pid in zygotes), default=0.0), 1),
        "processes": len(below),
        "scratch folders": scratch_folders(),
        "asyncio tasks": len(asyncio.all_tasks()),
    }


def mixture(count: int, hangs: int) -> list[tuple[str, Candidate, tuple[str, str, str]]]:
    """Return ``count`` distinct candidates: the crash corpus over and over, what hangs at most ``hangs`` times each."""
    rows: list[tuple[str, Candidate, tuple[str, str, str]]] = []
    waited: Counter[str] = Counter()
    while len(rows) < count:
        for name, source, status, stage, kind in [*CASES, *[("right", RIGHT, "accepted", "", "")] * 20]:
            waited[name] += kind in SLOW
            if waited[name] <= hangs and len(rows) < count:
                marked = source if kind in ("syntax-error", "empty") else f"{source}\n# {len(rows)}\n"
                rows.append((name, Candidate(marked), (status, stage, kind)))
    return rows


async def idle_runner_mib(gym: Gym) -> float:
    """Return the private memory of a Runner that has just come up."""
    runner = await gym.start_runner("candidate", {"candidate.py": b""})
    pids = [runner.pid, *(process.pid for process in descendants(runner.pid))]
    private = sum(memory_mib(pid, "Private_Dirty") + memory_mib(pid, "Private_Clean") for pid in pids)
    await runner.close()
    return round(private, 1)


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Judge everything; return readings, wrong endings and the seconds it took."""
    settings = GymSettings(device=arguments.device, seeds=2, limits=LIMITS, offline_compile=False)
    settings = replace(settings, parallel=arguments.parallel, timing=replace(settings.timing, enabled=False))
    candidates = mixture(arguments.count, arguments.hangs)
    wrong: list[dict[str, Any]] = []
    rows = []
    start = time.monotonic()
    before = scratch_folders()
    async with Gym(settings) as gym:
        await gym.evaluate(TASK, Candidate(RIGHT))
        rows.append(reading("warm", gym, 0))
        idle = await idle_runner_mib(gym)
        for first in range(0, len(candidates), arguments.every):
            part = candidates[first : first + arguments.every]
            verdicts = await asyncio.gather(*(gym.evaluate(TASK, candidate) for _, candidate, _ in part))
            for (name, _, expected), verdict in zip(part, verdicts, strict=True):
                error = verdict.error
                found = (verdict.status, error.stage if error else "", error.kind if error else "")
                if found != expected:
                    wrong.append({"name": name, "expected": list(expected), "found": list(found), "error": str(error)})
            await asyncio.sleep(1.0)
            rows.append(reading(f"{time.monotonic() - start:.0f} s", gym, first + len(part)))
            print(table(rows[-1:]), flush=True)
    rows.append({**reading("closed", gym, len(candidates)), "scratch folders": scratch_folders() - before})
    return {"rows": rows, "wrong": wrong, "idle_runner_mib": idle, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    """Run, print the table, write JSON; exit 1 on a wrong ending."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--every", type=int, default=100, help="evaluations between two readings")
    parser.add_argument("--hangs", type=int, default=10, help="how often each candidate that hangs is taken")
    parser.add_argument("--device", default="interpret")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(soak(arguments))
    kinds = Counter(row["name"] for row in result["wrong"])
    result["notes"] = [
        f"{arguments.count} evaluations in {result['seconds']} s, {len(result['wrong'])} of them with a wrong ending",
        f"an idle Runner holds {result['idle_runner_mib']} MiB of its own",
    ]
    print(table(result["rows"]), *result["notes"], f"wrong: {dict(kinds)}", sep="\n")
    if arguments.out:
        title = "Soak of the gym: crashes, hangs and floods"
        arguments.out.write_text(json.dumps({"title": title, **stamp(), **result}, indent=1) + "\n")
    sys.exit(1 if result["wrong"] else 0)


if __name__ == "__main__":
    main()
