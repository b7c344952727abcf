"""The language server's costs: initialise, diagnostics after opening a file, a workspace of 500 files, memory.

Usage: ``python tests/benchmarks/bench_lsp.py [-o FILE]``. Prints a table and writes JSON. Targets: initialise within
1 s of the process's start, diagnostics within 100 ms (p50) of opening a file with a stored profile, no answer later
than 250 ms while 500 files are opened, resident memory at most 120 MB. Times include the operating system's noise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "support"))

from lsp_parts import MODEL, make_run, store_profile
from lsp_wire import WireClient

FILES = 500
OPENINGS = 40


def resident_bytes(pid: int) -> int:
    """Return the peak of a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


async def start(root: Path) -> tuple[WireClient, float]:
    """Start a server and return it with the seconds from the start of its process to its answer."""
    begin = time.perf_counter()
    client = await WireClient.start()
    await client.initialize(root)
    return client, time.perf_counter() - begin


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
    starts = []
    for _ in range(5):
        client, seconds = await start(folder)
        starts.append(seconds)
        await client.stop()
    client, _ = await start(folder)
    opened = await open_times(client, [model] * OPENINGS)
    total, waits = await workspace_times(client, [model, *files])
    await asyncio.sleep(5)  # two looks around with everything open
    assert client.process is not None
    memory = resident_bytes(client.process.pid)
    torch = (await client.command("drk.status"))["torch_imported"]
    await client.stop()
    return {
        "initialize_s": {"min": min(starts), "median": statistics.median(starts)},
        "diagnostics_s": {"p50": statistics.median(opened), "p95": sorted(opened)[int(0.95 * len(opened))]},
        "workspace": {"files": FILES, "open_all_s": total, "slowest_answer_s": max(waits)},
        "peak_memory_bytes": memory,
        "torch_imported": torch,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder)))
    rows = [
        ("initialise, from process start (median of 5)", f"{figures['initialize_s']['median']:.2f} s", "<= 1 s"),
        ("diagnostics after opening, p50", f"{figures['diagnostics_s']['p50'] * 1e3:.1f} ms", "<= 100 ms"),
        ("diagnostics after opening, p95", f"{figures['diagnostics_s']['p95'] * 1e3:.1f} ms", ""),
        (f"opening {FILES} files", f"{figures['workspace']['open_all_s']:.2f} s", ""),
        ("slowest answer meanwhile", f"{figures['workspace']['slowest_answer_s'] * 1e3:.0f} ms", "<= 250 ms"),
        ("peak memory of the server", f"{figures['peak_memory_bytes'] / 1e6:.0f} MB", "<= 120 MB"),
    ]
    for name, value, target in rows:
        print(f"{name:<48} {value:>10}  {target}")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
