"""What is read from a profile that Proton wrote: times, whose kernels they are, and their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drk.gym.runner.places import LINE, MODULE
from drk.gym.runner.profile import SCOPE, KernelTime, device_times, summary


def node(name: str, *children: Any, time_ns: int = 0, count: int = 1) -> dict[str, Any]:
    metrics = {"time (ns)": time_ns, "count": count} if time_ns else {}
    return {"frame": {"name": name, "type": "function"}, "metrics": metrics, "children": list(children)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    conv = node(f"{MODULE}conv", node(f"{LINE}model.py:7", node("cudnn_conv", time_ns=8_000, count=4)))
    mine = node(f"{SCOPE}77", node("mine", time_ns=4_000, count=2))
    fill = node(f"{LINE}model.py:8", node("fill", time_ns=2_000, count=2), node(f"{LINE}model.py:9"))
    tree = [node("ROOT", node("memset", time_ns=1_000), node(MODULE, conv, mine, fill)), {"device": "CUDA"}]
    path = tmp_path / "profile.hatchet"
    path.write_text(json.dumps(tree))
    return path


def test_leaves_carry_the_scopes_above_them(file: Path) -> None:
    assert device_times(file) == [
        KernelTime(None, "memset", 1, 1.0),
        KernelTime(None, "cudnn_conv", 4, 8.0, "conv", "model.py:7"),
        KernelTime(77, "mine", 2, 4.0),
        KernelTime(None, "fill", 2, 2.0, "", "model.py:8"),
    ]


def test_rows_are_per_call_with_owner_and_place(file: Path) -> None:
    found = summary(device_times(file), {77: {"owned": True, "grid": [3], "num_warps": 4}}, set(), runs=2)
    rows = found["kernels"]
    assert [(row["name"], row["owned"], row["launches"], row["time_us"]) for row in rows] == [
        ("cudnn_conv", False, 2, 4.0),
        ("mine", True, 1, 2.0),
        ("fill", False, 1, 1.0),
        ("memset", False, 1, 0.5),
    ]
    assert [row["share"] for row in rows] == pytest.approx([8 / 15, 4 / 15, 2 / 15, 1 / 15])
    assert (rows[0]["module"], rows[0]["source"]) == ("conv", "model.py:7")
    assert (rows[1]["grid"], rows[1]["num_warps"]) == ([3], 4)
    assert found["coverage"] == pytest.approx(4 / 15)


def test_kernels_of_a_replayed_graph_are_told_by_their_exact_name(file: Path) -> None:
    assert summary(device_times(file), {}, {"fill"}, runs=2)["coverage"] == pytest.approx(2 / 15)
    assert summary([], {}, set(), runs=2) == {"kernels": [], "coverage": None}
