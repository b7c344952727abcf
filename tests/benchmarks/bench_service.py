"""The gym as a service, measured: ``python tests/benchmarks/bench_service.py WHAT`` prints a table and a JSON line.

``faults [--jobs 2000] [--workers 4] [--times 3] [--every-s 4]``: kill -9 of workers, zygotes, API and Valkey at random
while jobs run; 0 may be lost or doubled, all must end. ``overhead [--jobs 40]``: a job by HTTP against the same job in
a Gym of this process (target: <= 25 ms at p50). ``inflight [--jobs 5000]``: the API's memory with that many waiting
requests (target: <= 400 MB). ``scaling [--jobs 60]``: jobs a minute with 1, 2, ... workers, up to the cores.
``evaluate [--device cuda:0] [--concurrency 16] [--count 60] [--limit-s 300]``: evaluations a minute through the
KernelGYM-compatible route, timing on (target: >= 90 on an H200).

All but ``evaluate`` run under the interpreter.
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
from service_evaluate import Plan, run_evaluate
from service_summary import keep

from drk.gym.client import Judged, RemoteGym
from drk.gym.engine import Gym
from drk.gym.errors import HostError
from drk.gym.schema import Candidate, Task
from drk.gym.settings import GymSettings, Timing
from drk.gym.wire import task_from_json

ACCEPT_S = 600.0
UP = ("--insecure-local", "--seeds", "1")
SETTINGS = GymSettings(device="interpret", seeds=1, offline_compile=False, timing=Timing(enabled=False))


def tell(text: str) -> None:
    """Show how far a long benchmark is."""
    print(text, file=sys.stderr, flush=True)


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
                    if len(found) % 100 == 0:
                        tell(
                            f"{len(found)} of {jobs} jobs ended after {time.monotonic() - start:.0f} s; killed {killed}"
                        )
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
    """Time jobs in process and by HTTP, in turns, so that whatever else the machine does slows both."""
    pairs = variants(20 * jobs + 50)[2::10]  # right ones
    inside: list[float] = []
    outside: list[float] = []
    there_and_back: list[float] = []

    async def timed(gym: Gym | RemoteGym, found: list[float]) -> None:
        pair = pairs.pop()
        start = time.perf_counter()
        verdict = await gym.evaluate(*pair)
        found.append((time.perf_counter() - start) * 1e3)
        assert verdict.status == "accepted"

    with GymService(*UP) as service:
        client = httpx.Client(base_url=service.url, timeout=60)
        async with Gym(SETTINGS) as embedded, RemoteGym(service.url, settings=SETTINGS) as remote:
            for gym in (embedded, remote):
                await timed(gym, [])
            for _ in range(jobs):
                await timed(embedded, inside)
                await timed(remote, outside)
                # What does not reach a Runner: the way there and back alone.
                body = {"task": TASK, "candidate": {"source": f"def (\n# {random.random()}"}, "wait_s": 30}
                start = time.perf_counter()
                client.post("/v1/evaluations", json=body).raise_for_status()
                there_and_back.append((time.perf_counter() - start) * 1e3)
    p50_inside, p50_outside = statistics.median(inside), statistics.median(outside)
    return {
        "jobs": jobs,
        "embedded_p50_ms": round(p50_inside, 1),
        "service_p50_ms": round(p50_outside, 1),
        "overhead_p50_ms": round(p50_outside - p50_inside, 1),
        "way_there_and_back_p50_ms": round(statistics.median(there_and_back), 1),
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
        start = time.monotonic()
        for n in range(jobs):
            body = json.dumps({"task": TASK, "wait_s": 600, "candidate": {"source": f"{REFERENCE}# {n}"}})
            head = f"POST /v1/evaluations HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write((head + "Content-Type: application/json\r\n\r\n" + body).encode())
            connections.append((reader, writer))
        status = {"waiting": 0}
        deadline = time.monotonic() + ACCEPT_S
        while status["waiting"] < jobs and time.monotonic() < deadline:
            await asyncio.sleep(1.0)
            status = httpx.get(service.url + "/v1/status", timeout=60).json()
        accepted_s = time.monotonic() - start
        held = resident_mb(service.api()[0])
        for _, writer in connections:
            writer.close()
    return {"in_flight": status["waiting"], "accepted_s": round(accepted_s), "api_mb_idle": before, "api_mb": held}


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


def arguments() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "overhead", "inflight", "scaling", "evaluate"])
    parser.add_argument("--jobs", "--count", type=int, dest="jobs")
    parser.add_argument("--times", type=int, default=1, help="Rounds of it.")
    parser.add_argument("--out", type=Path, help="Write JSON here after each round, beside the other parts' figures.")
    parser.add_argument("--title", default="The gym as a service")
    faults = parser.add_argument_group("faults")
    faults.add_argument("--workers", type=int, default=4)
    faults.add_argument("--every-s", type=float, default=4.0)
    evaluate = parser.add_argument_group("evaluate")
    evaluate.add_argument("--device", default="interpret")
    evaluate.add_argument("--concurrency", type=int, default=16)
    evaluate.add_argument("--limit-s", type=float, default=300.0)
    evaluate.add_argument("--slots", type=int, default=0, help="0: the server's own choice.")
    evaluate.add_argument("--timing-limit", type=float, default=0.5)
    evaluate.add_argument("--size", type=int, default=4096)
    evaluate.add_argument("--reference-backend", default="")
    return parser.parse_args()


async def evaluated(given: argparse.Namespace, jobs: int) -> dict[str, object]:
    """Run the KernelGYM-compatible load."""
    return await run_evaluate(
        Plan(
            given.device,
            jobs,
            given.concurrency,
            given.limit_s,
            given.slots,
            given.timing_limit,
            given.size,
            given.reference_backend,
        )
    )


def main() -> None:
    given = arguments()
    usual = {"faults": 2000, "overhead": 40, "inflight": 5000, "scaling": 60, "evaluate": 60}
    jobs = given.jobs or usual[given.what]
    runs = {
        "faults": lambda: run_faults(jobs, given.workers, given.every_s),
        "overhead": lambda: run_overhead(jobs),
        "inflight": lambda: run_inflight(jobs),
        "scaling": lambda: run_scaling(jobs),
        "evaluate": lambda: evaluated(given, jobs),
    }
    rows: list[dict[str, object]] = []
    for _ in range(given.times):
        rows.append({**asyncio.run(runs[given.what]()), "load_1m": round(os.getloadavg()[0], 1)})
        for name, value in rows[-1].items():
            print(f"{name:<28} {value}")
        print(flush=True)
        if given.out:
            keep(given.out, given.what, rows, given.title)
    print(json.dumps({given.what: rows}))


if __name__ == "__main__":
    main()
