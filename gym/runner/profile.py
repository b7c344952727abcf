"""Device time by kernel in a Runner, with exact attribution, through Triton's own profiler (Proton).

Kineto's first start costs 3.4-3.9 s in a fresh process, Proton's 0.04-0.5 s (DESIGN 4.3), and Runners are always
fresh. Each Triton launch opens a Proton scope named after its function handle, so that device time is attributed by
handle and source file, never by name: an ATen kernel called ``add`` is not the candidate's ``add``. Everything else
that ran on the device (ATen kernels, copies, fills) counts as not owned.

A reference's kernels also carry their place (:mod:`drk.gym.runner.places`); nothing watches a candidate's calls so.

Limits: kernels inside a replayed CUDA graph carry no scope and are told by their exact name; what this process reports
is evidence, not proof, since the code under test lives in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton.profiler as proton

from drk.gym import triton_adapter
from drk.gym.runner import execute
from drk.gym.runner.census import launch_census
from drk.gym.runner.execute import CallOptions
from drk.gym.runner.places import LINE, MODULE, place_scopes
from drk.gym.runner.structure import size_bytes
from drk.gym.runner.training_step import TrainingStep

if TYPE_CHECKING:
    from drk.gym.runner.session import Session

SCOPE = "drk-launch-"
MAX_INPUT_BYTES = 2**30


def profile(session: Session, message: dict[str, Any]) -> dict[str, Any]:
    """Run the module once for each of ``keys`` (fewer if large); answer kernel rows and the owned share."""
    autocast = session.timing_autocast or session.meta.get("autocast")
    trains = bool(session.meta.get("grad"))
    options = CallOptions(autocast=autocast, device=session.device, grad=trains)
    keys = [int(key) for key in message["keys"]]
    calls = [session.draw(keys[0])]
    fitting = MAX_INPUT_BYTES // max(size_bytes(calls[0]), 1)
    calls += [session.draw(key) for key in keys[1:fitting]]
    call: Callable[..., Any] = session.built
    if trains:
        calls = [execute.prepare_inputs(*inputs, options) for inputs in calls]
        call = prepared_step(session, options, calls[0], keys)
    path = session.scratch / "profile"
    owned = {str(session.scratch / "candidate.py")}
    with watched_places(session, options, calls[0]):
        torch.cuda.synchronize()
        session_id = proton.start(str(path), context="shadow", data="tree")
        try:
            with launch_census(owned) as census, launch_scopes(), execute.call_context(options):
                for args, kwargs in calls:
                    call(*args, **kwargs)
                torch.cuda.synchronize()
        finally:
            proton.finalize(session_id)
    launched = {int(row["handle"]): row for row in census.rows()}
    times = device_times(path.with_suffix(".hatchet"))
    own_names = triton_adapter.names_of_their_own(frozenset(owned))
    runs = len(calls)
    calls.clear()
    if session.role == "reference":
        session.tidied()  # others need the memory
    return summary(times, launched, own_names, runs)


def prepared_step(
    session: Session, options: CallOptions, first: tuple[list[Any], dict[str, Any]], keys: list[int]
) -> TrainingStep:
    """Return forward and backward pass as one call, with cotangents drawn beforehand: drawing is not profiled."""
    step = TrainingStep(session.built, session.built)
    with execute.call_context(options):
        step(*first[0], **first[1])
    step.draw(keys)
    return step


@contextmanager
def watched_places(session: Session, options: CallOptions, first: tuple[list[Any], dict[str, Any]]) -> Iterator[None]:
    """Have a reference's calls carry their places, and its state as it was afterwards; nothing for a candidate."""
    if session.role != "reference":
        yield
        return
    with place_scopes(session.built, session.scratch / "src", proton.enter_scope, proton.exit_scope):
        try:
            session.snapshot.restore(session.built)
            with execute.call_context(options):  # what was compiled is compiled anew under the hooks: not profiled
                session.built(*first[0], **first[1])
            yield
        finally:
            session.snapshot.restore(session.built)


@contextmanager
def launch_scopes() -> Iterator[None]:
    """Open a Proton scope, named after the function handle, around each Triton launch."""

    def enter(handle: int, _name: str) -> None:
        proton.enter_scope(f"{SCOPE}{handle}")

    with triton_adapter.watch_launches(enter), triton_adapter.watch_launch_ends(proton.exit_scope):
        yield


@dataclass(frozen=True)
class KernelTime:
    """Device time of one kernel at one place; ``handle`` is that of the Triton launch, if it was one."""

    handle: int | None = None
    name: str = ""
    count: int = 0
    time_us: float = 0.0
    module: str = ""
    source: str = ""


def device_times(file: Path) -> list[KernelTime]:
    """Return a row for each leaf of a profile that Proton wrote."""
    tree = json.loads(file.read_text())
    rows: list[KernelTime] = []
    for root in tree if isinstance(tree, list) else [tree]:
        rows.extend(_leaves(root, KernelTime()))
    return rows


def _leaves(node: Any, above: KernelTime) -> Iterator[KernelTime]:
    if not isinstance(node, dict) or "frame" not in node:
        return
    name = str(node["frame"].get("name", ""))
    if name.startswith(SCOPE):
        above = replace(above, handle=int(name.removeprefix(SCOPE)))
    elif name.startswith(MODULE):
        above = replace(above, module=name.removeprefix(MODULE))
    elif name.startswith(LINE):
        above = replace(above, source=name.removeprefix(LINE))
    metrics = node.get("metrics") or {}
    children = node.get("children") or []
    if not children and metrics.get("time (ns)"):
        yield replace(above, name=name, count=int(metrics.get("count", 1)), time_us=float(metrics["time (ns)"]) / 1e3)
    for child in children:
        yield from _leaves(child, above)


def summary(
    times: list[KernelTime], launched: dict[int, dict[str, Any]], own_names: set[str], runs: int
) -> dict[str, Any]:
    """Return kernel rows (per run) and the owned share; the share is None when nothing was seen.

    A kernel without a launch of its own comes from a replayed graph: it is owned if it bears exactly the name of one of
    the candidate's kernels, which no library kernel does (theirs are C++ names).
    """
    total = sum(row.time_us for row in times)
    rows = []
    owned_us = 0.0
    for row in sorted(times, key=lambda row: -row.time_us):
        facts = launched.get(row.handle, {}) if row.handle is not None else {}
        is_owned = bool(facts.get("owned")) or (row.handle is None and row.name in own_names)
        owned_us += row.time_us if is_owned else 0.0
        rows.append(
            {
                **{key: facts.get(key) for key in ("num_warps", "num_stages", "registers", "spill_bytes")},
                "name": row.name,
                "owned": is_owned,
                "launches": max(round(row.count / runs), 1),
                "time_us": row.time_us / runs,
                "share": row.time_us / total if total else None,
                "grid": facts.get("grid"),
                "shared_bytes": facts.get("shared_bytes"),
                "module": row.module,
                "source": row.source,
            }
        )
    return {"kernels": rows[:200], "coverage": owned_us / total if total else None}
