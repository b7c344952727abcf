"""Evaluations a minute with distinct honest kernels, and the spread of one kernel's speed-up under that load.

    python tests/benchmarks/bench_gym.py --count 60 --parallel 14 --out gym.json

Every candidate is a different source (no verdict cache could help), five seeds, isolated Runners. Two passes: with
correctness and profile only, and with timing too. The second part judges one kernel ten times among the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from results_page import stamp, table

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from gpu_corpus import REFERENCE, candidate

from drk.gym import Candidate, Gym, GymSettings, Task, Timing, Verdict
from drk.gym.schema import Call, TensorSpec

TASK = Task("root", {"model.py": REFERENCE}, "model.py", "Model", inputs=Call((TensorSpec((4096, 4096)),)))


def distinct(index: int) -> Candidate:
    """Return an honest kernel that no other index shares."""
    source = candidate("return root(x)").replace("root_kernel", f"root_kernel_{index}")
    return Candidate(source.replace("+ 1.0)", f"+ 1.0 + 0.0 * {index}.0)"))


async def judged(gym: Gym, candidates: list[Candidate]) -> tuple[list[Verdict], float]:
    """Judge all at once (the gym bounds what runs in parallel); return verdicts and seconds."""
    start = time.perf_counter()
    verdicts = await asyncio.gather(*(gym.evaluate(TASK, item) for item in candidates))
    return list(verdicts), time.perf_counter() - start


def row(name: str, verdicts: list[Verdict], seconds: float, parallel: int) -> dict[str, Any]:
    """Return one table row."""
    stages = sorted({stage for verdict in verdicts for stage in verdict.timings_s})
    medians = {
        f"{stage} s": statistics.median(verdict.timings_s.get(stage, 0.0) for verdict in verdicts) for stage in stages
    }
    accepted = sum(verdict.accepted for verdict in verdicts)
    return {
        "pass": name,
        "in flight": parallel,
        "count": len(verdicts),
        "accepted": accepted,
        "per minute": round(60 * len(verdicts) / seconds, 1),
        **{key: round(value, 3) for key, value in medians.items()},
    }


class LockUse:
    """Seconds for which a gym's GPU was shared (by anybody) and held alone."""

    def __init__(self, gym: Gym) -> None:
        self.seconds = {"shared": 0.0, "alone": 0.0}
        turns = gym._measuring().turns
        turns.sharing = self._watched("shared", turns.sharing)  # type: ignore[method-assign]
        turns.alone = self._watched("alone", turns.alone)  # type: ignore[method-assign]

    def _watched(self, name: str, take: Any) -> Any:
        users, since = 0, 0.0

        @asynccontextmanager
        async def watched() -> AsyncIterator[None]:
            nonlocal users, since
            async with take():
                since = time.perf_counter() if users == 0 else since
                users += 1
                try:
                    yield
                finally:
                    users -= 1
                    if users == 0:
                        self.seconds[name] += time.perf_counter() - since

        return watched

    def shares(self, seconds: float) -> dict[str, float]:
        """Return the shares of ``seconds``."""
        return {f"GPU {name}": round(spent / seconds, 3) for name, spent in self.seconds.items()}


async def measure(count: int, parallel: int, device: str) -> list[dict[str, Any]]:
    """Run all passes."""
    rows = []
    async with Gym(GymSettings(device=device, parallel=1)) as gym:
        await judged(gym, [distinct(0)])
        verdicts, seconds = await judged(gym, [distinct(9000 + index) for index in range(5)])
        rows.append(row("one at a time, with timing", verdicts, seconds, 1))
    for name, timing in (("correctness and profile", Timing(enabled=False)), ("with timing", Timing(max_s=0.5))):
        settings = replace(GymSettings(device=device, parallel=parallel), timing=timing)
        async with Gym(settings) as gym:
            await judged(gym, [distinct(0)])
            use = LockUse(gym)
            verdicts, seconds = await judged(gym, [distinct(index) for index in range(1, count + 1)])
            rows.append({**row(name, verdicts, seconds, parallel), **use.shares(seconds)})
            print(table(rows[-1:]), flush=True)
            if timing.enabled:
                mixed = [distinct(1000 + index // 2 if index % 2 else 5000) for index in range(20)]
                verdicts, seconds = await judged(gym, mixed)
                same = [v.speedups.eager.value for v in verdicts[::2] if v.speedups is not None]
                spread = max(same) / min(same) - 1 if same else float("nan")
                rows.append({**row("same kernel x10", verdicts, seconds, parallel), "spread": round(spread, 4)})
    return rows


def main() -> None:
    """Run, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--parallel", type=int, default=14)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.count, arguments.parallel, arguments.device))
    print(table(rows[-1:]))
    if arguments.out:
        arguments.out.write_text(json.dumps({**stamp(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
