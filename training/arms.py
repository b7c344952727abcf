"""Arms of a study: the settings that each changes, its curves while it runs, and a table over all arms.

Every arm starts from the same checkpoint with the same tasks, in the same order for the same seed, and verdicts are
shared by all of them, so that one answer earns the same everywhere. Arms are compared at equal numbers of steps: as
many as the shortest has. A figure is the mean over the last quarter of those steps, beside that of the first steps;
with several seeds their mean, and the least and greatest of them. Differences to the first arm are taken seed by seed.

Honest limits: with one to three seeds a range is no interval; the table says how many there were.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from drk.assistant.atomic_write import write_atomically

FAMILIES = ("pointwise", "dag", "reduction", "row", "gated", "loss", "linear", "norm", "residual", "modulate")
"""What reinforcement trains on: families whose reference is not dominated by the library's own kernels."""
ARMS: dict[str, dict[str, Any]] = {
    "trloo": {},
    "grpo": {"advantage.estimator": "grpo"},
    "grpo-std": {"advantage.estimator": "grpo", "advantage.scale": "group_std"},
    "trloo-unequal": {"rollout.group_sizes": "unequal"},
    "grpo-unequal": {"rollout.group_sizes": "unequal", "advantage.estimator": "grpo"},
    "no-pr": {"reward.pay_coverage": False, "rejection.prs": "off"},
    "no-mrs": {"rejection.mrs": False},
    "no-honesty": {"reward.pay_dishonest": True},
}
CURVES = (
    "reward/mean", "reward/turn_1", "reward/turn_3", "correct/turn_1", "correct/turn_3", "keep/all", "keep/mrs",
    "keep/prs", "group/size_mean", "group/alone_share", "hack_rate", "mismatch/abs_delta", "entropy", "grad_norm",
    "loss",
)  # fmt: skip
"""Metrics of every run of three turns; a test holds the names to those of a real one."""
GPU_CURVES = ("coverage/mean", "lazy_share", "speedup/mean", "fast@1/turn_1", "fast@1.2/turn_1", "fast@1.2/turn_3")
"""Metrics that only a run with measured speeds has."""
COST_CURVES = ("time/rollout_s", "time/sampling_s", "time/judging_sum_s", "gym/judged", "gym/kept", "step_time")
"""What a step took, where it is known."""
TABLE = (
    "reward/mean", "correct/turn_1", "correct/turn_3", "fast@1.2/turn_1", "fast@1.2/turn_3", "speedup/mean",
    "lazy_share", "coverage/mean", "hack_rate", "entropy", "keep/all",
)  # fmt: skip
"""Columns of the table over arms."""
LARGE_ELEMENTS = 2**21
"""Of a task's largest input: past what a launch costs."""


def gpu_settings(folder: Path, *, tasks: int, speed: str) -> dict[str, Any]:
    """Return settings for judging many candidates a minute on one GPU: ``speed`` is ``device`` or ``timed``.

    References stay loaded, verdicts are shared by all arms in ``folder``, and no candidate is judged at a hidden shape
    (evaluation does that). ``timed`` takes few pairs.
    """
    device = speed == "device"
    return {
        "gym.cache": True, "gym.cache_dir": str(folder), "gym.sessions": tasks, "gym.hidden_shape": False,
        "gym.parallel": 14, "gym.timing": not device, "gym.min_pairs": 6, "gym.max_pairs": 10, "gym.timing_s": 0.2,
        "gym.compile_s": 20.0, "gym.run_s": 10.0, "gym.total_s": 60.0,
        "reward.speed": speed, "reward.bound": "value", "reward.proxy": False, "tasks.least_elements": LARGE_ELEMENTS,
        "rollout.wave_share": 0.5,
    }  # fmt: skip


@dataclass
class ArmRecord:
    """Collects an arm's curve and hands it on every few steps, so that a run that is cut off keeps it.

    ``keep`` takes the facts so far; ``every`` is in steps. ``curve`` may hold what an earlier part of the run wrote:
    steps that come again take its place.
    """

    arm: str
    seed: int
    keep: Callable[[dict[str, Any]], Any]
    every: int = 2
    curve: list[dict[str, float]] = field(default_factory=list)

    def report(self, step: int, numbers: dict[str, float]) -> None:
        """Take one step's metrics; those of a validation are left out."""
        if "loss" not in numbers:
            return
        wanted = (*CURVES, *GPU_CURVES, *COST_CURVES)
        row = {key: numbers[key] for key in wanted if key in numbers}
        self.curve = [*(one for one in self.curve if one["step"] < step), {"step": step, **row}]
        if len(self.curve) % self.every == 0:
            self.keep(self.facts() | {"whole": False})

    def facts(self) -> dict[str, Any]:
        """Return what there is so far."""
        return {"arm": self.arm, "seed": self.seed, "steps": len(self.curve), "curve": self.curve}


def earlier_curve(path: Path) -> list[dict[str, float]]:
    """Return the curve that an earlier part of a run wrote to ``path``, or none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("curve", [])
    except (OSError, ValueError, AttributeError):
        return []
    return [row for row in found if isinstance(row, dict) and "step" in row] if isinstance(found, list) else []


def read_arms(folder: Path) -> list[dict[str, Any]]:
    """Return the results of arms in ``folder`` that have a step, by name; what cannot be read is left out."""
    found = []
    for path in sorted(folder.glob("rl-*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and data.get("curve") and "arm" in data:
            found.append(data)
    return found


def compare_arms(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return figures by arm at equal steps, and differences to the first arm seed by seed.

    ``{"steps", "arms": {arm: {"seeds", "first", "last", "low", "high"}}, "differences": {arm: {metric: [by seed]}}}``;
    a metric that no step of an arm has is absent there.
    """
    if not results:
        return {"steps": 0, "arms": {}, "differences": {}}
    steps = min(len(one["curve"]) for one in results)
    tail = max(1, steps // 4)
    by_arm: dict[str, dict[int, dict[str, Any]]] = {}
    for one in sorted(results, key=_place):
        curve = one["curve"][:steps]
        by_arm.setdefault(one["arm"], {})[int(one["seed"])] = {
            "first": _mean(curve[:tail]),
            "last": _mean(curve[-tail:]),
        }
    arms = {arm: _over_seeds(seeds) for arm, seeds in by_arm.items()}
    base = next(iter(by_arm))
    differences = {arm: _differences(seeds, by_arm[base]) for arm, seeds in by_arm.items() if arm != base}
    return {"steps": steps, "averaged": tail, "base": base, "arms": arms, "differences": differences}


def _place(one: dict[str, Any]) -> tuple[int, int]:
    order = list(ARMS)
    return (order.index(one["arm"]) if one["arm"] in order else len(order), int(one["seed"]))


def _mean(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in TABLE:
        values = [row[name] for row in rows if isinstance(row.get(name), (int, float)) and math.isfinite(row[name])]
        if values:
            found[name] = fmean(values)
    return found


def _over_seeds(seeds: dict[int, dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {"seeds": sorted(seeds)}
    for part, how in (("first", fmean), ("last", fmean), ("low", min), ("high", max)):
        source = "first" if part == "first" else "last"
        names = [name for name in TABLE if any(name in one[source] for one in seeds.values())]
        whole[part] = {
            name: how([one[source][name] for one in seeds.values() if name in one[source]]) for name in names
        }
    return whole


def _differences(mine: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for seed in sorted(mine.keys() & base.keys()):
        for name, value in mine[seed]["last"].items():
            if name in base[seed]["last"]:
                found.setdefault(name, []).append(value - base[seed]["last"][name])
    return found


def arms_table(compared: dict[str, Any]) -> str:
    """Return the comparison as a Markdown table: at the end, and in brackets at the start."""
    if not compared["arms"]:
        return "No arm was run."
    names = [name for name in TABLE if any(name in one["last"] for one in compared["arms"].values())]
    lines = [
        f"At {compared['steps']} steps (mean of the last {compared['averaged']}; of the first in brackets):", "",
        f"| arm | seeds | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}",
    ]  # fmt: skip
    for arm, one in compared["arms"].items():
        cells = [_cell(one, name) for name in names]
        lines.append(f"| {arm} | {len(one['seeds'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(one: dict[str, Any], name: str) -> str:
    if name not in one["last"]:
        return "not measured"
    spread = f" {one['low'][name]:.3g}..{one['high'][name]:.3g}" if len(one["seeds"]) > 1 else ""
    first = f" ({one['first'][name]:.3g})" if name in one["first"] else ""
    return f"{one['last'][name]:.3g}{spread}{first}"


def write_comparison(folder: Path) -> dict[str, Any]:
    """Write ``arms.json`` and ``arms.md`` into ``folder`` and return the comparison."""
    compared = compare_arms(read_arms(folder))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "arms.json", (json.dumps(compared, indent=1) + "\n").encode())
    write_atomically(folder / "arms.md", (arms_table(compared) + "\n").encode())
    return compared
