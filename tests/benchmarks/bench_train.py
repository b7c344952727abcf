"""Train by reinforcement for a few steps and say where the time went: rollout, gym, update; tokens/s; memory.

    python tests/benchmarks/bench_train.py [--steps 24] [--model FOLDER] [--device auto] [--json FILE]

Without a model, a random one whose tokens are whole kernels is made (8 layers, width 384 by default): it exercises
sampling, the real gym and the update, and its tokens/s say little about a real policy. Measured with one process.

Needs the ``train`` extra. Where torch, transformers, accelerate, peft, pandas and pyarrow are there, the wheels to
add are trl 1.16.0, datasets 5.2.0, dill 0.4.1, multiprocess 0.70.19 and xxhash 4.1.0 (install with --no-deps).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from drk.training.config import load_config
from drk.training.rl import train_rl
from drk.training.train_command import quiet_libraries

METRICS = (
    "step_time", "time/rollout_s", "time/sampling_s", "tokens/completion_mean", "rows/counted", "reward/mean",
    "correct/turn_1", "keep/mrs", "keep/prs", "trajectories/fault_share", "mismatch/abs_delta",
)  # fmt: skip
"""What is read from each step; a test holds the names to those of a real run."""


def overrides(options: argparse.Namespace, folder: str) -> list[str]:
    """Return the settings of the smoke."""
    gpu = torch.cuda.is_available() and options.device != "interpret"
    values: dict[str, Any] = {
        "run.output_dir": folder,
        "run.steps": options.steps,
        "run.save_every": options.steps,
        "model.layers": options.layers,
        "model.width": options.width,
        "model.heads": max(options.width // 64, 2),
        "model.context_tokens": 1024,
        "tasks.count": options.tasks,
        "tasks.families": ["pointwise", "gated", "row", "residual"],
        "tasks.rows": 0 if gpu else 16,
        "rollout.prompts_per_step": options.tasks,
        "rollout.samples_per_prompt": options.samples,
        "gym.device": options.device,
        "gym.parallel": options.parallel,
        "gym.seeds": 2,
        "gym.timing": gpu,
        "gym.cache": options.cache,
        "reward.proxy": not gpu,
        "optimizer.learning_rate": 0.003,
        "optimizer.micro_batches": 1,
        "rejection.low": 0.99,
        "rejection.high": 1.01,
    }
    if options.model:
        values |= {"model.init": "checkpoint", "model.path": options.model, "rollout.max_new_tokens": 512}
    return [f"{name}={json.dumps(value)}" for name, value in values.items()]


def summarise(steps: list[dict[str, float]], seconds: float) -> dict[str, Any]:
    """Return shares of the steps' time, speeds and what learning did."""

    def total(name: str) -> float:
        return sum(step.get(name, 0.0) for step in steps)

    whole, rollout, sampling = total("step_time"), total("time/rollout_s"), total("time/sampling_s")
    tokens = sum(step["tokens/completion_mean"] * step["rows/counted"] for step in steps)
    return {
        "steps": len(steps),
        "seconds": round(seconds, 1),
        "seconds_per_step": round(whole / len(steps), 2),
        "share_sampling": round(sampling / whole, 3),
        "share_gym": round((rollout - sampling) / whole, 3),
        "share_train": round((whole - rollout) / whole, 3),
        "completion_tokens_per_s": round(tokens / sampling, 1) if sampling else None,
        "turns_judged_per_s": round(sum(step["rows/counted"] for step in steps) / (rollout - sampling), 2),
        "peak_gpu_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if torch.cuda.is_available() else None,
        "reward_first": steps[0]["reward/mean"],
        "reward_last": steps[-1]["reward/mean"],
        "correct_first": steps[0]["correct/turn_1"],
        "correct_last": steps[-1]["correct/turn_1"],
        "keep_mrs": round(total("keep/mrs") / len(steps), 3),
        "keep_prs": round(total("keep/prs") / len(steps), 3),
        "fault_share": round(total("trajectories/fault_share") / len(steps), 4),
        "mismatch_abs_delta": total("mismatch/abs_delta") / len(steps),
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--model", default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Run the smoke and print its table."""
    options, steps = parse(), []

    def report(step: int, numbers: dict[str, float]) -> None:
        steps.append(numbers)
        shown = {name: round(numbers.get(name, 0.0), 4) for name in ("loss", "reward/mean", "grad_norm", "step_time")}
        sys.stdout.write(f"{step} {shown}\n")
        sys.stdout.flush()

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        quiet_libraries(),
        contextlib.suppress(KeyboardInterrupt),  # the steps that were made are summed up
    ):
        train_rl(load_config("nano-cpu", overrides(options, f"{folder}/run")), report)
    if not steps:
        sys.exit("interrupted before the first step")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts = {"gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__}
    facts |= {"policy": options.model or f"random, {options.layers} layers, width {options.width}"}
    facts |= summarise(steps, time.monotonic() - begun)
    for name, value in facts.items():
        sys.stdout.write(f"{name:28} {value}\n")
    if options.json:
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
