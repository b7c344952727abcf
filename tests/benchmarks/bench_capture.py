"""What capture costs: ``python tests/benchmarks/bench_capture.py [STEPS] [ROUNDS] [-o FILE]``.

A small training loop on the CPU (an MLP with layer norms, AdamW) runs in processes of its own, alternating plain and
with the recorder of ``drk profile --capture`` in it. The loop times itself, imports and start-up left out: what counts
is the time from the first step to the program's end, the profiler's window and the writing of its trace included; the
same in CPU time, which other programs on the machine disturb less; and the median step, which lies outside of the
window. A table and a JSON line are printed; ``-o`` writes the JSON. Target: at most 15 % more.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from drk.assistant.capture_launch import prepare

TARGET_PERCENT = 15.0
WINDOW_STEPS = 7
PROGRAM = """
import sys, time
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
steps = int(sys.argv[1])
blocks = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
net = nn.Sequential(*blocks, nn.Linear(512, 10))
optimizer = torch.optim.AdamW(net.parameters())
x, y = torch.randn(128, 512), torch.randint(10, (128,))

def step():
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

begin, cpu = time.perf_counter(), time.process_time()
laps = []
for _ in range(steps):
    lap = time.perf_counter()
    step()
    laps.append(time.perf_counter() - lap)
recorder = getattr(nn.Module.__call__, "drk_recorder", None)
if recorder is not None:
    recorder.finish()  # what its exit handler does, inside of the time that counts
print(time.perf_counter() - begin, time.process_time() - cpu, sorted(laps)[len(laps) // 2], flush=True)
"""


def run(steps: int, recorded: bool) -> tuple[float, float, float]:
    """Return (seconds of the whole loop, its CPU seconds, median seconds of a step) of one run."""
    with tempfile.TemporaryDirectory() as name:
        environment = dict(os.environ)
        if recorded:
            variables = {"DRK_PROFILE_STEPS": str(WINDOW_STEPS), "DRK_PROFILE_WINDOW_S": "60"}
            environment = prepare(Path(name), "profile_hooks", variables)
        words = [sys.executable, "-c", PROGRAM, str(steps)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    total, cpu, median = done.stdout.split()[-3:]
    return float(total), float(cpu), float(median)


def measure(steps: int, rounds: int) -> dict[str, float | int]:
    """Alternate plain and recorded runs; return medians and the added time in percent."""
    pairs = [(run(steps, False), run(steps, True)) for _ in range(rounds)]
    added = [statistics.median(recorded[i] / plain[i] for plain, recorded in pairs) - 1 for i in range(3)]
    return {
        "steps": steps,
        "rounds": rounds,
        "plain_s": round(statistics.median(plain[0] for plain, _ in pairs), 3),
        "recorded_s": round(statistics.median(recorded[0] for _, recorded in pairs), 3),
        "added_percent": round(100 * added[0], 1),
        "added_percent_cpu_time": round(100 * added[1], 1),
        "added_percent_median_step": round(100 * added[2], 1),
        "target_percent": TARGET_PERCENT,
    }


def main() -> None:
    words = sys.argv[1:]
    out = Path(words.pop(words.index("-o") + 1)) if "-o" in words else None
    numbers = [int(word) for word in words if word.isdigit()]
    row = measure(*(numbers + [100, 3][len(numbers) :])[:2])
    for name, value in row.items():
        print(f"{name:<28} {value:>10}")
    print(json.dumps(row))
    if out is not None:
        out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
