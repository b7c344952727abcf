"""Evaluations a minute through the KernelGYM-compatible ``/evaluate``, as ``bench_service.py evaluate`` runs it.

Honest kernels that differ in a constant (no verdict cache helps), five trials, timing on against what the route times
by default (eager; ``--reference-backend compile`` adds torch.compile), ``--concurrency`` requests at once.
The service is started here, with its own Valkey, and ends within ``--limit-s`` whatever happens: what was answered by
then is counted over the time it took. The first evaluation (it starts the Reference Runner) is not counted.

GPU lock use is read from the service's own metrics: the time that a GPU was held for timing alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import httpx
from gpu_corpus import REFERENCE, candidate
from gym_service import GymService

READY_S = 150.0
END_S = 20.0


@dataclass(frozen=True)
class Plan:
    """What is run: ``count`` evaluations, ``concurrency`` at once, square inputs of ``size``."""

    device: str = "interpret"
    count: int = 60
    concurrency: int = 16
    limit_s: float = 300.0
    slots: int = 0
    timing_limit_s: float = 0.5
    size: int = 4096
    reference_backend: str = ""


def request_of(plan: Plan, index: int) -> dict[str, Any]:
    """Return the body of an evaluation that no other shares; what is not named has KernelGYM's default."""
    inputs = f"\n\ndef get_inputs():\n    return [torch.randn({plan.size}, {plan.size})]\n"
    source = candidate("return root(x)").replace("root_kernel", f"root_kernel_{index}")
    body = {
        "task_id": f"distinct-{index}",
        "reference_code": REFERENCE + inputs + "\n\ndef get_init_inputs():\n    return []\n",
        "kernel_code": source.replace("+ 1.0)", f"+ 1.0 + 0.0 * {index}.0)"),
    }
    return {**body, "reference_backend": plan.reference_backend} if plan.reference_backend else body


def stop_for_good(service: GymService, seconds: float) -> None:
    """Have this process and the service's end after ``seconds``, whatever they do then."""

    def stop(*_: object) -> None:
        if service.process is not None:
            service.process.kill()  # its children go with it
        os._exit(3)

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)


async def run_evaluate(plan: Plan) -> dict[str, Any]:
    """Start a service, load it, and return what came of it."""
    start = time.monotonic()
    options = ["--insecure-local", "--seeds", "5", "--timing-limit", str(plan.timing_limit_s)]
    options += ["--slots", str(plan.slots)] if plan.slots else []
    service = GymService(*options, device=plan.device, ready=False)
    stop_for_good(service, plan.limit_s)
    deadline = start + plan.limit_s - END_S
    with service:
        service.wait_ready(limit_s=min(READY_S, deadline - time.monotonic()))
        started_s = time.monotonic() - start
        async with httpx.AsyncClient(base_url=service.url, timeout=None) as client:
            limit = httpx.Timeout(deadline - time.monotonic())
            first = (await client.post("/evaluate", json=request_of(plan, 0), timeout=limit)).json()
            before = await counters(client)
            rows, wall_s = await load(client, plan, deadline)
            after = await counters(client)
            workers = (await client.get("/v1/status")).json()["worker_list"]
        assert service.process is not None
        service.process.kill()  # what is still running is not waited for; everything goes with it
    used = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    slots = int(workers[0]["slots"]) if workers else 0
    return {
        "device": plan.device,
        "gpu": workers[0]["gpu"] if workers else "",
        "concurrency": plan.concurrency,
        "slots": slots,
        "timing_limit_s": plan.timing_limit_s,
        "service_started_s": round(started_s, 1),
        "first_evaluation": first["status"],
        **figures(plan, rows, wall_s, used),
    }


async def load(
    client: httpx.AsyncClient, plan: Plan, deadline: float
) -> tuple[list[tuple[float, dict[str, Any]]], float]:
    """Send all requests; return (seconds, answer) of those that were answered in time, and how long that took."""
    todo = iter(range(1, plan.count + 1))
    rows: list[tuple[float, dict[str, Any]]] = []
    start = time.monotonic()
    last = start

    async def send_one_after_the_other() -> None:
        nonlocal last
        for index in todo:
            begun = time.monotonic()
            answer = await client.post("/evaluate", json=request_of(plan, index))
            last = time.monotonic()
            rows.append((last - begun, answer.json() if answer.status_code == 200 else {"status": answer.text[:200]}))
            print(f"{len(rows)} of {plan.count} after {last - start:.1f} s", file=sys.stderr, flush=True)

    senders = [asyncio.create_task(send_one_after_the_other()) for _ in range(plan.concurrency)]
    done, late = await asyncio.wait(senders, timeout=max(deadline - time.monotonic(), 0.0))
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return rows, last - start


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the service's metrics that are plain numbers."""
    text = (await client.get("/metrics")).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def figures(
    plan: Plan, rows: list[tuple[float, dict[str, Any]]], wall_s: float, used: dict[str, float]
) -> dict[str, Any]:
    """Return rates, quantiles, medians of the stages, and the GPU lock's use."""
    verdicts = [row["metadata"]["drk"] for _, row in rows if "drk" in row.get("metadata", {})]
    verdicts = [verdict for verdict in verdicts if "timings_s" in verdict]
    stages = sorted({name for verdict in verdicts for name in verdict["timings_s"]})
    intervals = [
        (one["high"] - one["low"]) / 2 / one["value"]
        for verdict in verdicts
        for one in (verdict["speedups"] or {}).values()
        if one
    ]
    lock_s = sum(value for name, value in used.items() if name.startswith("drk_gym_gpu_lock_seconds_total"))
    seconds = sorted(taken for taken, _ in rows)
    return {
        "answered": len(rows),
        "of": plan.count,
        "completed": sum(row["status"] == "completed" for _, row in rows),
        "correct": sum(bool(row.get("correctness")) for _, row in rows),
        "timed": sum(row.get("kernel_runtime") not in (None, -1.0) for _, row in rows),
        "decoys": sum(bool(row.get("decoy_kernel")) for _, row in rows),
        "cached": sum(bool(row.get("metadata", {}).get("cached")) for _, row in rows),
        "per_minute": round(60 * len(rows) / wall_s, 1) if rows else 0.0,
        "p50_s": round(statistics.median(seconds), 2) if rows else None,
        "p95_s": round(seconds[int(0.95 * (len(seconds) - 1))], 2) if rows else None,
        "wall_s": round(wall_s, 1),
        "stages_p50_s": {
            name: round(statistics.median(verdict["timings_s"].get(name, 0.0) for verdict in verdicts), 3)
            for name in stages
        },
        "speedup_halfwidth_p50": round(statistics.median(intervals), 4) if intervals else None,
        "gpu_lock_share": round(lock_s / wall_s, 3) if wall_s else None,
        "first_refusals": [row["status"] for _, row in rows if row["status"] != "completed"][:3],
    }
