"""The language server's costs: initialise, diagnostics after opening a file, a workspace of 500 files, memory.

    python tests/benchmarks/bench_lsp.py                                   prints a table
    python tests/benchmarks/bench_lsp.py -o docs/results/lsp-cpu.json      and writes JSON and the page beside it

Targets: initialise within 1 s of the process's start, diagnostics within 100 ms (p50) of opening a file with a stored
profile, no answer later than 250 ms while 500 files are opened, resident memory at most 120 MB. What Python needs for
the protocol alone (importing pygls, which no server goes below) is measured in turn with the starts, since all of these
times move with what else the machine does; the load average is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from lsp_parts import MODEL, make_run, store_profile
from lsp_wire import WireClient
from results_page import page, stamp, table

FILES = 500
OPENINGS = 40
STARTS = 15


def resident_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def import_s() -> tuple[float, float]:
    """Return the seconds of a process that only imports the protocol, by the clock and of the processor."""
    before, begin = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-P", "-c", "import pygls.lsp.server"], check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - begin, used


async def start(root: Path) -> tuple[WireClient, float]:
    """Start a server and return it with the seconds from the start of its process to its answer."""
    begin = time.perf_counter()
    client = await WireClient.start(stderr=subprocess.DEVNULL)
    await client.initialize(root)
    return client, time.perf_counter() - begin


async def start_times(folder: Path, model: Path) -> list[dict[str, float]]:
    """Return the seconds of each start: to the answer, of the processor until then, to the first diagnostics; and of
    the import alone."""
    found = []
    for _ in range(STARTS):
        (imported, import_used), begin = import_s(), time.perf_counter()
        client, answered = await start(folder)
        assert client.process is not None
        used = processor_s(client.process.pid)
        await client.diagnostics(client.open(model))
        shown = time.perf_counter() - begin
        one = {"initialize": answered, "processor": used, "diagnostics": shown}
        found.append({**one, "import": imported, "import_processor": import_used})
        await client.stop()
    return found


async def open_times(client: WireClient, files: list[Path]) -> list[float]:
    """Return the seconds from opening each file to its diagnostics."""
    found = []
    for file in files:
        since, begin = len(client.seen), time.perf_counter()
        uri = client.open(file)
        await client.diagnostics(uri, since)
        found.append(time.perf_counter() - begin)
        client.notify("textDocument/didClose", {"textDocument": {"uri": uri}})
        await client.command("drk.status")
    return found


async def workspace_times(client: WireClient, files: list[Path]) -> tuple[float, list[float]]:
    """Open all files at once; return the seconds until all are open, and of a request asked every 20 ms meanwhile."""
    begin = time.perf_counter()
    waits = []
    for number, file in enumerate(files):
        uri = client.open(file)
        if number % 25 == 0:
            asked = time.perf_counter()
            await client.actions(uri, 15)
            waits.append(time.perf_counter() - asked)
            await asyncio.sleep(0.02)
    await client.command("drk.status")
    return time.perf_counter() - begin, waits


async def measure(folder: Path) -> dict[str, Any]:
    """Return all figures."""
    files = []
    for number in range(FILES):
        file = folder / f"part_{number // 50}" / f"model_{number}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(MODEL)
        files.append(file)
    model = folder / "model.py"
    model.write_text(MODEL)
    store_profile(model)
    for number in range(30):
        make_run(model, name=f"20260101T13{number:04d}Z-net")
    starts = await start_times(folder, model)
    client, _ = await start(folder)
    opened = await open_times(client, [model] * OPENINGS)
    total, waits = await workspace_times(client, [model, *files])
    await asyncio.sleep(5)  # two looks around with everything open
    assert client.process is not None
    memory = resident_bytes(client.process.pid)
    torch = (await client.command("drk.status"))["torch_imported"]
    await client.stop()
    return {
        "starts_s": starts,
        "diagnostics_s": {"p50": statistics.median(opened), "p95": sorted(opened)[int(0.95 * len(opened))]},
        "workspace": {"files": FILES, "open_all_s": total, "slowest_answer_s": max(waits)},
        "peak_memory_bytes": memory,
        "torch_imported": torch,
    }


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table: each figure with its target, and whether it was met."""
    starts = {name: [one[name] for one in figures["starts_s"]] for name in figures["starts_s"][0]}
    opened, space = figures["diagnostics_s"], figures["workspace"]
    told = [
        (f"initialise, from process start, median of {STARTS} (s)", statistics.median(starts["initialize"]), 1.0),
        (f"the same, least of {STARTS} (s)", min(starts["initialize"]), None),
        ("the same, processor time, median (s)", statistics.median(starts["processor"]), None),
        ("the same, processor time, least (s)", min(starts["processor"]), None),
        ("importing pygls alone, median (s)", statistics.median(starts["import"]), None),
        ("importing pygls alone, processor time, median (s)", statistics.median(starts["import_processor"]), None),
        ("importing pygls alone, processor time, least (s)", min(starts["import_processor"]), None),
        ("first diagnostics, from process start, median (s)", statistics.median(starts["diagnostics"]), None),
        ("diagnostics after opening, p50 (ms)", opened["p50"] * 1e3, 100.0),
        ("diagnostics after opening, p95 (ms)", opened["p95"] * 1e3, None),
        (f"opening {FILES} files (s)", space["open_all_s"], None),
        ("slowest answer meanwhile (ms)", space["slowest_answer_s"] * 1e3, 250.0),
        ("peak memory of the server (MB)", figures["peak_memory_bytes"] / 1e6, 120.0),
    ]
    return [
        {"what": what, "measured": value, "at most": limit, "met": None if limit is None else value <= limit}
        for what, value, limit in told
    ]


def load_text() -> str:
    """Return the load average of the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--note", action="append", default=[], help="what readers should know of the machine")
    arguments = parser.parse_args()
    before = load_text()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    rows = rows_of(figures)
    print(table(rows))
    notes = [
        f"Load average (1 min) before {before}, after {load_text()}, with {os.cpu_count()} processors.",
        "Initialise is mostly the import of the protocol's types (lsprotocol makes 550 classes when it is imported).",
        "A first diagnostic also waits for the import of what reads profiles; later ones do not.",
        f"torch was imported by the server: {'yes' if figures['torch_imported'] else 'no'}.",
        *arguments.note,
    ]
    environment = {"python": platform.python_version(), "pygls": version("pygls"), "platform": platform.platform()}
    data = {**stamp(), "title": "The language server", "environment": environment, "rows": rows, "notes": notes}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**data, "figures": figures}, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(page(arguments.output.stem, data))


if __name__ == "__main__":
    main()
