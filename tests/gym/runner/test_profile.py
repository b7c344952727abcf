"""What is read from a profile that Proton wrote: times, whose kernels they are, and their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drk.gym.runner import profile
from drk.gym.runner.places import LINE, MODULE
from drk.gym.runner.profile import SCOPE, KernelTime, device_times, summary
from drk.gym.runner.session import Session


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


class StandIn:
    """Proton's part on a CPU: what runs inside a line's scope becomes one kernel of 1 us, while profiling is on."""

    def __init__(self) -> None:
        self.on = False
        self.scopes: list[str] = []
        self.times_ns: dict[tuple[str, ...], int] = {}

    def start(self, path: str, **_: Any) -> int:
        self.on, self.path = True, path
        return 7

    def enter_scope(self, name: str) -> None:
        if self.on:
            self.scopes.append(name)

    def exit_scope(self) -> None:
        if self.on:
            if self.scopes[-1].startswith(LINE):
                self.times_ns[tuple(self.scopes)] = self.times_ns.get(tuple(self.scopes), 0) + 1000
            self.scopes.pop()

    def finalize(self, session_id: int) -> None:
        assert (session_id, self.scopes) == (7, [])
        self.on = False
        roots = []
        for scopes, time_ns in self.times_ns.items():
            made = node("kernel", time_ns=time_ns, count=time_ns // 1000)
            for name in reversed(scopes):
                made = node(name, made)
            roots.append(made)
        Path(f"{self.path}.hatchet").write_text(json.dumps(roots))


MODEL = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return torch.relu(self.norm(x))
"""


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_only_a_reference_is_watched_and_left_as_it_was(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.py").write_text(MODEL)
    space: dict[str, Any] = {"__name__": "model"}
    exec(compile(MODEL, str(tmp_path / "src" / "model.py"), "exec"), space)
    session = Session("gpu", role, tmp_path, -1)
    session.meta = {"mode": "train"}
    session.adopt(space["Model"]())
    before = {key: value.clone() for key, value in session.built.state_dict().items()}
    monkeypatch.setattr(session, "draw", lambda key: ([torch.full((2, 4), float(key))], {}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profile, "proton", StandIn())
    found = profile.profile(session, {"keys": [1, 2, 3]})
    after = session.built.state_dict()
    if role == "candidate":
        assert found == {"kernels": [], "coverage": None}
        assert after["norm.num_batches_tracked"] == 3
        return
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    rows = {(row["module"], row["source"]): row for row in found["kernels"]}
    assert set(rows) == {("", "model.py:10"), ("norm", "model.py:10")}
    assert (rows["", "model.py:10"]["launches"], rows["", "model.py:10"]["time_us"]) == (1, 1.0)
