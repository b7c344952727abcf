"""The gym as a service, measured: ``python tests/benchmarks/bench_service.py WHAT`` prints a table and a JSON line.

``faults [--jobs 2000] [--workers 4] [--times 3] [--every-s 4]``: kill -9 of workers, zygotes, API and Valkey at random
while jobs run; 0 may be lost or doubled, all must end. ``overhead [--jobs 40]``: a job by HTTP against the same job in
a Gym of this process (target: <= 25 ms at p50). ``inflight [--jobs 5000]``: the API's memory with that many waiting
requests (target: <= 400 MB). ``scaling [--jobs 60]``: jobs a minute with 1, 2, ... workers, up to the cores.

Everything runs under the interpreter, on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

import httpx
from gym_service import REFERENCE, RIGHT, TASK, GymService

from drk.gym.client import Judged, RemoteGym
from drk.gym.engine import Gym
from drk.gym.errors import HostError
from drk.gym.schema import Candidate, Task
from drk.gym.settings import GymSettings, Timing
from drk.gym.wire import task_from_json

UP = ("--insecure-local", "--seeds", "1")
SETTINGS = GymSettings(device="interpret", seeds=1, offline_compile=False, timing=Timing(enabled=False))


def relu_task() -> Task:
    return task_from_json(TASK)


def variants(count: int) -> list[tuple[Task, Candidate]]:
    """Return distinct right candidates; every tenth is a syntax error, every tenth after it wrong."""
    task = relu_task()
    sources = []
    for n in range(count):
        source = RIGHT if n % 10 > 1 else "def (" if n % 10 else RIGHT.replace("torch.relu(x)", "x")
        sources.append(f"{source}\n# variant {n}\n")
    return [(task, Candidate(source)) for source in sources]


def expected(n: int) -> str:
    return "accepted" if n % 10 > 1 else "failed" if n % 10 else "rejected"


async def kill_at_random(service: GymService, every_s: float, killed: dict[str, int]) -> None:
    kinds = {
        "worker": service.workers,
        "zygote": service.zygotes,
        "api": service.api,
        "valkey": service.valkey,
    }
    while True:
        await asyncio.sleep(random.uniform(0.5, 1.5) * every_s)
        name = random.choice(list(kinds))
        pids = kinds[name]()
        if pids:
            os.kill(random.choice(pids), signal.SIGKILL)
            killed[name] = killed.get(name, 0) + 1


async def run_faults(jobs: int, workers: int, every_s: float) -> dict[str, object]:
    """Run ``jobs`` jobs under fire and count what was lost, doubled or judged wrongly."""
    killed: dict[str, int] = {}
    found: dict[int, list[Judged]] = {}
    start = time.monotonic()
    with GymService(*UP, "--workers", str(workers), "--slots", "2") as service:
        service.wait_ready(workers=workers)
        killer = asyncio.create_task(kill_at_random(service, every_s, killed))
        try:
            async with RemoteGym(service.url, settings=SETTINGS, patience_s=120) as gym:
                async for judged in gym.evaluate_many(variants(jobs), in_flight=jobs, fault_retries=0):
                    found.setdefault(judged.index, []).append(judged)
        except HostError:
            print(service.log.read_text()[-6000:], f"killed: {killed}", sep="\n")
            raise
        finally:
            killer.cancel()
        service.wait_ready(workers=1)
        status = httpx.get(service.url + "/v1/status").json()
        metrics = httpx.get(service.url + "/metrics").text
    faults = [row.fault.code if row.fault else "error" for rows in found.values() for row in rows if row.infrastructure]
    wrong = [n for n, rows in found.items() if rows[0].verdict and rows[0].verdict.status != expected(n)]
    finished = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("drk_gym_jobs_finished"))
    return {
        "jobs": jobs,
        "lost": jobs - len(found),
        "doubled": sum(len(rows) > 1 for rows in found.values()),
        "results_written": int(finished),
        "infrastructure_faults": faults,
        "judged_wrongly": len(wrong) - sum(rows[0].infrastructure for n, rows in found.items() if n in wrong),
        "open_at_end": status["waiting"] + status["running"] + status["you"]["open"],
        "killed": killed,
        "seconds": round(time.monotonic() - start, 1),
    }


async def run_overhead(jobs: int) -> dict[str, object]:
    """Time the same jobs, one after the other, in process and by HTTP."""

    async def times(gym: Gym | RemoteGym) -> list[float]:
        pairs = variants(10 * jobs + 10)[2::10]  # right ones
        await gym.evaluate(*pairs[0])
        found = []
        for task, candidate in pairs[1 : jobs + 1]:
            start = time.perf_counter()
            verdict = await gym.evaluate(task, candidate)
            found.append((time.perf_counter() - start) * 1e3)
            assert verdict.status == "accepted"
        return found

    async with Gym(SETTINGS) as embedded:
        inside = await times(embedded)
    queue_ms = []
    with GymService(*UP) as service:
        async with RemoteGym(service.url, settings=SETTINGS) as gym:
            outside = await times(gym)
        client = httpx.Client(base_url=service.url, timeout=60)
        for _ in range(jobs):  # what does not reach a Runner: the way there and back alone
            start = time.perf_counter()
            body = {"task": TASK, "candidate": {"source": f"def (\n# {random.random()}"}, "wait_s": 30}
            client.post("/v1/evaluations", json=body).raise_for_status()
            queue_ms.append((time.perf_counter() - start) * 1e3)
    p50_inside, p50_outside = statistics.median(inside), statistics.median(outside)
    return {
        "jobs": jobs,
        "embedded_p50_ms": round(p50_inside, 1),
        "service_p50_ms": round(p50_outside, 1),
        "overhead_p50_ms": round(p50_outside - p50_inside, 1),
        "way_there_and_back_p50_ms": round(statistics.median(queue_ms), 1),
    }


async def run_inflight(jobs: int) -> dict[str, object]:
    """Hold ``jobs`` waiting requests open and read the API's memory."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with GymService(*UP, "--no-local-workers", ready=False) as service:
        while not service.api():
            await asyncio.sleep(0.1)
        service.wait_answering()
        before = resident_mb(service.api()[0])
        connections = []
        for n in range(jobs):
            body = json.dumps({"task": TASK, "wait_s": 600, "candidate": {"source": f"{REFERENCE}# {n}"}})
            head = f"POST /v1/evaluations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write((head + "Content-Type: application/json\r\n\r\n" + body).encode())
            connections.append((reader, writer))
        status = {"waiting": 0}
        deadline = time.monotonic() + 120
        while status["waiting"] < jobs and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            status = httpx.get(service.url + "/v1/status", timeout=60).json()
        held = resident_mb(service.api()[0])
        for _, writer in connections:
            writer.close()
    return {"in_flight": status["waiting"], "api_mb_idle": before, "api_mb": held}


def resident_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


async def run_scaling(jobs: int) -> dict[str, object]:
    """Count jobs a minute for growing numbers of workers."""
    rates = {}
    for workers in range(1, (os.cpu_count() or 1) + 1):
        with GymService(*UP, "--workers", str(workers), "--slots", "1") as service:
            service.wait_ready(workers=workers)
            async with RemoteGym(service.url, settings=SETTINGS) as gym:
                right = variants(10 * jobs + 50)[2::10]
                async for _ in gym.evaluate_many(right[jobs : jobs + 2 * workers], batch_size=1):
                    pass  # every worker has its Reference Runner
                start = time.monotonic()
                async for judged in gym.evaluate_many(right[:jobs]):
                    assert judged.verdict is not None
                rates[workers] = round(60 * jobs / (time.monotonic() - start), 1)
    return {"jobs": jobs, "jobs_a_minute_by_workers": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["faults", "overhead", "inflight", "scaling"])
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--every-s", type=float, default=4.0)
    given = parser.parse_args()
    jobs = given.jobs or {"faults": 2000, "overhead": 40, "inflight": 5000, "scaling": 60}[given.what]
    runs = {
        "faults": lambda: run_faults(jobs, given.workers, given.every_s),
        "overhead": lambda: run_overhead(jobs),
        "inflight": lambda: run_inflight(jobs),
        "scaling": lambda: run_scaling(jobs),
    }
    rows = [asyncio.run(runs[given.what]()) for _ in range(given.times)]
    for row in rows:
        for name, value in row.items():
            print(f"{name:<28} {value}")
        print()
    print(json.dumps({given.what: rows}))


if __name__ == "__main__":
    main()
