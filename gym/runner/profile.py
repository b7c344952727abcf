"""Device time by kernel in a Runner, with exact attribution, through Triton's own profiler (Proton).

Kineto's first start costs 3.4-3.9 s in a fresh process, Proton's 0.04-0.5 s (DESIGN 4.3), and Runners are always
fresh. Each Triton launch opens a Proton scope named after its function handle, so that device time is attributed by
handle and source file, never by name: an ATen kernel called ``add`` is not the candidate's ``add``. Everything else
that ran on the device (ATen kernels, copies, fills) counts as not owned.

Limits: kernels inside a replayed CUDA graph carry no scope and are told by their exact name; what this process reports
is evidence, not proof, since the code under test lives in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton.profiler as proton

from drk.gym import triton_adapter
from drk.gym.runner import execute
from drk.gym.runner.census import launch_census
from drk.gym.runner.execute import CallOptions
from drk.gym.runner.structure import size_bytes

if TYPE_CHECKING:
    from drk.gym.runner.session import Session

SCOPE = "drk-launch-"
MAX_INPUT_BYTES = 2**30


def profile(session: Session, message: dict[str, Any]) -> dict[str, Any]:
    """Run the module once for each of ``keys`` (fewer if large); answer kernel rows and the owned share."""
    options = CallOptions(autocast=session.meta.get("autocast"), device=session.device)
    keys = [int(key) for key in message["keys"]]
    calls = [session.draw(keys[0])]
    fitting = MAX_INPUT_BYTES // max(size_bytes(calls[0]), 1)
    calls += [session.draw(key) for key in keys[1:fitting]]
    path = session.scratch / "profile"
    owned = {str(session.scratch / "candidate.py")}
    torch.cuda.synchronize()
    session_id = proton.start(str(path), context="shadow", data="tree")
    try:
        with launch_census(owned) as census, launch_scopes(), execute.call_context(options):
            for args, kwargs in calls:
                session.built(*args, **kwargs)
            torch.cuda.synchronize()
    finally:
        proton.finalize(session_id)
    launched = {int(row["handle"]): row for row in census.rows()}
    times = device_times(path.with_suffix(".hatchet"))
    own_names = {str(function.fn.__name__) for function in triton_adapter.launchables(frozenset(owned))}
    return summary(times, launched, own_names, len(calls))


@contextmanager
def launch_scopes() -> Iterator[None]:
    """Open a Proton scope, named after the function handle, around each Triton launch."""

    def enter(handle: int, _name: str) -> None:
        proton.enter_scope(f"{SCOPE}{handle}")

    with triton_adapter.watch_launches(enter), triton_adapter.watch_launch_ends(proton.exit_scope):
        yield


def device_times(file: Path) -> list[tuple[int | None, str, int, float]]:
    """Return (handle of the Triton launch or None, kernel name, count, microseconds) for each leaf of a profile."""
    tree = json.loads(file.read_text())
    rows: list[tuple[int | None, str, int, float]] = []
    for root in tree if isinstance(tree, list) else [tree]:
        rows.extend(_leaves(root, None))
    return rows


def _leaves(node: Any, handle: int | None) -> Iterator[tuple[int | None, str, int, float]]:
    if not isinstance(node, dict) or "frame" not in node:
        return
    name = str(node["frame"].get("name", ""))
    if name.startswith(SCOPE):
        handle = int(name.removeprefix(SCOPE))
    metrics = node.get("metrics") or {}
    children = node.get("children") or []
    if not children and metrics.get("time (ns)"):
        yield handle, name, int(metrics.get("count", 1)), float(metrics["time (ns)"]) / 1e3
    for child in children:
        yield from _leaves(child, handle)


def summary(
    times: list[tuple[int | None, str, int, float]],
    launched: dict[int, dict[str, Any]],
    own_names: set[str],
    runs: int,
) -> dict[str, Any]:
    """Return kernel rows (per run) and the owned share; the share is None when nothing was seen.

    A kernel without a launch of its own comes from a replayed graph: it is owned if it bears exactly the name of one of
    the candidate's kernels, which no library kernel does (theirs are C++ names).
    """
    total = sum(time_us for *_, time_us in times)
    rows = []
    owned_us = 0.0
    for handle, name, count, time_us in sorted(times, key=lambda row: -row[3]):
        facts = launched.get(handle, {}) if handle is not None else {}
        is_owned = bool(facts.get("owned")) or (handle is None and name in own_names)
        owned_us += time_us if is_owned else 0.0
        rows.append(
            {
                **{key: facts.get(key) for key in ("num_warps", "num_stages", "registers", "spill_bytes")},
                "name": name,
                "owned": is_owned,
                "launches": max(round(count / runs), 1),
                "time_us": time_us / runs,
                "share": time_us / total if total else None,
                "grid": facts.get("grid"),
                "shared_bytes": facts.get("shared_bytes"),
            }
        )
    return {"kernels": rows[:200], "coverage": owned_us / total if total else None}
