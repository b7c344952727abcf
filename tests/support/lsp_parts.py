"""Stored profiles and runs for tests of the language server: small, but of the same form and by the same code."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from drk.assistant.artefact import HEADER
from drk.assistant.report import (
    Attribution,
    Environment,
    Figure,
    FunctionRow,
    FusionCandidate,
    KernelRow,
    Method,
    ModuleRow,
    Place,
    Report,
    Times,
    Work,
)
from drk.assistant.report_source import SourcePlaces
from drk.assistant.report_store import default_profiles_dir, save_report
from drk.assistant.source_edit import add_kernels, added_lines, unified_diff

MODEL = '''"""A user's file."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x):
        return nn.functional.silu(self.linear(x)) * 2.0


class Net(nn.Module):
    """Two blocks."""

    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x):
        return self.second(self.first(x))


def example_inputs():
    return (torch.randn(16, 32),)
'''
KERNELS = f"{HEADER} for a test\n\n\ndef optimized(thing):\n    return thing\n"
KERNELS_TEST = '"""Written by drk."""\n\n\ndef test_nothing_is_lost():\n    assert True\n'


def times(share: float, calls: int = 20) -> Times:
    """Times of a row with that share of 1 ms."""
    return Times(total_us=1000 * share, share=share, calls=calls, median_us=1000 * share / calls, p95_us=60.0)


def make_report(file: Path, name: str = "20260101T120000Z-net", *, device: str = "NVIDIA H200") -> Report:
    """A report about MODEL (or a text with the same definitions) in ``file``, hashed from what is on disk."""
    places = SourcePlaces(file.parent)
    path = str(file)
    block, net = places.definition(path, "Block"), places.definition(path, "Net")
    forward = places.definition(path, "Block.forward")
    assert block is not None
    assert net is not None
    assert forward is not None
    work = Work("memory", Figure(2e6, "estimated"), Figure(1e6, "estimated"), None, 61.0, 3.3, 2.0)
    rows = (
        ModuleRow(
            "Net", "", "Net", times(0.98), 10.0, Work("unknown", amdahl_bound=None), place=net, target="model.py:Net"
        ),
        ModuleRow(
            "Net.first", "first", "Block", times(0.4), 1.0, work, "Net", 1, place=block, target="model.py:Net.first"
        ),
        ModuleRow(
            "Net.second", "second", "Block", times(0.3), 1.0, work, "Net", 1, place=block, target="model.py:Net.second"
        ),
    )
    kernel = KernelRow("void gemm<float, `32|x`>", "aten::addmm", times(0.5), work, "Net.first", forward)
    ops, saved = ("aten::silu", "aten::mul"), Figure(150.0, "estimated")
    fused = FusionCandidate(ops, "Net.first", forward, 20, 300.0, saved, 1.5, "same shape")
    return Report(
        id=name,
        created="2026-01-01T12:00:00Z",
        title="net",
        verdict="most of the time is in Block",
        root=str(file.parent),
        total_us=1000.0,
        wall_us=1200.0,
        method=Method("call", "device", 10),
        environment=Environment(device, "2.13", "3.7", "3.11"),
        attribution=Attribution(0.98, 0.9),
        kernels=(kernel,),
        modules=rows,
        functions=(FunctionRow("Block.forward", times(0.7), forward, Work("launch", amdahl_bound=3.3)),),
        fusions=(fused,),
    )


def _block(path: str, share: float, work: Work, place: Place) -> ModuleRow:
    return ModuleRow(
        f"Net.{path}", path, "Block", times(share), 1.0, work, "Net", 1, place=place, target=f"model.py:Net.{path}"
    )


def store_profile(file: Path, name: str = "20260101T120000Z-net", **changes: Any) -> Path:
    """Store a report beside ``file``, as ``drk profile`` does."""
    return save_report(default_profiles_dir(file.parent), make_report(file, name, **changes))


def make_run(
    file: Path,
    target: str = "Net",
    name: str = "20260101T130000Z-net",
    *,
    runs_dir: Path | None = None,
    state: str = "ready",
    low: float | None = 1.4,
) -> Path:
    """A run folder about ``file`` as it is on disk: ``ready`` (with artefact), ``no-win`` or ``unfinished``."""
    folder = (runs_dir or file.parent / ".drk" / "runs") / name
    folder.mkdir(parents=True)
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    stem = file.stem
    source = {"root": str(file.parent), "entry": file.name, "sha256": digest}
    _write(folder / "config.json", {"schema_version": 1, "target": f"{file}:{target}", "source": source})
    (folder / "source.bin").write_bytes(data)
    if state == "unfinished":
        return folder
    artefact = None
    if state == "ready":
        edited = add_kernels(data, target=target, kernels_module=f"{stem}_kernels")
        names = {"module": f"{stem}_kernels.py", "test": f"test_{stem}_kernels.py", "diff": f"{stem}.diff"}
        contents = (KERNELS.encode(), KERNELS_TEST.encode(), unified_diff(data, edited, file.name))
        for one, content in zip(names.values(), contents, strict=True):
            (folder / one).write_bytes(content)
        artefact = {key: str(folder / one) for key, one in names.items()}
        edit = {
            "file": str(file),
            "sha256": digest,
            "module": names["module"],
            "test": names["test"],
            "edited": base64.b64encode(edited).decode(),
            "lines": added_lines(data, edited),
        }
        _write(folder / "edit.json", edit)
    _write(folder / "result.json", result(folder, target, artefact, low if state == "ready" else None))
    return folder


def result(folder: Path, target: str, artefact: dict[str, str] | None, low: float | None) -> dict[str, Any]:
    """The result of ``drk optimize``, as far as editors read it."""
    speedups = None
    if low is not None:
        speedups = {"eager": None, "compile": {"value": low + 0.1, "low": low, "high": low + 0.2, "pairs": 20}}
    status = "no-win" if artefact is None else "unmeasured" if low is None else "optimised"
    return {
        "schema_version": 1,
        "status": status,
        "reason": "nothing accepted is faster" if artefact is None else "measured",
        "task": {"name": target, "id": "t", "entry": "model.py", "target": target},
        "best": {"verdict": {"headline": "compile" if low is not None else None, "speedups": speedups}},
        "artefact": artefact,
        "artefact_reason": None,
        "interrupted": False,
        "run_dir": str(folder),
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def titles(actions: list[dict[str, Any]]) -> list[str]:
    return [one["title"] for one in actions]


def call_of(action: dict[str, Any]) -> dict[str, Any]:
    return {"name": action["data"]["command"], **action["data"]["argument"]}


def edited(text: str, edits: list[dict[str, Any]]) -> str:
    lines = text.splitlines(keepends=True)
    for one in sorted(edits, key=lambda edit: -edit["range"]["start"]["line"]):
        low, high = one["range"]["start"], one["range"]["end"]
        assert low["character"] == high["character"] == 0
        lines[low["line"] : high["line"]] = [one["newText"]]
    return "".join(lines)


def make_edit(params: dict[str, Any]) -> None:
    """Make an edit that creates files, on disk."""
    for change in params["edit"]["documentChanges"]:
        path = Path((change.get("textDocument") or change)["uri"].removeprefix("file://"))
        path.write_text(edited(path.read_text(), change["edits"]) if "edits" in change else "")


def files_in(folder: Path) -> set[str]:
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return names - {".drk/.gitignore"}


async def gone(pid: int) -> None:
    for _ in range(600):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            return
        if state == "Z":
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")
