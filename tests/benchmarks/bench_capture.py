"""What capture costs: ``python tests/benchmarks/bench_capture.py [STEPS] [ROUNDS] [--device cuda] [-o FILE]``.

A training loop runs in processes of its own, alternating plain and with the recorder of ``drk profile --capture`` in
it: on the CPU an MLP with layer norms and AdamW, on a GPU (``--device cuda``) eight transformer blocks under bf16
autocast that read their loss each step. The loop times itself, imports and start-up left out: what counts is the time
from the first step to the program's end, the profiler's window and the writing of its trace included; the same in CPU
time, which other programs on the machine disturb less; and the median step, which lies outside of the window. A table
and a JSON line are printed; ``-o`` writes the JSON. Target: at most 15 % more.

Most of the cost comes once, with the window: ``once_s`` is what remains when the median step's share is taken off, and
``steps_for_target`` how long a loop of such steps must be for the target.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drk.assistant.capture_launch import prepare

TARGET_PERCENT = 15.0
WINDOW_STEPS = 7
MODELS = {
    "cpu": """
torch.set_num_threads(1)
blocks = [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4)]
net = nn.Sequential(*blocks, nn.Linear(512, 10))
x, y = torch.randn(128, 512), torch.randint(10, (128,))
autocast = contextlib.nullcontext()
wait = lambda loss: None
""",
    "cuda": """
block = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
net = nn.Sequential(nn.TransformerEncoder(block, 8, enable_nested_tensor=False), nn.Linear(1024, 10)).cuda()
x, y = torch.randn(16, 512, 1024, device="cuda"), torch.randint(10, (16 * 512,), device="cuda")
autocast = torch.autocast("cuda", dtype=torch.bfloat16)
wait = lambda loss: loss.item()
""",
}
PROGRAM = """
import contextlib, sys, time
import torch
from torch import nn

torch.manual_seed(0)
steps = int(sys.argv[1])
{model}
optimizer = torch.optim.AdamW(net.parameters())

def step():
    with autocast:
        loss = nn.functional.cross_entropy(net(x).reshape(-1, 10), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    wait(loss)

begin, cpu = time.perf_counter(), time.process_time()
laps = []
for _ in range(steps):
    lap = time.perf_counter()
    step()
    laps.append(time.perf_counter() - lap)
recorder = getattr(nn.Module.__call__, "drk_recorder", None)
if recorder is not None:
    recorder.finish()  # what its exit handler does, inside of the time that counts
if recorder is not None and recorder.window.state != "closed":
    raise SystemExit(f"the window is {{recorder.window.state}}: {{recorder.window.reason}} {{recorder.notes}}")
print(time.perf_counter() - begin, time.process_time() - cpu, sorted(laps)[len(laps) // 2], flush=True)
"""
STEPS = {"cpu": 100, "cuda": 600}
ROUNDS = {"cpu": 3, "cuda": 2}


def run(steps: int, device: str, recorded: bool) -> tuple[float, float, float]:
    """Return (seconds of the whole loop, its CPU seconds, median seconds of a step) of one run."""
    with tempfile.TemporaryDirectory() as name:
        environment = dict(os.environ)
        if recorded:
            variables = {"DRK_PROFILE_STEPS": str(WINDOW_STEPS), "DRK_PROFILE_WINDOW_S": "60"}
            environment = prepare(Path(name), "profile_hooks", variables)
        words = [sys.executable, "-c", PROGRAM.format(model=MODELS[device]), str(steps)]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the loop failed ({'recorded' if recorded else 'plain'}): {done.stderr[-2000:]}")
    total, cpu, median = done.stdout.split()[-3:]
    return float(total), float(cpu), float(median)


def measure(steps: int | None = None, rounds: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Alternate plain and recorded runs; return medians and the added time in percent."""
    steps, rounds = steps or STEPS[device], rounds or ROUNDS[device]
    pairs = [(run(steps, device, False), run(steps, device, True)) for _ in range(rounds)]
    added = [statistics.median(recorded[i] / plain[i] for plain, recorded in pairs) - 1 for i in range(3)]
    plain_s, recorded_s = (statistics.median(pair[i][0] for pair in pairs) for i in (0, 1))
    step_s, recorded_step_s = (statistics.median(pair[i][2] for pair in pairs) for i in (0, 1))
    once_s = recorded_s - plain_s - steps * (recorded_step_s - step_s)
    spare_s = (1 + TARGET_PERCENT / 100) * step_s - recorded_step_s
    return {
        "device": device,
        "steps": steps,
        "rounds": rounds,
        "plain_s": round(plain_s, 3),
        "recorded_s": round(recorded_s, 3),
        "median_step_ms": round(1e3 * step_s, 3),
        "added_percent": round(100 * added[0], 1),
        "added_percent_cpu_time": round(100 * added[1], 1),
        "added_percent_median_step": round(100 * added[2], 1),
        "once_s": round(once_s, 3),
        "steps_for_target": max(math.ceil(once_s / spare_s), 0) if spare_s > 0 else None,
        "target_percent": TARGET_PERCENT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?")
    parser.add_argument("rounds", type=int, nargs="?")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("-o", "--out", type=Path)
    options = parser.parse_args()
    row = measure(options.steps, options.rounds, options.device)
    for name, value in row.items():
        print(f"{name:<28} {value!s:>10}")
    print(json.dumps(row))
    if options.out is not None:
        options.out.write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
