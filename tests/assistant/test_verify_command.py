"""``drk verify``: real candidates judged by the real gym under the interpreter, and every way not to get that far."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drk.assistant.cli import run
from drk.assistant.errors import TargetError
from drk.assistant.verify_command import EXIT_CODES, read_candidate
from drk.gym.sandbox import descendants
from drk.gym.wire import verdict_from_json

Capture = pytest.CaptureFixture[str]

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self, n: int = 64):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x):
        return F.silu(x + self.bias)

def example_inputs():
    return (torch.randn(32, 64),)
"""

CANDIDATE = """
import torch
import triton
import triton.language as tl
from torch import nn

@triton.jit
def bias_silu_kernel(x_ptr, bias_ptr, out_ptr, n, n_cols, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets % n_cols, mask=mask)
    tl.store(out_ptr + offsets, x * tl.sigmoid(x), mask=mask)

class ModelNew(nn.Module):
    def __init__(self, n: int = 64):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(n))

    def forward(self, x):
        x = x.contiguous()
        out = torch.empty_like(x)
        grid = (triton.cdiv(x.numel(), 256),)
        bias_silu_kernel[grid](x, self.bias, out, x.numel(), x.shape[-1], BLOCK=256)
        return out
"""

ENDLESS = CANDIDATE.replace(
    "x = x.contiguous()", "import ctypes, time; ctypes.CDLL(None).prctl(15, b'endless', 0, 0, 0); time.sleep(1000)"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "good.py").write_text(CANDIDATE)
    (tmp_path / "wrong.py").write_text(CANDIDATE.replace("x * tl.sigmoid(x)", "x"))
    (tmp_path / "broken.py").write_text(CANDIDATE.replace("torch.empty_like", "torch.empty_lik"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_right_candidate_is_accepted(folder: Path, capsys: Capture) -> None:
    before = sorted(folder.iterdir())
    assert run(["verify", "model.py", "good.py", "--device", "interpret", "--seeds", "2", "--format", "json"]) == 0
    captured = capsys.readouterr()
    verdict = verdict_from_json(json.loads(captured.out))
    assert (verdict.status, verdict.correct, verdict.evidence) == ("accepted", True, "interpreter")
    assert verdict.speedups is None
    assert verdict.coverage is None
    assert [row.name for row in verdict.kernels] == ["bias_silu_kernel"]
    assert len(verdict.cells) >= 2
    assert verdict.repro
    assert sorted(folder.iterdir()) == before, "nothing may appear in the user's folder"
    assert "judging" in captured.err


def test_a_wrong_candidate_is_rejected_in_words(folder: Path, capsys: Capture) -> None:
    argv = [
        "verify",
        "model.py:Net",
        "wrong.py",
        "--device",
        "interpret",
        "--seeds",
        "1",
        "--input",
        "f32[16,64]",
        "-q",
    ]
    assert run(argv) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("rejected: wrong result (reached: ran under the interpreter)\n  wrong in: ")
    assert "x over" not in captured.out
    assert captured.err == ""


def test_a_crashing_candidate_fails_with_its_line(folder: Path, capsys: Capture) -> None:
    assert run(["verify", "model.py", "broken.py", "--device", "interpret", "--seeds", "1"]) == 1
    out = capsys.readouterr().out
    line = next(i for i, text in enumerate((folder / "broken.py").read_text().splitlines(), 1) if "empty_lik(" in text)
    assert out.startswith("failed: run stage, exception")
    assert f"  --> broken.py:{line}\n" in out
    assert f"    > {line} |         out = torch.empty_lik(x)" in out


def test_a_reference_that_fails_is_an_error_in_the_users_file(folder: Path, capsys: Capture) -> None:
    (folder / "model.py").write_text(MODEL.replace("F.silu(x", "F.siluu(x"))
    line = next(i for i, text in enumerate(MODEL.splitlines(), 1) if "F.silu(x" in text)
    assert run(["verify", "model.py", "good.py", "--device", "interpret", "--format", "json"]) == 2
    error = json.loads(capsys.readouterr().out)
    assert error["status"] == "error"
    assert "siluu" in error["error"]["message"] + str(error["error"]["cause"])
    assert Path(error["error"]["file"]).name == "model.py"
    assert error["error"]["line"] == line


@pytest.mark.parametrize(
    ("argv", "kind", "text"),
    [
        (["nowhere.py", "good.py"], None, "nowhere.py"),
        (["model.py", "nowhere.py"], "candidate-unreadable", "the candidate cannot be read"),
        (["model.py", "."], "candidate-folder", "the candidate is a folder"),
        (["model.py:Nett", "good.py"], None, "Nett"),
        (["model.py", "good.py", "--seeds", "0"], "config", "--seeds must be from 1 to 1000, not 0"),
        (["model.py", "good.py", "--seeds", "many"], "usage", "--seeds"),
        (["model.py", "good.py", "--precision", "stric"], "config", "--precision must be one of"),
        (["model.py", "good.py", "--device", "gpu"], "config", "--device must be auto, interpret or cuda:N"),
        (["model.py", "good.py", "--mode", "test"], "usage", "--mode"),
        (["model.py", "good.py", "--input", "f99[3]"], None, "f99"),
        (["model.py"], "usage", "Missing argument"),
    ],
)
def test_what_cannot_be_judged_is_an_error(
    folder: Path, argv: list[str], kind: str | None, text: str, capsys: Capture
) -> None:
    assert run(["verify", *argv, "--format", "json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert kind is None or error["kind"] == kind
    assert text in json.dumps(error)
    assert captured.err == ""


def test_a_device_that_is_not_there(folder: Path, capsys: Capture) -> None:
    assert run(["verify", "model.py", "good.py", "--device", "cuda:99", "--format", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "device"


def test_ctrl_c_ends_with_130_and_leaves_no_process(folder: Path) -> None:
    (folder / "endless.py").write_text(ENDLESS)
    command = [str(Path(sys.executable).with_name("drk")), "verify", "model.py", "endless.py", "--device", "interpret"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    seen: set[int] = set()
    while child.poll() is None and not any(named(pid, "endless") for pid in seen):
        seen = {process.pid for process in descendants(child.pid)}
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out == ""
    assert "error: interrupted" in err
    assert "Traceback" not in err
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in seen) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in seen if Path(f"/proc/{pid}").exists()] == []


def named(pid: int, name: str) -> bool:
    """Say whether a process has given itself this name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def test_candidates_are_decoded_as_python_would(tmp_path: Path) -> None:
    path = tmp_path / "c.py"
    path.write_bytes("# coding: latin-1\n# caf\u00e9\n".encode("latin-1"))
    assert read_candidate(path) == "# coding: latin-1\n# caf\u00e9\n"
    path.write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert read_candidate(path) == "x = 1\n"
    for raw in (b"# \xff\n", b"# coding: klingon\n"):
        path.write_bytes(raw)
        with pytest.raises(TargetError, match="not Python text"):
            read_candidate(path)
    path.write_bytes(b"#" * (4 * 2**20 + 1))
    with pytest.raises(TargetError, match="larger than"):
        read_candidate(path)


def test_every_status_has_an_exit_code() -> None:
    assert {status: int(code) for status, code in EXIT_CODES.items()} == {
        "accepted": 0,
        "rejected": 1,
        "failed": 1,
        "error": 2,
    }
