"""``drk eval`` as a process: a real gym under the interpreter, replayed candidates, resuming."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROBLEM = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2


def get_inputs():
    return [torch.randn(8, 32)]


def get_init_inputs():
    return []
"""

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.maximum(value, 0.0) * {factor}, mask=at < n)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        kernel[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), BLOCK=256)
        return out
"""


def drk(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", "from drk.assistant.cli import main; main()"]
    return subprocess.run([*start, *words], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "relu2.py").write_text(PROBLEM)
    (tmp_path / "suite" / "needs more.py").write_text("import not_there_at_all\n" + PROBLEM)
    rows = [{"source": KERNEL.format(factor=factor)} for factor in ("3.0", "2.0")]
    (tmp_path / "recorded").mkdir()
    (tmp_path / "recorded" / "relu2.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def report_of(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "report.json").read_text())
    data.pop("times")
    return data


def test_an_evaluation_and_its_resumption(suite: Path) -> None:
    words = ["eval", "suite", "--proposer", "replay:recorded", "--turns", "2", "--device", "interpret", "--seeds", "1"]
    done = drk(*words, "--out", "out", cwd=suite)
    assert done.returncode == 0, done.stderr
    data = report_of(suite / "out")
    assert [turn["status"] for turn in data["problems"][0]["samples"][0]["turns"]] == ["rejected", "accepted"]
    assert data["figures"]["eager"]["best_of_history"]["correct"] == 1.0
    assert data["figures"]["eager"]["best_of_history"]["fast_at"]["1"] is None
    assert "speed not measured" in done.stdout
    assert (data["counts"]["problems"], data["counts"]["unusable"], data["status"]) == (1, 1, "complete")
    assert "unusable: needs more: the reference cannot be judged: importing" in done.stdout
    assert "No module named 'not_there_at_all'" in done.stdout
    assert (suite / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert drk(*words, "--out", "out", cwd=suite).returncode == 2
    again = drk("eval", "suite", "--resume", "--out", "out", "--format", "json", cwd=suite)
    assert again.returncode == 0, again.stderr
    assert report_of(suite / "out") == data
    assert json.loads(again.stdout)["status"] == "complete"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["absent"], "no problems at"),
        (["suite", "--resume"], "there is no evaluation"),
        pytest.param(
            ["suite", "--proposer", "openai:m", "--device", "interpret"],
            "OPENAI_API_KEY is not set",
            marks=pytest.mark.skipif(find_spec("openai") is None, reason="the llm extra is not installed"),
        ),
        (["suite", "--proposer", "openai:m", "--model-option", "temprature=1"], "did you mean 'temperature'?"),
        (["suite", "--proposer", "openai:m", "--base-url", "ftp://x"], "--base-url is no http"),
    ],
    ids=range(5),
)
def test_what_is_wrong_is_said_at_once(
    suite: Path, words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_API_KEY_FILE", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    done = drk("eval", *words, cwd=suite)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (suite / ".drk" / "evals").exists()
