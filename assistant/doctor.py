"""``drk doctor``: what works on this machine, what does not, and how to mend it.

Each check yields rows with a status: ``ok``, ``warn`` (drk works, with less) or ``fail`` (drk cannot do its work). The
command exits 1 when something fails. Triton is tried in processes of its own, so neither torch nor CUDA is ever loaded
here; GPUs are listed without initialising any. What is not checked: whether a kernel launches on the GPU (that needs a
context of a quarter of a second and a free device; ``drk verify`` says so soon enough), clocks, and other users' load.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from drk.assistant.console import Console, Style, console_from, format_table
from drk.assistant.errors import SCHEMA_VERSION, ConfigError, DrkError, ExitCode
from drk.assistant.model_options import model_settings
from drk.assistant.proposers import make_proposer
from drk.assistant.settings import Resolved, Settings, describe_settings, load_settings
from drk.gym import sandbox
from drk.gym.devices import list_gpus

Status = Literal["ok", "warn", "fail"]
MIN_TORCH = (2, 10)
MIN_TRITON = (3, 6)
PROBE_TIMEOUT_S = 120.0
LOW_DISK_BYTES = 2 * 2**30
NO_DISK_BYTES = 200 * 2**20


@dataclass(frozen=True)
class Check:
    """One row: what was looked at, how it is, and the next step when it is not ok."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def check_python() -> Check:
    """Python 3.11 or 3.12."""
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    fix = "" if ok else "make a virtual environment with Python 3.11 or 3.12"
    return Check("python", "ok" if ok else "fail", f"{platform.python_version()} ({sys.executable})", fix)


def check_platform(system: str, machine: str) -> Check:
    """Linux on x86-64 or 64-bit Arm: Triton and the sandbox need it."""
    detail = f"{system} {platform.release()} {machine}"
    if system != "Linux":
        return Check("platform", "fail", detail, "use Linux (on Windows: WSL 2; on macOS: a Linux container)")
    if machine not in ("x86_64", "aarch64"):
        return Check("platform", "fail", detail, "use an x86-64 or 64-bit Arm machine")
    return Check("platform", "ok", detail)


def check_package(name: str, least: tuple[int, int]) -> Check:
    """An installed package of at least version ``least`` (from its metadata; nothing is imported)."""
    wanted = ".".join(map(str, least))
    try:
        found = version(name)
    except PackageNotFoundError:
        return Check(name, "fail", "not installed", f"pip install '{name}>={wanted}'")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    if numbers < least:
        return Check(name, "fail", f"{found}, older than {wanted}", f"pip install --upgrade '{name}>={wanted}'")
    return Check(name, "ok", found)


def run_probe(*words: str, interpret: bool) -> dict[str, Any]:
    """Run :mod:`drk.assistant.compile_probe` with a fresh cache and return its answer, or ``{"error": ...}``."""
    with tempfile.TemporaryDirectory(prefix="drk-doctor-") as folder:
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "TRITON_INTERPRET": "1" if interpret else "0"}
        command = [sys.executable, "-m", "drk.assistant.compile_probe", *words]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environment, check=False
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {PROBE_TIMEOUT_S:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return {
            "error": next((line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\w*:", line)), lines[-1])
        }
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def check_interpreter() -> Check:
    """Triton's interpreter gives the right answer: correctness without a GPU rests on it."""
    answer = run_probe("interpret", interpret=True)
    if answer.get("correct"):
        return Check("triton interpreter", "ok", f"a kernel ran and was right ({answer['seconds']} s)")
    reason = answer.get("error", "the kernel's result was wrong")
    return Check("triton interpreter", "fail", reason, "reinstall torch, triton and numpy as constraints.txt pins them")


def check_compiler_backend(target: str) -> Check:
    """Triton compiles to machine code for ``target`` without that GPU."""
    answer = run_probe("compile", target, interpret=False)
    if answer.get("cubin_bytes"):
        detail = f"{answer['cubin_bytes']} bytes of machine code for {target} ({answer['seconds']} s)"
        return Check("triton compile", "ok", detail)
    fix = "reinstall triton; check the setting `target`"
    return Check("triton compile", "fail", answer.get("error", "no machine code came out"), fix)


def check_gpus() -> list[Check]:
    """List NVIDIA GPUs without initialising them, and see that the installed torch can use them."""
    gpus = list_gpus()
    if not gpus:
        fix = "run on a machine with an NVIDIA GPU and driver to measure speed"
        return [Check("gpu", "warn", "none: logic is checked by the interpreter, speed is not measured", fix)]
    rows = [Check(f"gpu {gpu.index}", "ok", f"{gpu.name} ({gpu.uuid})") for gpu in gpus]
    if check_package("torch", MIN_TORCH).detail.endswith("+cpu"):
        rows.append(Check("torch cuda", "fail", "this torch is a CPU build", "install a CUDA build of torch"))
    return rows


def check_c_compiler() -> Check:
    """A C compiler and Python's headers: Triton builds its launcher with them on a GPU."""
    name = os.environ.get("CC") or next((n for n in ("cc", "gcc", "clang") if shutil.which(n)), "")
    path = shutil.which(name) if name else None
    if path is None:
        return Check("c compiler", "warn", "none found; kernels cannot be launched on a GPU", "install gcc or clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        fix = "install Python's development headers (python3-dev)"
        return Check("c compiler", "warn", f"{path}, but Python.h is missing", fix)
    return Check("c compiler", "ok", path)


def check_sandbox(level: Literal["strict", "standard", "basic"], *, gpu: bool) -> list[Check]:
    """Try each layer of the sandbox once, and say which level this machine reaches."""
    layers = sandbox.probe(gpu=gpu)
    reached = sandbox.achieved_level(layers)
    absent = sandbox.lacking(level, layers)
    fix = f"mend {', '.join(absent)} below, or ask for less: --sandbox {reached}" if absent else ""
    rows = [Check("sandbox", "fail" if absent else "ok", f"level {reached} (asked for: {level})", fix)]
    for name, layer in layers.rows():
        status: Status = "ok" if layer.ok else "warn"
        exposed = f"; exposes: {layer.exposes}" if layer.exposes else ""
        rows.append(Check(f"  {name}", status, layer.detail + exposed, layer.remedy))
    return rows


def check_writable(name: str, folder: Path) -> Check:
    """Create ``folder`` and write a file there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"drk")
    except OSError as error:
        return Check(name, "fail", f"{folder}: {error.strerror}", f"set {name.replace(' ', '-')} to a writable folder")
    return Check(name, "ok", str(folder))


def check_disk(folder: Path) -> Check:
    """Free space where caches and scratch folders go."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free at {existing}"
    if free < NO_DISK_BYTES:
        return Check("disk", "fail", detail, "free some space, or set cache-dir and TMPDIR elsewhere")
    if free < LOW_DISK_BYTES:
        return Check("disk", "warn", detail, "free some space: compile caches take about a gigabyte")
    return Check("disk", "ok", detail)


def check_settings() -> tuple[Check, Settings]:
    """Read the settings; when they are wrong, the other checks go on with the defaults."""
    try:
        resolved = load_settings()
    except ConfigError as error:
        where = f" ({error.file}{f':{error.line}' if error.line else ''})"
        return Check("settings", "fail", error.message + where, error.help), Settings()
    changed = sorted({origin for origin in resolved.origins.values() if origin != "default"})
    return Check("settings", "ok", "from " + (", ".join(changed) or "defaults only")), resolved.settings


def check_model(name: str) -> Check:
    """Whether the proposer that settings name could be asked: extra, key, checkpoint. Nobody is asked here."""
    try:
        proposer = make_proposer(name, model_settings(None, (), None))
    except DrkError as error:
        return Check("proposer", "fail", error.message, error.help)
    where = getattr(proposer, "endpoint", "")
    return Check("proposer", "ok", f"{proposer.name} at {where}" if where else proposer.name)


def examine() -> list[Check]:
    """Run every check and return the rows in reading order. Slow ones (subprocesses) run beside each other."""
    settings_row, settings = check_settings()
    with ThreadPoolExecutor(max_workers=4) as pool:
        interpreter = pool.submit(check_interpreter)
        compiler = pool.submit(check_compiler_backend, settings.target)
        gpus = pool.submit(check_gpus)
        quick = [
            check_python(),
            check_platform(platform.system(), platform.machine()),
            check_package("torch", MIN_TORCH),
            check_package("triton", MIN_TRITON),
        ]
        triton_rows = [interpreter.result(), compiler.result()]
        gpu_rows = gpus.result()
    # The probe forks: the pool's threads are gone by now.
    has_gpu = any(row.name.startswith("gpu ") for row in gpu_rows)
    sandbox_rows = check_sandbox(settings.sandbox, gpu=has_gpu)
    compiler_row = check_c_compiler()
    if compiler_row.status == "warn" and has_gpu:
        compiler_row = replace(compiler_row, status="fail")
    places = [check_writable("cache dir", settings.cache_dir), check_disk(settings.cache_dir)]
    return [
        *quick,
        *triton_rows,
        *gpu_rows,
        compiler_row,
        *sandbox_rows,
        settings_row,
        check_model(settings.model),
        *places,
    ]


def worst(checks: Iterable[Check]) -> Status:
    """Return the worst status among ``checks``."""
    found = {check.status for check in checks}
    return "fail" if "fail" in found else "warn" if "warn" in found else "ok"


def render_checks(checks: list[Check], paint: Callable[..., str]) -> str:
    """Return the rows as text; ``paint(text, *styles)`` colours."""
    styles: dict[Status, Style] = {"ok": "green", "warn": "yellow", "fail": "red"}
    table = format_table(
        [[paint(f"{c.status:4}", styles[c.status]), c.name, " ".join(c.detail.split())] for c in checks]
    )
    lines: list[str] = []
    for check, line in zip(checks, table.splitlines(), strict=True):
        lines.append(line)
        if check.fix:
            lines.append(f"      fix: {check.fix}")
    counts = {status: sum(c.status == status for c in checks) for status in ("ok", "warn", "fail")}
    return "\n".join([*lines, "", ", ".join(f"{counts[status]} {status}" for status in counts)])


def show_settings(console: Console, resolved: Resolved, *, as_json: bool) -> None:
    """Print each setting, its value and its origin."""
    rows = describe_settings(resolved)
    if as_json:
        console.result_json({"schema_version": SCHEMA_VERSION, "settings": rows})
        return
    table = [[row["name"], str(row["value"]), row["origin"], row["about"]] for row in rows]
    console.result(format_table(table, header=("setting", "value", "origin", "meaning")))


def doctor(
    ctx: typer.Context,
    output: Annotated[Literal["text", "json"], typer.Option("--format", help="How to print the answer.")] = "text",
    settings: Annotated[bool, typer.Option("--show-settings", help="Print settings and their origins only.")] = False,
) -> None:
    """Check this machine: Python, torch, Triton, GPUs, sandbox, compiler, cache, disk.

    Exits 1 when a check fails, 0 with warnings only.
    """
    console = console_from(ctx)
    if settings:
        show_settings(console, load_settings(), as_json=output == "json")
        return
    with console.progress("checking this machine (a few seconds) ..."):
        checks = examine()
    status = worst(checks)
    if output == "json":
        rows = [{**asdict(check), "name": check.name.strip()} for check in checks]
        console.result_json({"schema_version": SCHEMA_VERSION, "status": status, "checks": rows})
    else:
        console.result(render_checks(checks, console.style))
    if status == "fail":
        raise typer.Exit(ExitCode.NOT_ACCEPTED)
